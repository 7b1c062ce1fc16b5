"""MNIST with context parallelism: each process has a share of each sequence.  python -m variants.mnist_context_parallel

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


class Block(nn.Module):
    """Tokens [N, tokens, WIDTH] -> the same shape: attention, then two linear layers, each added to its input."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts = counts  # of tokens, on each rank
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = RingAttention.apply(q, k, v, self.counts)  # of this rank's tokens; each looks at those of all ranks
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def share(tokens):
    """[N, tokens, ...] -> this rank's share of the tokens; the shares may differ by one."""
    return tokens.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]


class RingAttention(torch.autograd.Function):
    """Attention to the tokens of all ranks.  In each turn, the keys and values of one rank arrive from the ring.

    Forward is an online softmax: it corrects its sums when a larger score arrives.  Backward needs logsumexp, not them.
    """

    @staticmethod
    def forward(ctx, q, k, v, counts):
        maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)  # of each query's scores so far
        denominator, output = torch.zeros_like(maximum), torch.zeros_like(q)
        part = torch.stack([k, v])
        for turn in range(len(counts)):
            keys, values = part
            scores = q @ keys.mT * q.shape[-1] ** -0.5
            previous, maximum = maximum, torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights, correction = (scores - maximum).exp(), (previous - maximum).exp()
            denominator = correction * denominator + weights.sum(-1, keepdim=True)
            output = correction * output + weights @ values
            if turn < len(counts) - 1:
                part = pass_on(part, counts, turn)
        output /= denominator
        logsumexp = maximum + denominator.log()  # log(sum of exp(score)), over the keys of all ranks
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.counts = counts
        return output

    @staticmethod
    def backward(ctx, d_output):
        q, k, v, output, logsumexp = ctx.saved_tensors
        scale, d_q = q.shape[-1] ** -0.5, torch.zeros_like(q)
        delta = (d_output * output).sum(-1, keepdim=True)  # rowsum(dO * O)
        part = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])  # their gradients travel with them
        for turn in range(len(ctx.counts)):
            keys, values, d_keys, d_values = part  # views: += changes the part
            probabilities = (q @ keys.mT * scale - logsumexp).exp()
            d_scores = probabilities * (d_output @ values.mT - delta) * scale
            d_q += d_scores @ keys
            d_keys += d_scores.mT @ q
            d_values += probabilities.mT @ d_output
            part = pass_on(part, ctx.counts, turn)
        return d_q, *part[2:], None  # this rank's keys and values are at home again, with their gradients


def pass_on(part, counts, turn):
    """Send a part to the next rank, and take the one of the rank before; after the last turn each is at home again."""
    rank, world_size = dist.get_rank(), len(counts)
    if world_size == 1:
        return part
    count = counts[(rank - turn - 1) % world_size]  # the tokens of the rank where that part is at home
    arrived = part.new_empty(*part.shape[:-2], count, part.shape[-1])
    send = torch_dist.P2POp(torch_dist.isend, part.contiguous(), (rank + 1) % world_size)
    receive = torch_dist.P2POp(torch_dist.irecv, arrived, (rank - 1) % world_size)
    for work in torch_dist.batch_isend_irecv([send, receive]):
        work.wait()
    return arrived


class Transformer(nn.Module):
    """Images [N, channels, side, side] -> logits [N, 10]: an image is a sequence of patches, its tokens."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels * PATCH**2, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn((side // PATCH) ** 2, WIDTH))
        counts = [len(part) for part in self.positions.tensor_split(dist.get_world_size())]
        self.blocks = nn.Sequential(Block(counts), Block(counts))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, images):
        patches = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)  # [N, tokens, channels * PATCH**2]
        x = self.blocks(self.embed(share(patches)) + share(self.positions[None]))
        return dist.all_reduce(self.head(self.norm(x).sum(1) / len(self.positions)))  # in place, unseen by autograd


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch; return the sum of the losses and the number of examples (float64, shape [2])."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        for p in model.parameters():
            torch_dist.all_reduce(p.grad)  # the sum: each rank's gradient is that of its own tokens
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
    return sums.cpu()


def main(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU
    torch.manual_seed(args.seed)  # equal seeds give equal weights

    batch_size = args.batch_size  # all processes see the same images, and each some tokens of each image
    train_set, test_set = data.load(args.dataset, args.data_dir, 2 * batch_size if args.dry_run else None)
    train_sampler = dist.data_sampler(train_set, distributed=False, seed=args.seed)
    test_sampler = dist.data_sampler(test_set, distributed=False, shuffle=False)
    train_loader = data.loader(train_set, batch_size, train_sampler)
    test_loader = data.loader(test_set, batch_size, test_sampler)

    model = Transformer(train_set.channels, train_set.side).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, batch size {batch_size} on every rank")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device)
        seconds = time.perf_counter() - epoch_started
        tested = evaluate(model, test_loader, device)
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
    if dist.count_processes(args.nproc) > 16:
        parser.error("there are 16 tokens to share out: start at most 16 processes")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
