"""What the simulated NCCL and the CPU lack: one process with several GPUs, and SyncBatchNorm's operators."""


def install(torch):
    import torch.nn.parallel.comm as comm

    def broadcast_coalesced(tensors, devices, buffer_size=10485760):
        devices = [torch._utils._get_device_index(d) for d in devices]
        return [[t if t.get_device() == d else t.to(f"cuda:{d}") for t in tensors] for d in devices]

    comm.broadcast_coalesced = broadcast_coalesced
    torch.cuda.nccl.is_available = lambda tensors: False

    lib = torch.library.Library("aten", "IMPL", "CUDA")

    def dims(x):
        return [d for d in range(x.dim()) if d != 1]

    def shape(v, x):
        return v.view([1, -1] + [1] * (x.dim() - 2))

    def stats(x, eps):
        x = x.float()
        m = x.mean(dims(x))
        v = x.var(dims(x), unbiased=False)
        return m, (v + eps).rsqrt()

    def gather_stats(x, mean, invstd, rm, rv, momentum, eps, counts):
        counts = counts.to(mean.dtype).view(-1, 1)
        n = counts.sum()
        m = (mean * counts).sum(0) / n
        v = ((1 / invstd**2 - eps) * counts + counts * (mean - m) ** 2).sum(0) / n
        if rm is not None:
            rm.mul_(1 - momentum).add_(momentum * m)
        if rv is not None:
            rv.mul_(1 - momentum).add_(momentum * v * n / (n - 1))
        return m, (v + eps).rsqrt()

    def elemt(x, w, b, mean, invstd, eps):
        y = (x.float() - shape(mean, x)) * shape(invstd, x)
        if w is not None:
            y = y * shape(w, x)
        if b is not None:
            y = y + shape(b, x)
        return y.to(x.dtype)

    def backward_reduce(g, x, mean, invstd, w, ig, wg, bg):
        gf, xf = g.float(), x.float()
        sum_dy = gf.sum(dims(g))
        sum_dy_xmu = (gf * (xf - shape(mean, x))).sum(dims(g))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd if wg else None, sum_dy.clone() if bg else None

    def backward_elemt(g, x, mean, invstd, w, sum_dy, sum_dy_xmu, count):
        n = count.sum().to(torch.float32)
        gf, xf = g.float(), x.float()
        r = gf - shape(sum_dy / n, x) - (xf - shape(mean, x)) * shape(invstd**2 * sum_dy_xmu / n, x)
        r = r * shape(invstd, x)
        if w is not None:
            r = r * shape(w, x)
        return r.to(x.dtype)

    for name, f in {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }.items():
        lib.impl(name, f)

    def cudnn_batch_norm(x, w, b, rm, rv, training, momentum, eps):
        y, mean, invstd = torch.ops.aten.native_batch_norm(x, w, b, rm, rv, training, momentum, eps)
        return y, mean, invstd, torch.empty(0, dtype=torch.uint8, device=x.device)

    def cudnn_batch_norm_backward(x, g, w, rm, rv, mean, invstd, eps, reserve):
        return torch.ops.aten.native_batch_norm_backward(g, x, w, rm, rv, mean, invstd, True, eps, [True, True, True])

    lib.impl("cudnn_batch_norm", cudnn_batch_norm)
    lib.impl("cudnn_batch_norm_backward", cudnn_batch_norm_backward)
    # convolution_backward with the layouts that cuDNN's code path (ATen/native/cudnn/ConvShared.cpp) gives its results
    on_the_cpu = torch.ops.simulated.on_the_cpu
    CL, NCHW = torch.channels_last, torch.contiguous_format

    def suggest(t):  # Tensor::suggest_memory_format
        m = 0
        if t.dim() != 4 or t.stride(1) == 0:
            return NCHW
        for d in (1, 3, 2, 0):
            if t.size(d) == 0 or t.stride(d) < m or (d == 0 and m == t.stride(1)):
                return NCHW
            m = t.stride(d) * max(1, t.size(d))
        return CL

    def either(a, b):
        return CL if CL in (suggest(a), suggest(b)) else NCHW

    def conv_backward(g, x, w, bias, stride, padding, dilation, transposed, output_padding, groups, mask):
        h = on_the_cpu
        gx, gw, gb = torch.ops.aten.convolution_backward(
            h(g), h(x), h(w), bias, stride, padding, dilation, transposed, output_padding, groups, mask
        )

        def out(c, layout):
            if c is None:
                return None
            r = torch.empty(c.shape, dtype=c.dtype, device=x.device, memory_format=layout if c.dim() == 4 else NCHW)
            h(r).copy_(c)
            return r

        x = x.contiguous(memory_format=either(x, w))
        g = g.contiguous(memory_format=suggest(x))
        return out(gx, either(g, w)), out(gw, either(x, g)), out(gb, NCHW)

    lib.impl("convolution_backward", conv_backward)
    install.lib = lib
