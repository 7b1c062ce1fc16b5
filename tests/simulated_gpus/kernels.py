"""The kernels of simulated GPUs: each of torch's operators for CUDA runs the CPU's kernel on the same memory.

Tensors stay CUDA tensors for torch: devices, streams, autocast, autograd and the caching allocator are torch's own.
As on a GPU, tensors of different devices in one operation are an error.
"""

import ctypes

RUNTIME = ctypes.CDLL(None)  # cuda.cpp, which is loaded first
# Operators that torch's CUDA backend does itself, because they compute nothing: it makes tensors, or looks at them.
TORCHS_OWN = """empty empty_strided resize_ set_ record_stream is_pinned _pin_memory _local_scalar_dense is_set_to
_to_copy"""
# Operators without a CUDA kernel of their own that must be computed here all the same.
ALSO = "copy_ convolution convolution_backward"
# Operators that take tensors of several devices.
SEVERAL_DEVICES = "copy_ _copy_from _copy_from_and_resize index_put_ index _index_put_impl_ set_data"


def install(torch):
    """When torch has just been imported."""
    library = install.library = torch.library.Library("aten", "IMPL", "CUDA")
    own = batch_norms(torch)
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operator = name.partition("::")
        operator, _, overload = operator.partition(".")
        on_cpu = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") or operator in ALSO.split()
        if space != "aten" or operator in [*TORCHS_OWN.split(), *own] or not (on_cpu and on_cuda):
            continue
        schema = torch._C._get_schema(f"aten::{operator}", overload)
        if not any(result.alias_info and not result.alias_info.is_write for result in schema.returns):  # no view
            library.impl(name, kernel(torch, operator, overload or "default", schema))
    for operator, function in own.items():
        library.impl(operator, function)
    torch.cuda.nccl.is_available = lambda tensors: False  # NCCL between the GPUs of one process
    torch.nn.parallel.comm.broadcast_coalesced = lambda tensors, devices, *_: [
        [tensor.to(torch.device("cuda", device)) for tensor in tensors] for device in devices
    ]


