"""MNIST with expert parallelism: each process has some of the experts.  python -m variants.mnist_experts

Add --dataset synthetic to train without a download.  docs/progression.md explains the steps.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn

import data
import distributed as dist  # this project's file, not torch.distributed

WIDTH, HEADS, PATCH = 64, 4, 7  # of CIFAR-10's 32 x 32 pixels, the model uses 28 x 28
EXPERTS = 4  # in each layer, of all processes together


class Exchange(torch.autograd.Function):
    """Rows to other ranks: sent[r] of them go to rank r, received[r] come from it.  Backward sends gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = received, sent
        outputs = rows.new_empty(sum(received), WIDTH)
        torch_dist.all_to_all_single(outputs, rows.contiguous(), received, sent)
        return outputs

    @staticmethod
    def backward(ctx, gradients):
        return Exchange.apply(gradients, *ctx.counts), None, None


class Experts(nn.Module):
    """Tokens [N, tokens, WIDTH] -> the same shape: the router chooses one expert for each token (top-1 routing)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        ]
        self.mine = torch.arange(EXPERTS).chunk(dist.get_world_size())[dist.get_rank()].tolist()
        self.experts = nn.ModuleList(expert if i in self.mine else None for i, expert in enumerate(experts))

    def forward(self, x):
        tokens, rank, n = x.flatten(0, 1), dist.get_rank(), dist.get_world_size()
        probabilities = self.router(tokens).softmax(1)
        weights, chosen = probabilities.max(1)  # top-1
        counts = torch.empty(n, EXPERTS, dtype=torch.int64, device=x.device)
        torch_dist.all_gather(list(counts), chosen.bincount(minlength=EXPERTS))  # all ranks' tokens for each expert
        # Shares of all ranks' tokens, but probabilities of this rank's: DDP takes the mean of their gradients.
        self.auxiliary_loss = EXPERTS * (counts.sum(0) / counts.sum() * probabilities.mean(0)).sum()

        sent = counts[rank].view(n, -1).sum(1).tolist()
        arriving = counts[:, self.mine]  # from each rank, for each expert here
        received = arriving.sum(1).tolist()
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        dispatched = Exchange.apply(tokens[order], sent, received).split(arriving.flatten().tolist())
        outputs = [self.experts[i](part) for i, part in zip(self.mine * n, dispatched, strict=True)]
        combined = Exchange.apply(torch.cat(outputs), received, sent)[order.argsort()]  # in the tokens' own order
        return (weights[:, None] * combined).view_as(x)  # so that the router learns, too


class Block(nn.Module):
    """Tokens [N, tokens, WIDTH] -> the same shape: attention, then experts; each adds to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Experts()

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)  # [N, HEADS, tokens, WIDTH / HEADS]: each attends to all
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Images [N, channels, side, side] -> logits [N, 10]: an image is a sequence of patches, its tokens."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels * PATCH**2, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn((side // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, images):
        patches = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)  # [N, tokens, channels * PATCH**2]
        x = self.blocks(self.embed(patches) + self.positions)
        return self.head(self.norm(x).mean(1))


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch; return the sum of the losses and the number of examples (float64, shape [2])."""
    model.train()
    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        loss = F.cross_entropy(model(images), labels)
        (loss + 0.01 * sum(layer.auxiliary_loss for layer in layers)).backward()
        for layer in layers:
            for p in layer.experts.parameters():
                p.grad /= dist.get_world_size()  # a sum over all ranks' tokens already; DDP averages the others
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    return sums.cpu()  # waits for the device, so the measured time includes all of its work


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the number of correct answers and the number of examples (float64, shape [2])."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        sums[0] += (model(images).argmax(1) == labels).sum()
        sums[1] += len(labels)
    if len(loader) < -(-len(loader.dataset) // (loader.batch_size * dist.get_world_size())):  # rank 0's batches
        model(images)  # once more: the last batch of other ranks needs this rank's experts
    return sums.cpu()


def main(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU
    torch.manual_seed(args.seed)  # equal seeds give equal weights

    batch_size = args.batch_size // world_size  # each process's share
    global_batch = batch_size * world_size  # less than --batch-size if that can't be divided evenly
    train_set, test_set = data.load(args.dataset, args.data_dir, 2 * global_batch if args.dry_run else None)
    train_sampler = dist.data_sampler(train_set, seed=args.seed)  # different examples per rank, padded to equal shares
    test_sampler = dist.data_sampler(test_set, shuffle=False, pad=False)  # each example exactly once
    train_loader = data.loader(train_set, batch_size, train_sampler)
    test_loader = data.loader(test_set, batch_size, test_sampler)

    model = Transformer(train_set.channels, train_set.side).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if ".experts." in name]
    model = dist.prepare_ddp_model(model)  # averages the gradients of all processes, but not those of the experts
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, global batch {global_batch} = {world_size} x {batch_size}")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device)
        seconds = time.perf_counter() - epoch_started
        tested = evaluate(model, test_loader, device)
        dist.all_reduce(trained)  # in place, so these are now the sums over all processes
        dist.all_reduce(tested)
        loss, seen = trained.tolist()
        correct, count = tested.tolist()
        dist.print_primary(
            f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  "
            f"accuracy {correct / count:.2%} ({correct:.0f}/{count:.0f})  {seen / seconds:.0f} images/s"
        )
    dist.print_primary(f"done in {time.perf_counter() - started:.1f} s")
    dist.cleanup()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="mnist", choices=data.DATASETS, help="dataset (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of the dataset (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=200, help="global batch size (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.005, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed for weights and order (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="run only one epoch of two batches, as a smoke test")
    parser.add_argument("--nproc", type=int, help="processes to start (default: one per GPU, or 2 without a GPU)")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or not 0 < args.lr < float("inf") or not 0 <= args.seed < 2**32:
        parser.error("--epochs and --batch-size must be at least 1, --lr positive and finite, --seed 0 to 2**32 - 1")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    if EXPERTS % dist.count_processes(args.nproc):
        parser.error(f"{EXPERTS} experts must be shared out equally: start 1, 2 or 4 processes")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
