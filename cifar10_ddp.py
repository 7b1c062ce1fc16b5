"""CIFAR-10 as one trains it for real: everything of the MNIST scripts, and runs that survive being killed.

    python cifar10_ddp.py --amp                                        # all visible GPUs; without one, two processes
    CUDA_VISIBLE_DEVICES=0 python cifar10_ddp.py --amp                 # one GPU
    python cifar10_ddp.py --amp --resume runs/NAME                     # go on where it was stopped: with the same flags
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 cifar10_ddp.py --amp             # goes on by itself
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST --master_port=29500 cifar10_ddp.py --amp

--dataset synthetic needs no download, --help lists the flags, README.md says what is in the run's folder.
"""

import argparse
import difflib
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import checkpoint
import data
import distributed as dist
import report

MUST_MATCH = (  # what a run can't change when it is resumed: the result would be another one
    ["dataset", "model", "width", "amp", "epochs", "batch_size", "global_batch", "lr"]
    + ["weight_decay", "warmup", "label_smoothing", "seed", "dry_run"]
)


# ------------------------------------------------------------------------------------------------------------ models


def conv(inputs, outputs, *pool):
    # Pooling first: normalisation and ReLU have a quarter of the work then.  Measured: a third of the time saved, no
    # accuracy lost.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), *pool, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 8  # small logits at first: the learning rate can be high from the start


def resnet9(width: int) -> nn.Module:
    """The small residual net of David Page's "How to train your ResNet", with max-pooling before BatchNorm.

    [N, 3, 32, 32] -> [N, 10].
    """
    w = width
    return nn.Sequential(
        *(conv(3, w), conv(w, 2 * w, nn.MaxPool2d(2)), Residual(conv(2 * w, 2 * w), conv(2 * w, 2 * w))),
        *(conv(2 * w, 4 * w, nn.MaxPool2d(2)), conv(4 * w, 8 * w, nn.MaxPool2d(2))),
        *(Residual(conv(8 * w, 8 * w), conv(8 * w, 8 * w)), nn.MaxPool2d(4), nn.Flatten(), Scaled(8 * w, 10)),
    )


def build(name: str, width: int | None) -> nn.Module:
    """The model of this name, with 10 classes: [N, 3, 32, 32] -> [N, 10].  width: resnet9's.  ValueError: unknown."""
    known = ["resnet9", *torchvision.models.list_models(module=torchvision.models)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or ["resnet9", "resnet18"]
        raise ValueError(f"--model {name} is unknown; the nearest: {', '.join(near)}")
    if name == "resnet9":
        return resnet9(width)
    options = {"image_size": 32} if name.startswith("vit_") else {"aux_logits": False} if name == "googlenet" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how two of them will be initialised one day
        model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    if name == "resnet18":  # the usual first layer for small pictures: its own and the pooling would quarter them
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def check_model(name: str, width: int | None) -> None:
    """ValueError, in one line, if there is no such model, or it can't take pictures of 32 x 32."""
    try:
        with torch.device("meta"):  # shapes alone: no memory, no time
            build(name, width).eval()(torch.empty(1, 3, 32, 32))
    except NotImplementedError:  # some can't be built so; none of these minds the size
        pass
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition("\n")[0][:120]
        raise ValueError(f"--model {name} can't take pictures of 32 x 32 ({reason}): try resnet18") from None


# --------------------------------------------------------------------------------------------- training and evaluation


def train(model, loader, optimizer, scheduler, device, autocast, scaler, label_smoothing, sums):
    """Yields after each step; adds this process's losses and its number of examples to sums, [2] float64."""
    model.train()
    for images, labels in data.batches(loader, device):
        with autocast:
            loss = F.cross_entropy(model(images), labels, label_smoothing=label_smoothing)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        yield


@torch.no_grad()
def evaluate(model, loader, device, autocast, stop):
    """The sum of the losses, how often the right class is among the first 1 to 5, the number of examples; [7] float64.

    This process's share.  It ends early once this process was told to stop.
    """
    model.eval()
    sums = torch.zeros(7, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        with autocast:
            logits = model(images).float()
        found = logits.topk(5).indices == labels.view(-1, 1)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1:6] += found.cumsum(1).sum(0)
        sums[6] += len(labels)
        if stop:
            break
    return sums.cpu()


def metrics(sums, prefix):
    loss, top1, _, top3, _, top5, count = sums.tolist()
    return {
        f"{prefix}_{name}": value / count for name, value in dict(loss=loss, top1=top1, top3=top3, top5=top5).items()
    }


def fast_dtype(device):
    """What this device computes fast in: float16 on GPUs before Ampere (8.0), float32 on CPUs without bf16 units."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else torch.float32


# --------------------------------------------------------------------------------------------------------------- main


def main(local_rank, world_size, args):
    try:
        run(local_rank, world_size, args)
    except checkpoint.CheckpointError as problem:  # a full disk, say
        again = f": mend that, then go on with --resume {args.folder}" if args.folder else ""
        sys.exit(f"{Path(__file__).name}: error: {problem}{again}")


def run(local_rank, world_size, args):
    dist.init_process_group(local_rank, world_size, args.backend, checked=args.dry_run)
    device, stop = dist.get_device(), checkpoint.Preemption()

    batch_size = args.batch_size // world_size  # this process's share of the global batch
    limit = 2 * batch_size * world_size if args.dry_run else None
    train_set, test_set = data.load(args.dataset, args.data_dir, limit, colour=True)
    augmented_set = data.Augmented(train_set, args.seed)
    train_sampler = dist.data_sampler(augmented_set, distributed=True, seed=args.seed)
    train_loader = data.loader(augmented_set, batch_size, train_sampler, drop_last=True)
    steps = len(train_loader)  # of one epoch
    if not steps:
        sys.exit(f"--batch-size {args.batch_size} is too large for the {len(train_set)} examples of {args.dataset}")
    exact = {"distributed": True, "shuffle": False, "pad": False}
    validation_loaders = [data.loader(part, 512, dist.data_sampler(part, **exact)) for part in (train_set, test_set)]

    torch.manual_seed(args.seed)  # the same initial weights in every process
    model = build(args.model, args.width).to(device, memory_format=torch.channels_last)
    torch.manual_seed(args.seed + dist.get_rank())  # from here on each process draws for itself: dropout
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )
    dtype = checkpoint.from_primary(args.dtype or (fast_dtype(device) if args.amp else torch.float32))  # one for all
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # bfloat16 has float32's range
    model = dist.prepare_ddp_model(model)  # averages the gradients of all processes
    total, rise = args.epochs * steps, max(1, round(args.warmup * args.epochs * steps))

    def schedule(step):  # the factor of the learning rate
        return min((step + 1) / rise, (total - step) / max(1, total - rise))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    # From the checkpoint, if there is one: all of the state, and where to go on.
    args.folder = resumed_folder = checkpoint.from_primary(args.folder)  # under torchrun only rank 0 has looked
    folder = resumed_folder or report.new_folder(Path(args.output_dir), args.model)
    config = {name: getattr(args, name) for name in MUST_MATCH}
    config |= {"dtype": str(dtype).removeprefix("torch."), "processes": world_size, "torch": str(torch.__version__)}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    keeper = checkpoint.Keeper(folder, config, **parts)
    state = keeper.restore(args.start)
    epoch, batch = state.get("epoch", 0), state.get("batch", 0)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if state and len(state["sums"]) == world_size:
        sums += state["sums"][dist.get_rank()].to(device)
    elif state and dist.is_primary():  # another number of processes: one of them takes it all
        sums += state["sums"].sum(0).to(device)
    reporter = report.Report(folder, config, state.get("history"), args.clearml)
    log = reporter.log

    def save(score=None):  # a collective
        position = {"epoch": epoch, "batch": batch, "sums": torch.stack(dist.gather(sums))}
        keeper.save(epoch * steps + batch, score, history=reporter.history, **position)
        args.folder = folder  # from now on there is something to go on with

    def stop_if_told():  # a collective
        if stop.agreed():
            save()
            log(f"SIGTERM: saved at epoch {epoch + 1}, batch {batch} of {steps}; go on with --resume {folder}")
            dist.cleanup()
            sys.exit(143)

    parameters = sum(part.numel() for part in model.parameters())
    log(f"{args.model}, {parameters:,} parameters, on {args.dataset}, {device}, {config['dtype']}")
    if args.amp and dtype == torch.float32:
        log("--amp does nothing here: this CPU has no bf16 instructions, and computes faster in float32")
    log(f"global batch {world_size * batch_size} = {world_size} x {batch_size}; everything is in {folder}")
    if state:
        log(f"resuming {args.start} at epoch {epoch + 1}, batch {batch} of {steps}")
    if not resumed_folder:
        save()  # at once: a disk that can't be written to is noticed before the work
    checkpoint.note_run(folder)

    started = time.perf_counter()
    while epoch < args.epochs:
        train_sampler.set_epoch(epoch, skip=batch * batch_size)  # another order each epoch
        augmented_set.set_epoch(epoch)
        epoch_started, first = time.perf_counter(), batch
        for _ in train(model, train_loader, optimizer, scheduler, device, autocast, scaler, args.label_smoothing, sums):
            batch += 1
            stop_if_told()
            if batch % args.checkpoint_every == 0 and batch < steps:
                save()
        loss, seen = dist.all_reduce(sums.cpu()).tolist()
        row = {"epoch": epoch + 1, "training_loss": loss / seen}
        row |= {"training_lr": args.lr * schedule((epoch + 1) * steps - 1)}  # the last step's
        text = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}"
        if batch > first:  # else it was stopped in the evaluation, and only this is left to do
            speed = (batch - first) * batch_size * world_size / (time.perf_counter() - epoch_started)
            row |= {"training_images_per_s": speed}
            text += f"  {speed:.0f} images/s"
        if (epoch + 1) % args.validate_every == 0 or epoch + 1 == args.epochs:
            evaluated = [evaluate(model, part, device, autocast, stop) for part in validation_loaders]
            stop_if_told()
            of_train, of_test = (dist.all_reduce(part) for part in evaluated)
            row |= metrics(of_train, "train") | metrics(of_test, "test")
            text += f"  train {row['train_top1']:.2%}  test {row['test_top1']:.2%} ({of_test[1]:.0f}/{of_test[6]:.0f})"
            text += f"  top-3 {row['test_top3']:.2%}  top-5 {row['test_top5']:.2%}"
        epoch, batch = epoch + 1, 0
        sums.zero_()
        reporter.add(row)
        save(row.get("test_top1"))
        log(text)
    reporter.close()
    checkpoint.note_run(folder, done=True)
    log(f"done in {time.perf_counter() - started:.1f} s")
    dist.cleanup()


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
    try:
        check_model(args.model, args.width)
    except ValueError as problem:
        parser.error(str(problem))
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    processes = max(args.nproc, dist.get_world_size())
    args.global_batch = args.batch_size // processes * processes
    args.start = args.folder = args.dtype = None
    if dist.is_primary():  # the one that reads and writes
        try:
            find_start(args, processes)
        except checkpoint.CheckpointError as problem:
            parser.error(str(problem))
        except OSError as problem:
            parser.error(f"can't write to --output-dir {args.output_dir} ({problem.strerror}): choose another")
    return args


def find_start(args, processes):
    """Set args.start, the checkpoint to start from, args.dtype, its precision, and args.folder, the run's folder.

    None: no checkpoint, the device's choice, a new folder.
    """
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    path = checkpoint.interrupted(output_dir) or (args.resume and Path(args.resume))
    if path and path.is_dir():
        args.folder = path
        with checkpoint.locked(path):  # the last process of a killed run may be writing still
            args.start, problems = checkpoint.newest(path)
        for problem in problems:
            print(f"{problem}: going on from {args.start}", file=sys.stderr)
    elif path:
        args.start = path
    if not os.access(args.folder or output_dir, os.W_OK | os.X_OK):
        raise checkpoint.CheckpointError(f"can't write to {args.folder or output_dir}: choose another --output-dir")
    if not args.start:
        return
    try:
        config = checkpoint.read(args.start)["config"]
    except checkpoint.CheckpointError as problem:
        raise checkpoint.CheckpointError(f"{problem}{good_one_beside(args.start)}") from None
    if not config.keys() >= {*MUST_MATCH, "dtype"}:
        raise checkpoint.CheckpointError(f"{args.start} is a checkpoint of another program")
    different = [name for name in MUST_MATCH if config[name] != getattr(args, name)]
    if different == ["global_batch"]:
        raise checkpoint.CheckpointError(
            f"{args.start} was trained with a global batch of {config['global_batch']}, "
            f"which {processes} processes can't share equally: start another number"
        )
    if different:
        flags = " ".join(flag(name, config[name]) for name in different if name != "global_batch")
        raise checkpoint.CheckpointError(f"{args.start} was trained with other flags: resume it with {flags}")
    args.dtype = getattr(torch, config["dtype"])  # whatever this machine would choose


def good_one_beside(path):
    try:
        return f"; a good one is {checkpoint.newest(path.parent)[0]}"
    except checkpoint.CheckpointError:
        return ""


def flag(name, value):
    name = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"no {name}" if value is None else f"{name} {value}"


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
