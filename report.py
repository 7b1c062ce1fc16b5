"""A run's folder: made or found again, with what a run leaves there besides its checkpoints (log, table, picture).

    import checkpoint as ckpt
    import report

    start = report.find_start("runs", args.resume, {"lr": args.lr})      # rank 0, before the processes start

    folder = start.folder or report.new_folder(Path("runs"), "resnet9")  # from here on every rank
    keeper = ckpt.Keeper(folder, {"lr": args.lr}, model=model, optimizer=optimizer)
    state = keeper.restore(start.path)
    reporter = report.Report(folder, keeper.config, state.get("history"))
    report.note_run(folder)                                              # torchrun and SLURM may restart this run
    for epoch in range(state.get("step", 0) + 1, 25):
        ...
        reporter.add({"epoch": epoch, "training_loss": loss, "test_top1": accuracy})
        reporter.log(f"epoch {epoch}  loss {loss:.4f}")
        keeper.save(epoch, accuracy, history=reporter.history)
    reporter.close()
    report.note_run(folder, done=True)

Copy it beside checkpoint.py.  It needs the packages tensorboard and matplotlib.  Rank 0 alone prints, reads and writes.
"""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __package__:
    from . import checkpoint
    from . import distributed as dist
else:
    import checkpoint
    import distributed as dist


# ------------------------------------------------------------------------------------------------- where a run starts


class Start(NamedTuple):
    """Where a run starts: from a checkpoint, or from nothing."""

    path: Path | None = None  # the checkpoint; None: there is none
    folder: Path | None = None  # the folder of the run to continue; None: it is a new run
    config: dict = {}  # the checkpoint's


def find_start(output_dir: str, resume: str | None, flags: dict, error: Callable[[str], None] | None = None) -> Start:
    """Where a script with the flags --output-dir and --resume starts.  Call it on rank 0, before training.

    resume: a run's folder, to continue this run from its newest good checkpoint; or a checkpoint, to start a new run
        from it.  If a launcher has restarted this run (see `interrupted`), the run continues, whatever `resume` says.
    flags: the names and values that change the result.  The checkpoint's config must have the same.
    What fails is a CheckpointError, or a call of `error` with its message (argparse's `parser.error`, say).
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        start = _find_start(Path(output_dir), resume)
        if start.path:
            _check_flags(start, flags)
        return start
    except checkpoint.CheckpointError as problem:
        message = str(problem)
    except OSError as problem:
        message = f"can't write to --output-dir {output_dir} ({problem.strerror}): choose another"
    if error is None:
        raise checkpoint.CheckpointError(message)
    error(message)


def _find_start(output_dir: Path, resume: str | None) -> Start:
    path, folder = interrupted(output_dir), None
    if path is None and resume:
        path = Path(resume)
    if path and path.is_dir():
        folder = path
        with checkpoint.locked(folder):  # the last process of a killed run may still be writing
            path, problems = checkpoint.newest(folder)
        for problem in problems:
            print(f"{problem}: going on from {path}", file=sys.stderr)
    if not os.access(folder or output_dir, os.W_OK | os.X_OK):
        raise checkpoint.CheckpointError(f"can't write to {folder or output_dir}: choose another --output-dir")
    if not path:
        return Start()
    try:
        return Start(path, folder, checkpoint.read(path)["config"])
    except checkpoint.CheckpointError as problem:
        message = str(problem)
    with contextlib.suppress(checkpoint.CheckpointError):  # if there is no good one, the message is complete
        message += f"; a good one is {checkpoint.newest(path.parent)[0]}"
    raise checkpoint.CheckpointError(message)


def _check_flags(start: Start, flags: dict) -> None:
    if not start.config.keys() >= flags.keys():
        raise checkpoint.CheckpointError(f"{start.path} is a checkpoint of another program")
    wrong = [name for name in flags if start.config[name] != flags[name]]
    if wrong:
        right = " ".join(_as_flag(name, start.config[name]) for name in wrong)
        raise checkpoint.CheckpointError(f"{start.path} was trained with other flags: resume it with {right}")


def _as_flag(name: str, value: Any) -> str:
    """What to type on the command line: ("lr", 0.1) is "--lr 0.1", and ("amp", False) is "no --amp"."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if value is False or value is None:
        return f"no {flag}"
    return f"{flag} {value}"


