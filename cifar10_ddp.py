"""CIFAR-10 in a realistic training run: everything from the MNIST scripts, and runs that survive being killed.

    python cifar10_ddp.py --amp                                        # all visible GPUs; without one, two processes
    CUDA_VISIBLE_DEVICES=0 python cifar10_ddp.py --amp                 # one GPU
    python cifar10_ddp.py --amp --resume runs/NAME                     # continue a stopped run, with the same flags
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 cifar10_ddp.py --amp         # resumes by itself
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST --master_port=29500 cifar10_ddp.py --amp

--dataset synthetic needs no download, --help lists the flags, docs/cifar10.md describes the files in the run's folder.
"""

import argparse
import difflib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import checkpoint
import data
import distributed as dist
import report

# These flags change the result, so a resumed run must have the same values.
MUST_MATCH = ["dataset", "model", "width", "amp", "epochs", "batch_size", "lr"]
MUST_MATCH += ["weight_decay", "warmup", "label_smoothing", "seed", "dry_run"]


# ------------------------------------------------------------------------------------------------------------ models


def conv(inputs, outputs, pool=False):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
    if pool:  # before BatchNorm and ReLU: they then have a quarter of the work
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.BatchNorm2d(outputs))
    layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 8  # the logits are small at first, so that the learning rate can be high


def resnet9(width: int) -> nn.Module:
    """The small residual net of David Page's "How to train your ResNet": [N, 3, 32, 32] -> [N, 10]."""
    w = width
    return nn.Sequential(
        conv(3, w),
        conv(w, 2 * w, pool=True),
        Residual(conv(2 * w, 2 * w), conv(2 * w, 2 * w)),
        conv(2 * w, 4 * w, pool=True),
        conv(4 * w, 8 * w, pool=True),
        Residual(conv(8 * w, 8 * w), conv(8 * w, 8 * w)),
        nn.MaxPool2d(4),
        nn.Flatten(),
        Scaled(8 * w, 10),
    )


