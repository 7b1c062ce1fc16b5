"""What a run tells and leaves behind besides its checkpoints: lines, a table, TensorBoard's events, a picture.

    folder = report.new_folder(Path("runs"), "resnet9")
    reporter = report.Report(folder, {"lr": 0.4})
    for epoch in range(1, 25):
        ...
        reporter.add({"epoch": epoch, "training_loss": loss, "test_top1": accuracy})
        reporter.log(f"epoch {epoch}  loss {loss:.4f}")
    reporter.close()

Every rank calls all of it, after init_process_group; rank 0 alone prints and writes.
"""

import contextlib
import csv
import io
import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import checkpoint
import distributed as dist


def new_folder(output_dir: Path, model: str) -> Path:
    """Rank 0 makes output_dir/MODEL-BACKEND-WORLD_SIZE-TIME; returns its path on every rank."""
    name = f"{model}-{torch.distributed.get_backend()}-{dist.get_world_size()}-{time.strftime('%Y%m%d-%H%M%S')}"
    for folder in itertools.chain([output_dir / name], (output_dir / f"{name}-{n}" for n in itertools.count(2))):
        with contextlib.suppress(FileExistsError):  # two runs may start in one second
            if dist.is_primary():
                folder.mkdir(parents=True)
            return checkpoint.from_primary(folder)


class Report:
    """Writes log.txt, config.json, metrics.csv, TensorBoard's events and curves.png into `folder`.

    config: the flags, say; what JSON can hold.  history: of a resumed run, what `history` was when its checkpoint was
    saved, so that the files show no break.  clearml: report to ClearML, too; without a server: SystemExit, in one line.
    `history`, on every rank, has a dictionary for each epoch.
    """

    def __init__(self, folder: Path, config: dict, history: list[dict] | None = None, clearml: bool = False) -> None:
        self.folder, self.history, self.task = folder, list(history or []), None
        if not dist.is_primary():
            return
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        if clearml:
            self.task = _clearml_task(folder.name, config)
        checkpoint.write(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        # What another attempt has written of the epochs to come doesn't count.
        self.events = SummaryWriter(str(folder), purge_step=len(self.history) + 1)
        if self.history:
            self._write_table()

    def log(self, text: str) -> None:
        """Print the line, and write it to log.txt with the time."""
        dist.print_primary(text)
        if dist.is_primary():
            with open(self.folder / "log.txt", "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def add(self, row: dict[str, float]) -> None:
        """The metrics of one epoch: {"epoch": 1, "test_top1": 0.61, ...}, which TensorBoard shows as test/top1."""
        self.history.append(row)
        if dist.is_primary():
            self._write_table()
            for name, value in row.items():
                if name != "epoch":
                    self.events.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
            self.events.flush()

    def _write_table(self) -> None:
        names = list(dict.fromkeys(name for row in self.history for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(self.history)
        checkpoint.write(self.folder / "metrics.csv", text.getvalue().encode())

    def close(self) -> None:
        """Draw the picture, and end what is open."""
        if dist.is_primary():
            self.events.close()
            checkpoint.write(self.folder / "curves.png", curves(self.history, self.folder.name))
        if self.task:
            self.task.upload_artifact("curves", self.folder / "curves.png")
            self.task.close()


def epoch_line(row: dict, epochs: int, tested: torch.Tensor | None) -> str:
    """The line that cifar10_ddp.py logs after an epoch; tested: the sums of its `evaluate` for the test set."""
    text = f"epoch {row['epoch']}/{epochs}  loss {row['training_loss']:.4f}"
    if "training_images_per_s" in row:
        text += f"  {row['training_images_per_s']:.0f} images/s"
    if tested is not None:
        text += f"  train {row['train_top1']:.2%}"
        text += f"  test {row['test_top1']:.2%} ({tested[1]:.0f}/{tested[6]:.0f})"
        text += f"  top-3 {row['test_top3']:.2%}  top-5 {row['test_top5']:.2%}"
    return text


def _clearml_task(name: str, config: dict) -> Any:
    from clearml import Task

    # Its reporting process, forked while a thread of it starts git, may keep that thread waiting for ever.
    Task._report_subprocess_enabled = False
    handler, options = signal.getsignal(signal.SIGTERM), {"auto_resource_monitoring": False}
    try:
        task = Task.init(Path(sys.argv[0]).stem, name, reuse_last_task_id=False, **options)
        signal.signal(signal.SIGTERM, handler)  # its own would first close the task, for seconds
    except Exception as problem:  # no server, no credentials
        reason = str(problem).strip().partition("\n")[0]
        sys.exit(f"--clearml: {reason} (CLEARML_OFFLINE_MODE=1 needs no server)")
    task.connect(dict(config))
    return task


def curves(history: list[dict], title: str) -> bytes:
    """A picture, PNG: losses and accuracies over the epochs, from the metrics that cifar10_ddp.py gives."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    losses, accuracies = figure.subplots(1, 2)

    def draw(axes: Any, name: str, label: str, scale: float = 1, **style: Any) -> None:
        points = [(row["epoch"], scale * row[name]) for row in history if name in row]
        axes.plot(*zip(*points, strict=True), label=label, **style)

    draw(losses, "training_loss", "training (augmented, label smoothing)", color="0.6")
    draw(losses, "train_loss", "train set", color="tab:blue", marker=".")
    draw(losses, "test_loss", "test set", color="tab:orange", marker=".")
    draw(accuracies, "train_top1", "train set, top 1", 100, color="tab:blue", marker=".")
    for k, style in (1, "-"), (3, "--"), (5, ":"):
        draw(accuracies, f"test_top{k}", f"test set, top {k}", 100, color="tab:orange", marker=".", linestyle=style)
    for axes, label, place in (losses, "loss", "upper right"), (accuracies, "accuracy, %", "lower right"):
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc=place, frameon=False)
    found = [row["test_top1"] for row in history if "test_top1" in row]
    figure.suptitle(title + (f": best test accuracy {max(found):.2%}" if found else ""))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