def new_folder(output_dir: Path, name: str) -> Path:
    """Rank 0 makes output_dir/NAME-TIME, or NAME-TIME-2 if that exists; returns its path on every rank."""
    return checkpoint.on_primary(_make_folder, output_dir, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _make_folder(output_dir: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = output_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # two runs can start in the same second
            continue
        except OSError as problem:
            raise checkpoint.CheckpointError(f"can't make {folder} ({problem.strerror})") from None


# ------------------------------------------------------------------------------- a run that its launcher has restarted


class _Note(NamedTuple):
    """A file in the output_dir that says, to a run that its launcher restarts, which folder is its own."""

    file: Path
    restarted: bool  # whether this start is such a restart


def _find_note(output_dir: Path) -> _Note | None:
    """None: no launcher has started this process that could restart it."""
    env = os.environ
    if "SLURM_JOB_ID" in env:  # first: a job that SLURM requeues starts a new torchrun
        run = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 'batch')}"
    elif "TORCHELASTIC_RUN_ID" in env:
        run = env["TORCHELASTIC_RUN_ID"]
        if run == "none":  # torchrun was given no --rdzv-id: then the meeting point tells runs apart
            run = f"{env.get('MASTER_ADDR')}-{env.get('MASTER_PORT')}"
    else:
        return None
    command = zlib.crc32("\0".join(sys.argv).encode())  # a job may train several times, with other flags
    name = re.sub(r"[^\w.-]", "_", f".run-{run}-{command:08x}")
    counts = env.get("TORCHELASTIC_RESTART_COUNT"), env.get("SLURM_RESTART_COUNT")
    return _Note(output_dir / name, restarted=any(count not in (None, "0") for count in counts))


def interrupted(output_dir: Path) -> Path | None:
    """The run's folder, if torchrun (--max-restarts) or SLURM (--requeue) has restarted it with the same command line.

    None for any other start, which forgets what an earlier one has noted.  Call it on rank 0, which must be on the
    same machine as before, or on a shared disk.
    """
    note = _find_note(output_dir)
    if note is None:
        return None
    if not note.restarted:
        note.file.unlink(missing_ok=True)
        return None
    if not note.file.exists():
        return None
    return output_dir / note.file.read_text(encoding="utf-8")


def note_run(folder: Path, done: bool = False) -> None:
    """Note, for `interrupted`, that this run's folder is `folder`, in its output_dir; or forget it, once it is done.

    Does nothing on other ranks than 0, and where no launcher restarts runs.
    """
    note = _find_note(folder.parent)
    if note is None or not dist.is_primary():
        return
    if done:
        note.file.unlink(missing_ok=True)
    else:
        checkpoint.write(note.file, folder.name.encode())


# -------------------------------------------------------------------------------------------------- what a run leaves


class Report:
    """Writes log.txt, config.json, metrics.csv, TensorBoard's events and curves.png into `folder`.

    Every rank makes one and calls its methods, after init_process_group.  `history`, on every rank, has a dictionary
    for each epoch.
    config: the flags, say; what JSON can hold.  history: of a resumed run, what `history` was when its checkpoint was
    saved, so that the files show no break.  clearml: report to ClearML, too; without a server: SystemExit, in one line.
    """

    def __init__(self, folder: Path, config: dict, history: list[dict] | None = None, clearml: bool = False) -> None:
        self.folder = Path(folder).absolute()  # os.chdir doesn't move it
        self.history, self.task = list(history or []), None
        if not dist.is_primary():
            return
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        if clearml:
            self.task = _clearml_task(self.folder.name, config)
        checkpoint.write(self.folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        # What another attempt has written of the epochs to come doesn't count.
        self.events = SummaryWriter(str(self.folder), purge_step=len(self.history) + 1)
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
    """A picture, PNG, of the metrics over the epochs: "train_loss" and "test_loss" are two lines in the plot "loss"."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in history for name in row if name != "epoch"))
    kinds = list(dict.fromkeys(name.partition("_")[0] for name in names))
    plots = list(dict.fromkeys(_plot_of(name) for name in names))
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    figure.suptitle(title)
    rows = math.ceil(len(plots) / 3)
    for number, plot in enumerate(plots, 1):
        axes = figure.add_subplot(rows, 3, number)
        for name in names:
            if _plot_of(name) == plot:
                points = [(row["epoch"], row[name]) for row in history if name in row]
                kind = name.partition("_")[0]
                colour = f"C{kinds.index(kind)}"  # of matplotlib's cycle: the same in all plots
                axes.plot(*zip(*points, strict=True), label=kind, color=colour, marker=".")
        axes.set(xlabel="epoch", title=plot)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _plot_of(name: str) -> str:
    """The plot that shows this metric: "loss" for "test_loss" and for "loss"."""
    return name.partition("_")[2] or name