def build(name: str, width: int | None) -> nn.Module:
    """The model with this name: [N, 3, 32, 32] -> [N, 10].  width: for resnet9.  ValueError if the name is unknown."""
    known = ["resnet9", *torchvision.models.list_models(module=torchvision.models)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or ["resnet9", "resnet18"]
        raise ValueError(f"--model {name} is unknown; the nearest: {', '.join(near)}")
    if name == "resnet9":
        return resnet9(width)
    options = {}
    if name.startswith("vit_"):
        options["image_size"] = 32
    if name == "googlenet":
        options["aux_logits"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two models warn that their initial weights will change one day
        model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    if name == "resnet18":  # the usual first layer for small images; the original is for 224 x 224
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def check_model(name: str, width: int | None, error: Callable[[str], None]) -> None:
    """Call `error` with one line if the model is unknown, or can't take images of 32 x 32."""
    try:
        with torch.device("meta"):  # tensors without data: this needs no memory and no time
            build(name, width).eval()(torch.empty(1, 3, 32, 32))
    except NotImplementedError:  # a few models can't run on "meta", but they can take 32 x 32
        pass
    except ValueError as problem:  # from `build`
        error(str(problem))
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition("\n")[0][:120]
        error(f"--model {name} can't take pictures of 32 x 32 ({reason}): try resnet18")


# --------------------------------------------------------------------------------------------- training and evaluation


def train_step(images, labels, dtype, label_smoothing, model, optimizer, scheduler, scaler):
    """One step on this process's share of a batch; returns the mean loss of this share."""
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        loss = F.cross_entropy(model(images), labels, label_smoothing=label_smoothing)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    return loss.detach()


class Evaluation(NamedTuple):
    """Means over all examples of a data set: the loss, and how many are right in the top 1, 3 and 5."""

    loss: float
    top1: float
    top3: float
    top5: float
    count: int  # the number of examples

    def metrics(self, prefix):
        """The means, by the names that they have in metrics.csv."""
        means = {"loss": self.loss, "top1": self.top1, "top3": self.top3, "top5": self.top5}
        return {f"{prefix}_{name}": mean for name, mean in means.items()}


@torch.no_grad()
def evaluate(model, loader, device, dtype, stop):
    """Every process evaluates its share, and gets the means over all examples.

    If this process has received SIGTERM, it stops early: the means are then wrong, and the run ends.
    """
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        right = logits.topk(5).indices == labels.view(-1, 1)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += right[:, :1].sum()
        sums[2] += right[:, :3].sum()
        sums[3] += right[:, :5].sum()
        sums[4] += len(labels)
        if stop.asked:
            break
    loss, top1, top3, top5, count = dist.all_reduce(sums.cpu()).tolist()
    return Evaluation(loss / count, top1 / count, top3 / count, top5 / count, int(count))


def lr_factor(step, args, steps_per_epoch):
    """The learning rate of this step, divided by --lr: it rises linearly during the warm-up, then falls linearly."""
    total = args.epochs * steps_per_epoch
    rise = max(1, round(args.warmup * args.epochs * steps_per_epoch))
    fall = max(1, total - rise)
    return min((step + 1) / rise, (total - step) / fall)


def fast_dtype(device):
    """The fast precision of this device: float16 on GPUs before Ampere (8.0), float32 on CPUs without bf16 units."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else torch.float32


# ---------------------------------------------------------------------------------------------------------- the run


class Progress:
    """How far the run is: `epoch` epochs are done, and `batch` batches of the current one.

    steps: the number of batches in an epoch.  state: what `keeper.restore` has returned; {} for a new run.
    """

    def __init__(self, keeper, reporter, steps, state, device):
        self.keeper, self.reporter, self.steps = keeper, reporter, steps
        self.epoch = state.get("epoch", 0)
        self.batch = state.get("batch", 0)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # this process's losses and examples, this epoch
        if state and len(state["sums"]) == dist.get_world_size():
            self.sums += state["sums"][dist.get_rank()].to(device)
        elif state and dist.is_primary():  # the number of processes has changed: rank 0 takes the sums of all
            self.sums += state["sums"].sum(0).to(device)

    def __str__(self):
        return f"epoch {self.epoch + 1}, batch {self.batch} of {self.steps}"

    def add_batch(self, loss, examples):
        self.batch += 1
        self.sums[0] += loss * examples
        self.sums[1] += examples

    def next_epoch(self):
        self.epoch += 1
        self.batch = 0
        self.sums.zero_()

    def mean_loss(self):
        """Over the examples that all processes have seen in this epoch."""
        loss, seen = dist.reduce(self.sums, "sum").tolist()
        return loss / seen

    def save(self, score=None):
        """Save a checkpoint, on every rank."""
        sums = torch.stack(dist.gather(self.sums))
        done = {"history": self.reporter.history, "epoch": self.epoch, "batch": self.batch, "sums": sums}
        self.keeper.save(self.epoch * self.steps + self.batch, score, **done)

    def stop_if_told(self, stop, folder):
        """If any process has received SIGTERM: save a checkpoint, and exit with 143."""
        if stop.agreed():
            self.save()
            self.reporter.log(f"SIGTERM: saved at {self}; go on with --resume {folder}")
            dist.cleanup()
            sys.exit(143)


def main(local_rank, world_size, args, start):
    dist.init_process_group(backend=args.backend)
    stop = checkpoint.Preemption()  # from here on, SIGTERM is noted and doesn't end the process
    start = checkpoint.from_primary(start)  # under torchrun only rank 0 has it
    name = f"{args.model}-{torch.distributed.get_backend()}-{world_size}"
    folder = start.folder or report.new_folder(Path(args.output_dir), name)
    try:
        run(args, start, folder, stop)
    except checkpoint.CheckpointError as problem:  # for example, the disk is full
        again = f": mend that, then go on with --resume {folder}" if (folder / "last.pt").exists() else ""
        sys.exit(f"{Path(__file__).name}: error: {problem}{again}")
    dist.cleanup()


def run(args, start, folder, stop):
    device = dist.get_device()
    batch_size = args.batch_size // dist.get_world_size()  # this process's share of the global batch
    augmented_loader, train_loader, test_loader = make_loaders(args, batch_size)
    steps = len(augmented_loader)  # of one epoch
    dtype = choose_dtype(args, start, device)
    parts = make_parts(args, steps, dtype, device)
    progress, reporter = start_or_resume(args, start, folder, parts, dtype, steps)

    started = time.perf_counter()
    while progress.epoch < args.epochs:
        row = {"epoch": progress.epoch + 1}
        augmented_loader.sampler.set_epoch(progress.epoch, skip=progress.batch * batch_size)  # another order
        augmented_loader.dataset.set_epoch(progress.epoch)  # other crops and flips
        first_batch, epoch_started = progress.batch, time.perf_counter()
        parts["model"].train()
        for images, labels in data.batches(augmented_loader, device):
            loss = train_step(images, labels, dtype, args.label_smoothing, **parts)
            progress.add_batch(loss, len(labels))
            progress.stop_if_told(stop, folder)
            if progress.batch % args.checkpoint_every == 0 and progress.batch < steps:
                progress.save()
        row["training_loss"] = progress.mean_loss()
        row["training_lr"] = args.lr * lr_factor(row["epoch"] * steps - 1, args, steps)  # of the last step
        if progress.batch > first_batch:  # if the run was stopped in the evaluation, no batch was left
            trained_on = (progress.batch - first_batch) * batch_size * dist.get_world_size()
            row["training_images_per_s"] = trained_on / (time.perf_counter() - epoch_started)
        tested = None
        if row["epoch"] % args.validate_every == 0 or row["epoch"] == args.epochs:
            trained = evaluate(parts["model"], train_loader, device, dtype, stop)
            tested = evaluate(parts["model"], test_loader, device, dtype, stop)
            progress.stop_if_told(stop, folder)
            row |= trained.metrics("train") | tested.metrics("test")
        reporter.add(row)
        progress.next_epoch()
        progress.save(row.get("test_top1"))
        reporter.log(epoch_line(row, args.epochs, tested))
    reporter.close()
    report.note_run(folder, done=True)
    reporter.log(f"done in {time.perf_counter() - started:.1f} s")


def epoch_line(row, epochs, tested):
    """What is printed after an epoch; tested: the `Evaluation` of the test set, or None."""
    text = f"epoch {row['epoch']}/{epochs}  loss {row['training_loss']:.4f}"
    if "training_images_per_s" in row:
        text += f"  {row['training_images_per_s']:.0f} images/s"
    if tested:
        text += f"  train {row['train_top1']:.2%}"
        text += f"  test {tested.top1:.2%} ({tested.top1 * tested.count:.0f}/{tested.count})"
        text += f"  top-3 {tested.top3:.2%}  top-5 {tested.top5:.2%}"
    return text


def make_loaders(args, batch_size):
    """Three loaders: the augmented train set for training, the train set and the test set for evaluation."""
    limit = 2 * batch_size * dist.get_world_size() if args.dry_run else None
    train_set, test_set = data.load(args.dataset, args.data_dir, limit, colour=True)
    augmented_set = data.Augmented(train_set, args.seed)
    sampler = dist.data_sampler(augmented_set, seed=args.seed)
    loaders = [data.loader(augmented_set, batch_size, sampler, drop_last=True)]
    if not len(loaders[0]):
        sys.exit(f"--batch-size {args.batch_size} is too large for the {len(train_set)} examples of {args.dataset}")
    for dataset in train_set, test_set:
        sampler = dist.data_sampler(dataset, shuffle=False, pad=False)  # every example exactly once
        loaders.append(data.loader(dataset, 512, sampler))
    return loaders


def choose_dtype(args, start, device):
    """The precision: the same on every rank, and the same before and after resuming."""
    if start.path:
        return getattr(torch, start.config["dtype"])
    return checkpoint.from_primary(fast_dtype(device) if args.amp else torch.float32)


def make_parts(args, steps, dtype, device):
    """All that training changes and a checkpoint holds: model, optimizer, scheduler and scaler."""
    torch.manual_seed(args.seed)  # the same initial weights in every process
    model = build(args.model, args.width).to(device, memory_format=torch.channels_last)
    torch.manual_seed(args.seed + dist.get_rank())  # from here on, each process draws its own numbers, for dropout
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": args.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args, steps))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # bfloat16 has float32's range
    model = dist.prepare_ddp_model(model)  # averages the gradients of all processes
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def start_or_resume(args, start, folder, parts, dtype, steps):
    """Restore `parts` from the checkpoint, if there is one.  Returns how far the run is, and its report."""
    world_size, device = dist.get_world_size(), dist.get_device()
    batch_size = args.batch_size // world_size
    config = {name: getattr(args, name) for name in MUST_MATCH} | {"global_batch": batch_size * world_size}
    config |= {"dtype": str(dtype).removeprefix("torch."), "processes": world_size, "torch": str(torch.__version__)}
    keeper = checkpoint.Keeper(folder, config, **parts)
    state = keeper.restore(start.path)
    reporter = report.Report(folder, config, state.get("history"), args.clearml)
    progress = Progress(keeper, reporter, steps, state, device)

    parameters = sum(parameter.numel() for parameter in parts["model"].parameters())
    reporter.log(f"{args.model}, {parameters:,} parameters, on {args.dataset}, {device}, {config['dtype']}")
    if args.amp and dtype == torch.float32:
        reporter.log("--amp does nothing here: this CPU has no bf16 instructions, and computes faster in float32")
    shares = f"{config['global_batch']} = {world_size} x {batch_size}"
    reporter.log(f"global batch {shares}; everything is in {folder}")
    if start.path:
        reporter.log(f"resuming {start.path} at {progress}")
    if not start.folder:
        progress.save()  # now, because a full disk should be noticed before the training
    report.note_run(folder)
    return progress, reporter


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--dataset", default="cifar10", choices=data.COLOUR_DATASETS, help=default)
    add("--data-dir", default="data", help=f"CIFAR-10 is kept here {default}")
    add("--epochs", type=int, default=24, help=default)
    add("--batch-size", type=int, default=512, help=f"of all processes together {default}")
    add("--lr", type=float, default=0.4, help=f"peak learning rate {default}")
    add("--seed", type=int, default=0, help=f"of weights, order and augmentation {default}")
    add("--dry-run", action="store_true", help="one epoch of two batches, to see that all of it runs")
    add("--amp", action="store_true", help="mixed precision: bfloat16, or float16 on GPUs before Ampere")
    add("--model", default="resnet9", help=f"resnet9, or a classification model of torchvision {default}")
    add("--width", type=int, help="channels of resnet9's first layer (default: 64; without a GPU, 24)")
    add("--weight-decay", type=float, default=5e-4, help=default)
    add("--warmup", type=float, default=0.2, help=f"part of the training in which the learning rate rises {default}")
    add("--label-smoothing", type=float, default=0.1, help=default)
    add("--validate-every", type=int, default=1, help=f"epochs; on the train and the test set {default}")
    add("--checkpoint-every", type=int, default=100, help=f"iterations; and after each epoch {default}")
    add("--output-dir", default="runs", help=f"gets a folder for each run {default}")
    add("--resume", metavar="PATH", help="a run's folder, to go on in it; or a checkpoint, to start a new run from it")
    add("--clearml", action="store_true", help="report to ClearML, too")
    args = dist.parse_args(parser)  # with --nproc and --backend
    check_flags(parser, args)
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args, find_start(parser, args)


def check_flags(parser, args):
    if min(args.epochs, args.batch_size, args.validate_every, args.checkpoint_every) < 1:
        parser.error("--epochs, --batch-size, --validate-every and --checkpoint-every must be at least 1")
    if not (0 < args.lr < float("inf") and 0 <= args.weight_decay < float("inf")):
        parser.error("--lr must be greater than 0, --weight-decay at least 0, both finite")
    if not (0 <= args.warmup <= 1 and 0 <= args.label_smoothing < 1):
        parser.error("--warmup must be from 0 to 1, --label-smoothing from 0 to less than 1")
    if args.width is not None and (args.width < 1 or args.model != "resnet9"):
        parser.error("--width is for resnet9 alone, and must be at least 1")
    if args.clearml and not importlib.util.find_spec("clearml"):
        parser.error("--clearml needs the package of that name: pip install clearml")
    if args.model == "resnet9" and args.width is None:
        args.width = 64 if torch.cuda.device_count() else 24
    check_model(args.model, args.width, error=parser.error)


def find_start(parser, args):
    """Where the run starts, on rank 0, which is the only one that reads and writes; None on the others."""
    if not dist.is_primary():
        return None
    flags = {name: getattr(args, name) for name in MUST_MATCH}
    start = report.find_start(args.output_dir, args.resume, flags, error=parser.error)
    processes = max(args.nproc, dist.get_world_size())
    if start.path and start.config["global_batch"] != args.batch_size // processes * processes:
        parser.error(
            f"{start.path} was trained with a global batch of {start.config['global_batch']}, "
            f"which {processes} processes can't share equally: start another number"
        )
    return start


if __name__ == "__main__":
    args, start = parse_args()
    dist.launch(main, args, start, nproc=args.nproc)