def on_the_cpu(torch, tensor):
    """The same memory, as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    values = torch.frombuffer(memory, dtype=tensor.dtype, count=storage.nbytes() // tensor.element_size())
    return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def kernel(torch, operator, overload, schema):
    """The function that computes this operator for tensors of GPUs."""
    name = ctypes.c_char_p(operator.encode())  # kept: the profiler reads it later
    outputs = {a.name for a in schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}
    takes_tensor = [str(argument.type) == "Tensor" for argument in schema.arguments]

    def run(*args, **kwargs):
        call = Call(torch)
        args = call.to_cpu(args)
        kwargs = {name: call.to_cpu(value, name in outputs) for name, value in kwargs.items()}
        if call.device and len(call.places) > 1 and operator not in SEVERAL_DEVICES.split():
            places = " and ".join(sorted(map(str, call.places)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} in {operator}")
        is_copy = operator == "copy_"
        if is_copy and call.copies_later(*args):
            return call.to_gpu(args[0])
        is_across = is_copy and len(call.pairs) == 2  # the other tensor is the CPU's
        call.wait(name, blocks=is_across and args[2:] != (True,))
        function = getattr(torch.ops.aten, operator)
        if not any(map(is_number_for_tensor, takes_tensor, args)):  # as in x % 4: torch finds the overload
            function = getattr(function, overload)
        results = function(*args, **kwargs)
        for cpu, gpu in call.outputs:
            gpu.resize_(cpu.size())
            on_the_cpu(torch, gpu).copy_(cpu)
        return call.to_gpu(results)

    return run


def is_number_for_tensor(takes_tensor, value):
    return takes_tensor and isinstance(value, (bool, int, float))


class Call:
    """The tensors of one call: each of a GPU, and the one of the CPU that stands for it."""

    def __init__(self, torch):
        self.torch, self.device = torch, None
        self.gpus = set()  # their numbers
        self.places = set()  # the devices of the tensors, but for numbers on the CPU
        self.pairs = {}  # by the id of either tensor: both
        self.outputs = []  # pairs that the kernel may resize
        self.stream = torch._C._cuda_getCurrentRawStream

    def to_cpu(self, value, is_output=False):
        torch = self.torch
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_cpu(part, is_output) for part in value)
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = value
            self.gpus.add(torch.cuda.current_device() if value.index is None else value.index)
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None  # the CPU's own
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() or value.is_cuda:  # a number on the CPU may be combined with any tensor
            self.places.add(value.device)
        if not value.is_cuda:
            return value
        self.device = self.device or value.device
        self.gpus.add(value.device.index)
        if id(value) not in self.pairs:
            cpu = on_the_cpu(torch, value)
            if is_output:
                cpu = torch.empty_like(cpu)
                self.outputs.append((cpu, value))
            self.pairs[id(value)] = self.pairs[id(cpu)] = cpu, value
        return self.pairs[id(value)][0]

    def wait(self, name, blocks):
        """What is computed next comes after what the streams have to do; with `blocks` the host waits for it, too."""
        for gpu in self.gpus:
            RUNTIME.sim_kernel(gpu, ctypes.c_void_p(self.stream(gpu)), name, blocks)

    def copies_later(self, to, source, non_blocking=False):
        """Whether this copy is one that a GPU makes alone: within its memory, or into pinned memory of the host."""
        alike = to.dtype == source.dtype and to.size() == source.size()
        if not (alike and to.is_contiguous() and source.is_contiguous() and len(self.gpus) == 1):
            return False
        is_within = len(self.pairs) == 4
        if not is_within and not (non_blocking and to.is_pinned()):
            return False
        (gpu,) = self.gpus
        numbers = self.stream(gpu), to.data_ptr(), source.data_ptr(), to.nbytes
        RUNTIME.sim_copy(gpu, *map(ctypes.c_void_p, numbers))
        return True

    def to_gpu(self, value):
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_gpu(part) for part in value)
        if not isinstance(value, self.torch.Tensor) or value.is_cuda or not self.device:
            return value
        if id(value) in self.pairs:
            return self.pairs[id(value)][1]
        gpu = self.torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.device)
        on_the_cpu(self.torch, gpu).copy_(value)
        return gpu


def batch_norms(torch):
    """cuDNN's batch normalisation, and the parts of SyncBatchNorm: the CPU has none of these operators."""
    aten = torch.ops.aten

    def columns(x):  # a row for each example and pixel, a column for each channel
        return x.float().movedim(1, -1).flatten(0, -2)

    def like(rows, x):
        return rows.view(x.movedim(1, -1).shape).movedim(-1, 1).to(x.dtype)

    def cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
        results = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return *results, torch.empty(0, dtype=torch.uint8, device=x.device)

    def cudnn_batch_norm_backward(x, grad, weight, mean, var, saved_mean, saved_invstd, eps, reserve):
        mask = [True, True, True]
        return aten.native_batch_norm_backward(grad, x, weight, mean, var, saved_mean, saved_invstd, True, eps, mask)

    def stats(x, eps):
        rows = columns(x)
        return rows.mean(0), (rows.var(0, unbiased=False) + eps).rsqrt()

    def gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
        counts = counts.to(means.dtype).view(-1, 1)
        n = counts.sum()
        mean = (means * counts).sum(0) / n
        var = ((invstds**-2 - eps + (means - mean) ** 2) * counts).sum(0) / n
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * n / (n - 1), momentum)
        return mean, (var + eps).rsqrt()

    def elemt(x, weight, bias, mean, invstd, eps):
        return like((columns(x) - mean) * invstd * weight + bias, x)

    def backward_reduce(grad, x, mean, invstd, weight, *_):
        sum_dy = columns(grad).sum(0)
        sum_dy_xmu = (columns(grad) * (columns(x) - mean)).sum(0)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()

    def backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
        n = counts.sum()
        rows = columns(grad) - sum_dy / n - (columns(x) - mean) * invstd**2 * sum_dy_xmu / n
        return like(rows * invstd * weight, x)

    return {
        "cudnn_batch_norm": cudnn_batch_norm,
        "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }
