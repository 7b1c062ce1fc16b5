"""A realistic training run on CIFAR-10: DDP and mixed precision, with checkpoints, so that a killed run can resume.

    python cifar10_ddp.py --amp                                        # all visible GPUs; without one, two processes
    CUDA_VISIBLE_DEVICES=0 python cifar10_ddp.py --amp                 # one GPU
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 cifar10_ddp.py --amp         # resumes by itself
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST --master_port=29500 cifar10_ddp.py --amp

To resume a run that was stopped, type the same line again.  Its folder is --run-dir, which all machines must see.
Add --dataset synthetic to train without a download.  docs/cifar10.md describes the files in the folder of a run.
"""

import argparse
import contextlib
import csv
import importlib.util
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import checkpoint
import data
import distributed as dist

# These flags change the result, so a run is resumed with the same values.
MUST_MATCH = ["dataset", "model", "width", "amp", "dtype", "epochs", "batch_size", "lr"]
MUST_MATCH += ["weight_decay", "warmup", "label_smoothing", "seed"]


def conv(inputs, outputs, pool=False):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
    if pool:  # before BatchNorm and ReLU, which then have a quarter of the work
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
    """Return the small residual net of David Page's "How to train your ResNet": [N, 3, 32, 32] -> [N, 10]."""
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


def build(name: str, width: int) -> nn.Module:
    """Return a model [N, 3, 32, 32] -> [N, 10]: resnet9, or a classification model of torchvision."""
    if name == "resnet9":
        return resnet9(width)
    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    if name == "resnet18":  # the usual first layer for small images; the original is for 224 x 224
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def train(model, loader, optimizer, scheduler, device, dtype, scaler, label_smoothing, progress):
    """Train for the rest of the epoch; `progress` adds up the losses, and saves checkpoints."""
    model.train()
    for images, labels in data.batches(loader, device):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images), labels, label_smoothing=label_smoothing)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        progress.add_batch(loss.detach(), len(labels))


@torch.no_grad()
def evaluate(model, loader, device, dtype, stop):
    """Return means over all examples, the same on all ranks: {"loss": ..., "top1": ..., "top3": ..., "top5": ...}."""
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        correct = logits.topk(5).indices == labels.view(-1, 1)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += correct[:, :1].sum()
        sums[2] += correct[:, :3].sum()
        sums[3] += correct[:, :5].sum()
        sums[4] += len(labels)
        if stop.asked:  # the means are then incomplete, but the run ends
            break
    *sums, count = dist.all_reduce(sums.cpu()).tolist()
    check_finite(sums[0])
    return {name: total / count for name, total in zip(("loss", "top1", "top3", "top5"), sums, strict=True)}


def check_finite(loss):
    """End the run if the loss, the same on every rank, is infinite or NaN, so that no checkpoint has such a loss."""
    if not math.isfinite(loss):
        sys.exit(f"cifar10_ddp.py: error: the loss is {loss}: try a lower --lr, and another --run-dir")


def lr_factor(step, warmup, total):
    """Return the learning rate of this step, divided by --lr: a linear rise during the warm-up, then a linear fall."""
    rise = max(1, round(warmup * total))
    fall = max(1, total - rise)
    return min((step + 1) / rise, (total - step) / fall)


class Progress:
    """The state of the run: `epoch` epochs are done, and `batch` of the `steps` batches of the current epoch.

    `history` has a dictionary of numbers for each finished epoch.
    """

    def __init__(self, keeper, report, steps, checkpoint_every):
        self.keeper, self.report, self.steps, self.checkpoint_every = keeper, report, steps, checkpoint_every
        state = keeper.restore() or {"epoch": 0, "batch": 0, "history": [], "sums": [0, 0]}
        if state.get("config", keeper.config) != keeper.config:  # saved after this run had read its flags
            sys.exit(f"cifar10_ddp.py: error: another run has just saved in {report.folder}: type the command again")
        self.epoch, self.batch, self.history = state["epoch"], state["batch"], state["history"]
        # This epoch's losses and examples.  Each rank adds up its own; rank 0 starts with the saved sums of all ranks.
        self.sums = torch.zeros(2, dtype=torch.float64, device=dist.get_device())
        if dist.is_primary():
            self.sums += torch.tensor(state["sums"], dtype=torch.float64, device=self.sums.device)
        self.stop = checkpoint.Preemption()  # from here on, SIGTERM doesn't end the process at once

    def __str__(self):
        return f"epoch {self.epoch + 1}, batch {self.batch} of {self.steps}"

    def add_batch(self, loss, examples):
        self.batch += 1
        self.sums[0] += loss * examples
        self.sums[1] += examples
        if self.batch % max(1, self.steps // 10) == 0:  # about ten times in an epoch
            self.report.losses[self.epoch * self.steps + self.batch] = loss  # no number yet, so nothing waits for it
        self.end_if_told(every=10 if loss.is_cuda else 1)  # on a CPU, ten steps may take a minute
        if self.batch % self.checkpoint_every == 0 and self.batch < self.steps:
            self.save()

    def end_epoch(self, score):
        self.epoch += 1
        self.batch = 0
        self.sums.zero_()
        self.save(score)

    def totals(self):
        """Return the losses and the examples of all ranks in this epoch."""
        loss, examples = dist.reduce(self.sums, "sum").tolist()
        check_finite(loss)
        return loss, examples

    def save(self, score=None):
        state = {"epoch": self.epoch, "batch": self.batch, "sums": self.totals(), "history": self.history}
        self.report.add_losses()
        self.keeper.save(self.epoch * self.steps + self.batch, score, **state)

    def end_if_told(self, every=1):
        """If any rank has received SIGTERM (from Ctrl-C of `launch`, too), save a checkpoint, and exit with 143."""
        if self.stop.agreed(every):
            self.save()
            self.report.log(f"asked to stop: saved at {self}; the same command resumes")
            dist.cleanup()
            sys.exit(143)


class Report:
    """Writes what people read into the run's folder, on rank 0; on the other ranks, its methods do nothing."""

    def __init__(self, folder):
        self.folder, self.events, self.losses = folder, None, {}

    def log(self, text, is_printed=True):
        """Print the line, and write it to log.txt with the time."""
        if dist.is_primary():
            if is_printed:
                print(text, flush=True)
            with open(Path(self.folder, "log.txt"), "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def begin(self, history, settings, device):
        """Write to log.txt how the run is made, and open TensorBoard's events; with --clearml, ClearML reads them."""
        if not dist.is_primary():
            return
        flags = " ".join(f"{name}={value}" for name, value in settings.items())
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, torchvision {torchvision.__version__}"
        self.log(f"{flags}; {versions}, CUDA {torch.version.cuda}; {dist.get_world_size()} x {name}", is_printed=False)
        if settings["clearml"]:
            from clearml import Task

            try:
                Task.init("cifar10_ddp", settings["run_dir"], reuse_last_task_id=False).connect(settings)
            except ValueError as problem:  # it is not configured
                reason = " ".join(str(problem).split())
                sys.exit(f"cifar10_ddp.py: error: --clearml: {reason} (clearml-init configures it)")
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        self.events = SummaryWriter(self.folder, purge_step=len(history) + 1)  # hides an epoch that was not saved
        self.batches = SummaryWriter(Path(self.folder, "batches"))  # with its own count of steps

    def add_losses(self):
        """Write rank 0's losses within the epoch for TensorBoard; this waits for the GPU, as a checkpoint does, too."""
        if dist.is_primary():
            for step, loss in self.losses.items():
                self.batches.add_scalar("training/loss_of_a_batch", loss.item(), step)
            self.losses.clear()
            self.batches.flush()

    def add_epoch(self, history):
        """Write the table metrics.csv, and the last epoch's numbers for TensorBoard."""
        if not dist.is_primary():
            return
        with open(Path(self.folder, "metrics.csv"), "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, dict.fromkeys(name for row in history for name in row))
            table.writeheader()
            table.writerows(history)
        for name, value in history[-1].items():
            self.events.add_scalar(name.replace("_", "/", 1), value, len(history))
        self.events.flush()

    def end(self, history):
        """Draw curves.png: loss, accuracy and learning rate over the epochs."""
        if not dist.is_primary():
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 4), layout="constrained")
        for axes, metric in zip(figure.subplots(1, 3), ("loss", "top1", "lr"), strict=True):
            for name in history[-1]:
                if name.endswith(metric):
                    rows = [row for row in history if name in row]
                    axes.plot([row["epoch"] for row in rows], [row[name] for row in rows], marker=".", label=name)
            axes.set(title=metric, xlabel="epoch")
            axes.legend()
        figure.savefig(Path(self.folder, "curves.png"))


def in_words(row, epochs):
    """Return the line that is printed after an epoch."""
    text = f"epoch {row['epoch']}/{epochs}  loss {row['training_loss']:.4f}"
    if "training_images_per_s" in row:
        text += f"  {row['training_images_per_s']:.0f} images/s"
    if "test_top1" in row:
        text += f"  train {row['train_top1']:.2%}  test {row['test_top1']:.2%}"
        text += f"  top-3 {row['test_top3']:.2%}  top-5 {row['test_top5']:.2%}"
    return text


def main(local_rank, world_size, args, run_dir):
    dist.init_process_group()
    try:
        run(world_size, args, run_dir)
    except (checkpoint.CheckpointError, OSError) as problem:  # for example, the disk is full
        sys.exit(f"cifar10_ddp.py: error: {problem}")
    dist.cleanup()


def run(world_size, args, run_dir):
    device = dist.get_device()
    batch_size = args.batch_size // world_size  # each process's share
    limit = 2 * args.batch_size if args.dry_run else None
    train_set, test_set = data.load(args.dataset, args.data_dir, limit, colour=True)
    augmented_set = data.Augmented(train_set, args.seed)  # crops and flips
    augmented_sampler = dist.data_sampler(augmented_set, seed=args.seed)
    augmented_loader = data.loader(augmented_set, batch_size, augmented_sampler, drop_last=True)
    train_loader = data.loader(train_set, 512, dist.data_sampler(train_set, shuffle=False, pad=False))
    test_loader = data.loader(test_set, 512, dist.data_sampler(test_set, shuffle=False, pad=False))  # each example once
    steps = len(augmented_loader)

    torch.manual_seed(args.seed)  # equal seeds give equal weights
    model = build(args.model, args.width)
    model = model.to(device, memory_format=torch.channels_last)  # the faster layout for convolutions
    torch.manual_seed(args.seed + dist.get_rank())  # from here on, each rank draws its own numbers, for dropout
    # With float16, a fused optimizer skips a step by itself; otherwise the process would wait for the GPU to decide.
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **options)
    before_ampere = any(torch.cuda.get_device_capability(i) < (8, 0) for i in range(torch.cuda.device_count()))
    dtype_name = (args.dtype or ("float16" if before_ampere else "bfloat16")) if args.amp else "float32"
    dtype_name = checkpoint.from_all(dtype_name)[0]  # rank 0's, which has read --run-dir
    dtype = getattr(torch, dtype_name)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # bfloat16 needs no scaling
    model = dist.prepare_ddp_model(model, sync_buffers=False)  # averages the gradients of all processes
    total = args.epochs * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args.warmup, total))

    settings = vars(args) | {"dtype": dtype_name, "run_dir": run_dir}
    config = {name: settings[name] for name in MUST_MATCH}
    keeper = checkpoint.Keeper(run_dir, config, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    report = Report(run_dir)
    progress = Progress(keeper, report, steps, args.checkpoint_every)
    if progress.epoch == args.epochs:
        report.end(progress.history)  # the run may have been killed before it did
        dist.print_primary(f"{run_dir} is finished: {args.epochs} epochs; for a new run choose another --run-dir")
        return
    report.begin(progress.history, settings, device)
    shares = f"global batch {args.batch_size} = {world_size} x {batch_size}"
    report.log(f"{args.model} on {args.dataset}, {device}, {dtype_name}, {shares}")
    if dtype == torch.float16 and device.type == "cpu":
        report.log("float16 is many times slower than bfloat16 on a CPU")
    if not args.dry_run:
        report.log(f"{run_dir}: {progress}")

    started = time.perf_counter()
    while progress.epoch < args.epochs:
        first_batch, epoch_started = progress.batch, time.perf_counter()
        augmented_sampler.set_epoch(progress.epoch, skip=first_batch * batch_size)  # a different order in each epoch
        augmented_set.set_epoch(progress.epoch)  # other crops and flips
        train(model, augmented_loader, optimizer, scheduler, device, dtype, scaler, args.label_smoothing, progress)
        loss, seen = progress.totals()
        row = {"epoch": progress.epoch + 1, "training_loss": loss / seen, "training_lr": scheduler.get_last_lr()[0]}
        if progress.batch > first_batch:  # if not, the run was stopped after the epoch's last batch
            seconds = dist.reduce(torch.tensor(time.perf_counter() - epoch_started)).item()  # the same on all ranks
            row["training_images_per_s"] = (progress.batch - first_batch) * args.batch_size / seconds
        if row["epoch"] % args.validate_every == 0 or row["epoch"] == args.epochs:
            dist.sync_params(model.buffers())  # BatchNorm's averages differ between ranks, so all copy rank 0's
            for name, loader in ("train", train_loader), ("test", test_loader):
                means = evaluate(model, loader, device, dtype, progress.stop)
                progress.end_if_told()
                row |= {f"{name}_{metric}": mean for metric, mean in means.items()}
        progress.history.append(row)
        report.add_epoch(progress.history)
        progress.end_epoch(row.get("test_top1"))
        report.log(in_words(row, args.epochs))
    report.end(progress.history)
    report.log(f"done in {time.perf_counter() - started:.1f} s")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--dataset", default="cifar10", choices=data.COLOUR_DATASETS, help=f"dataset {default}")
    add("--data-dir", default="data", help=f"folder of the dataset {default}")
    add("--epochs", type=int, default=24, help=f"number of epochs {default}")
    add("--batch-size", type=int, default=512, help=f"global batch size, over all processes {default}")
    add("--lr", type=float, default=0.4, help=f"peak learning rate {default}")
    add("--seed", type=int, default=0, help=f"random seed for weights, order and augmentation {default}")
    add("--dry-run", action="store_true", help="run one epoch of two batches in a temporary folder, as a smoke test")
    add("--amp", action="store_true", help="train in mixed precision")
    in_amp = "16-bit dtype for --amp (default: bfloat16; float16 on GPUs before Ampere)"
    add("--dtype", choices=["bfloat16", "float16"], help=in_amp)
    add("--model", default="resnet9", help=f"resnet9, or a classification model of torchvision {default}")
    width = 64 if torch.cuda.device_count() else 24
    add("--width", type=int, default=width, help="channels of resnet9's first layer (default: 64; without a GPU, 24)")
    add("--weight-decay", type=float, default=5e-4, help=f"weight decay of the optimizer {default}")
    add("--warmup", type=float, default=0.2, help=f"fraction of the steps in which the learning rate rises {default}")
    add("--label-smoothing", type=float, default=0.1, help=f"label smoothing of the loss {default}")
    add("--validate-every", type=int, default=1, help=f"epochs from one evaluation to the next {default}")
    add("--checkpoint-every", type=int, default=100, help=f"save every so many steps, and after each epoch {default}")
    add("--run-dir", default="runs/cifar10", help=f"folder of a new run, or of the run to resume {default}")
    add("--clearml", action="store_true", help="report to ClearML, too")
    add("--nproc", type=int, help="processes to start (default: one per GPU, or 2 without a GPU)")
    args = parser.parse_args()
    check_flags(parser, args)
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    args.batch_size -= args.batch_size % dist.count_processes(args.nproc)  # all processes have equal shares
    if dist.is_primary() and not args.dry_run:
        args.dtype = check_run_dir(parser, args)
    return args


def check_flags(parser, args):
    if min(args.epochs, args.batch_size, args.validate_every, args.checkpoint_every, args.width) < 1:
        parser.error("--epochs, --batch-size, --validate-every, --checkpoint-every and --width must be at least 1")
    if not (0 < args.lr < float("inf") and 0 <= args.weight_decay < float("inf")):
        parser.error("--lr must be greater than 0, --weight-decay at least 0, both finite")
    if not (0 <= args.warmup <= 1 and 0 <= args.label_smoothing < 1 and 0 <= args.seed < 2**32):
        parser.error(
            "--warmup must be from 0 to 1, --label-smoothing from 0 to less than 1, --seed from 0 to 2**32 - 1"
        )
    if args.model != "resnet9":
        check_model(parser, args.model)
    if args.batch_size > data.DATASETS[args.dataset]:
        examples = f"{data.DATASETS[args.dataset]} examples of {args.dataset}"
        parser.error(f"--batch-size {args.batch_size} is too large for the {examples}")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    if args.dtype and not args.amp:
        parser.error("--dtype is for mixed precision: add --amp")
    if args.clearml and not importlib.util.find_spec("clearml"):
        parser.error("--clearml needs the package of that name: pip install clearml")


def check_model(parser, name):
    """Check that torchvision has this model, that it can train on a small image, and that it returns one tensor."""
    if name not in torchvision.models.list_models(module=torchvision.models):
        parser.error(f"--model {name} is unknown: type resnet9, resnet18, or another model of torchvision")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # after torch's thread pool has started, no process can be forked
    try:
        F.cross_entropy(build(name, 0)(torch.zeros(2, 3, 32, 32)), torch.zeros(2, dtype=torch.int64))
    except Exception as problem:
        reason = str(problem).partition("\n")[0]
        parser.error(f"--model {name} can't train on images of 32 x 32 pixels ({reason}): type resnet18")
    finally:
        torch.set_num_threads(threads)


def check_run_dir(parser, args):
    """Check that the newest checkpoint in --run-dir has the same flags; return --dtype, or else the checkpoint's."""
    try:
        Path(args.run_dir).mkdir(parents=True, exist_ok=True)
        path, _ = checkpoint.newest(Path(args.run_dir))
        config = checkpoint.read(path)["config"] if path else {}
    except OSError as problem:
        parser.error(f"can't write to --run-dir {args.run_dir} ({problem.strerror}): choose another")
    except checkpoint.CheckpointError as problem:
        parser.error(f"{problem}: choose another --run-dir")
    given = vars(args) | {"dtype": args.dtype or config.get("dtype")}
    wrong = [name for name in MUST_MATCH if config and config.get(name) != given[name]]
    if wrong:
        flags = ", ".join(as_flag(name, config.get(name)) for name in wrong)
        parser.error(f"{path} was trained with other flags: type {flags}; or choose another --run-dir")
    return given["dtype"]


def as_flag(name, value):
    """Return the text to type on the command line: ("lr", 0.1) is "--lr 0.1"."""
    if name == "amp":
        return "--amp" if value else "no --amp"
    if name == "batch_size":
        return f"--batch-size {value}, with a number of processes that divides it"
    return f"--{name.replace('_', '-')} {value}"


if __name__ == "__main__":
    args = parse_args()
    with tempfile.TemporaryDirectory() if args.dry_run else contextlib.nullcontext(args.run_dir) as run_dir:
        dist.launch(main, args, run_dir, nproc=args.nproc)
