"""report.py by itself, with metrics of one's own; test_cifar10.py reads back what a whole run leaves behind."""

import csv
import io
import json
import os
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import torch.utils.tensorboard  # the forked processes find it imported, and matplotlib, too
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_checkpoint import message, names, saved
from world import WORLDS, launched

import checkpoint
import distributed as dist
import report


@pytest.fixture(scope="module", autouse=True)
def a_first_picture():
    report.curves([], "")


def _reports(rank, n, folder):
    folders = [report.new_folder(folder, "net") for _ in range(3)]
    assert len(set(folders)) == 3 and all(path.is_dir() for path in folders)  # in one second, probably
    assert checkpoint.from_primary(folders) == folders
    reporter = report.Report(folders[0], {"lr": 0.5})
    for epoch in 1, 2:
        reporter.add({"epoch": epoch, "validation_f1": epoch / 4})
        reporter.log(f"epoch {epoch}")
    reporter.close()
    assert [row["validation_f1"] for row in reporter.history] == [0.25, 0.5]  # on every rank
    again = report.Report(folders[0], {"lr": 0.5}, reporter.history[:1])  # resumed after the first epoch
    assert again.history == reporter.history[:1]
    again.close()
    return folders[0]


@pytest.mark.slow
@WORLDS
def test_metrics_of_ones_own(tmp_path, n, capfd):
    folder = launched(_reports, n, tmp_path)
    printed = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("distributed: ")]
    assert printed == ["epoch 1", "epoch 2"]
    assert [line[21:] for line in (folder / "log.txt").read_text().splitlines()] == printed
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.5}
    with open(folder / "metrics.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{"epoch": "1", "validation_f1": "0.25"}]
    events = EventAccumulator(str(folder)).Reload()  # as TensorBoard shows them: without the second epoch
    assert [(event.step, event.value) for event in events.Scalars("validation/f1")] == [(1, 0.25)]
    with Image.open(folder / "curves.png") as picture:
        assert picture.size == (1200, 700)


def _documented_lines():
    """The docstring's program in two parts: the line that comes before the processes start, and theirs."""
    lines = [line for line in report.__doc__.splitlines() if line.startswith("    ") or not line]
    code = textwrap.dedent("\n".join(lines))
    before = re.search("^start = .*$", code, re.MULTILINE)
    return code[: before.end()], code[before.end() :]


def _as_documented(rank, n, start, flags):
    model = torch.nn.Linear(2, 2)
    names = {"Path": Path, "start": start, "args": flags, "loss": 0.5, "accuracy": 0.25}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    exec(_documented_lines()[1], names | {"report": report, "ckpt": checkpoint})


@pytest.mark.slow
def test_the_docstring_runs_and_goes_on(tmp_path, monkeypatch):
    """The docstring's lines; then once more, as with --resume and the run's folder."""
    monkeypatch.chdir(tmp_path)
    flags = types.SimpleNamespace(resume=None, lr=0.4)
    for _ in range(2):
        names = {"args": flags}
        exec(_documented_lines()[0], names)
        launched(_as_documented, 2, names["start"], flags)
        (flags.resume,) = Path("runs").iterdir()
        state = checkpoint.read(flags.resume / "last.pt")
        assert state["step"] == len(state["history"]) == 24


def test_curves_of_no_epoch_at_all():
    with Image.open(io.BytesIO(report.curves([], "nothing yet"))) as picture:
        assert picture.size == (1200, 700)


def drawn(monkeypatch, history):
    """What `curves` draws: {title of the plot: {label: (epochs, values, colour)}}."""
    figures, save = [], Figure.savefig

    def saved(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    report.curves(history, "any")
    plots = {}
    for axes in figures[0].axes:
        lines = {line.get_label(): (*(list(x) for x in line.get_data()), line.get_color()) for line in axes.lines}
        plots[axes.get_title()] = lines
    return plots


def test_curves_show_any_metric(monkeypatch):
    """One plot for each metric, one line and one colour for each set that has it, also where an epoch is missing."""
    history = [
        {"epoch": 1, "train_f1": 0.5, "lr": 0.1},
        {"epoch": 2, "train_f1": 0.6, "test_f1": 0.4, "test_words_per_s": 7.0, "lr": 0.2},
    ]
    assert drawn(monkeypatch, history) == {
        "f1": {"train": ([1, 2], [0.5, 0.6], "C0"), "test": ([2], [0.4], "C2")},
        "lr": {"lr": ([1, 2], [0.1, 0.2], "C1")},
        "words_per_s": {"test": ([2], [7.0], "C2")},
    }


def _goes_elsewhere(rank, n, folder):
    os.chdir(folder)
    path = report.new_folder(Path("runs"), "net")
    reporter = report.Report(path, {})
    (folder / "elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")
    reporter.add({"epoch": 1, "test_f1": 0.5})
    reporter.log("one")
    reporter.close()
    assert names(folder / "elsewhere") == []
    if rank == 0:
        assert {"log.txt", "metrics.csv", "curves.png"} <= set(names(folder / path))


@WORLDS
def test_a_relative_folder_stays_where_it_was(tmp_path, n):
    launched(_goes_elsewhere, n, tmp_path)


def _nowhere(rank, n, file):
    text = message(report.new_folder, file, "net")
    assert text.startswith(f"can't make {file}/net-") and text.endswith("(Not a directory)")
    dist.barrier()  # and the group still works


@WORLDS
def test_a_folder_that_can_not_be_made_is_one_error_on_all_ranks(tmp_path, n):
    (tmp_path / "file").write_text("")
    launched(_nowhere, n, tmp_path / "file")


# ------------------------------------------------------------------------------ a run that its launcher has restarted

VARIABLES = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    + ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
)  # fmt: skip
TORCHRUN = {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "0"}
SRUN = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
SBATCH = {"SLURM_JOB_ID": "5"}  # without srun
RESTARTED, REQUEUED = {"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1"}
STARTS = [
    pytest.param(TORCHRUN, RESTARTED, id="torchrun"),
    pytest.param(SRUN, REQUEUED, id="srun"),
    pytest.param(SBATCH, REQUEUED, id="sbatch"),
    pytest.param(TORCHRUN | SBATCH, RESTARTED, id="torchrun in a job"),
    pytest.param(TORCHRUN | SBATCH, REQUEUED | {"TORCHELASTIC_RUN_ID": "new"}, id="torchrun in a requeued job"),
]


@pytest.fixture
def start(monkeypatch):
    """start(variables): as if this process had just been started with these."""

    def start(variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return start


@pytest.mark.parametrize(("variables", "again"), STARTS)
def test_a_restarted_run_finds_its_folder(tmp_path, start, variables, again):
    folder = tmp_path / "the run"
    folder.mkdir()
    start(variables)
    assert report.interrupted(tmp_path) is None
    report.note_run(folder)
    assert len(names(tmp_path, ".run-*")) == 1
    start(variables | again)
    assert report.interrupted(tmp_path) == folder
    assert report.interrupted(tmp_path) == folder  # and once more, should it be stopped before it can note it
    report.note_run(folder)
    report.note_run(folder, done=True)
    assert names(tmp_path) == ["the run"]
    assert report.interrupted(tmp_path) is None


@pytest.mark.parametrize(("variables", "again"), STARTS)
def test_a_first_start_forgets_an_earlier_runs_note(tmp_path, start, variables, again):
    start(variables)
    report.note_run(tmp_path / "earlier")
    assert report.interrupted(tmp_path) is None
    start(variables | again)
    assert report.interrupted(tmp_path) is None
    assert names(tmp_path) == []


def test_runs_of_other_names_are_told_apart(tmp_path, start, monkeypatch):
    unnamed = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # torchrun's own name
    starts = [
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "other"},
        unnamed,
        unnamed | {"MASTER_PORT": "2"},
        unnamed | {"MASTER_ADDR": "b"},
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "../a b"},
        SRUN | {"SLURM_JOB_ID": "6"},
        SRUN | {"SLURM_STEP_ID": "1"},
        SRUN,
        SBATCH,
    ]
    cases = [(variables, argv) for variables in starts for argv in (["train.py"], ["train.py", "--lr", "1"])]
    for number, (variables, argv) in enumerate(cases):
        start(variables)
        monkeypatch.setattr(sys, "argv", argv)
        report.note_run(tmp_path / str(number))
    assert len(names(tmp_path, ".run-*")) == len(cases) == len(names(tmp_path))
    for number, (variables, argv) in enumerate(cases):
        start(variables | RESTARTED | REQUEUED)
        monkeypatch.setattr(sys, "argv", argv)
        assert report.interrupted(tmp_path) == tmp_path / str(number)


def test_without_a_launcher_that_restarts_nothing_is_noted(tmp_path, start):
    start({})
    report.note_run(tmp_path / "run")
    assert names(tmp_path) == []
    assert report.interrupted(tmp_path) is None
    start({"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "2"})  # but nothing was noted
    assert report.interrupted(tmp_path) is None


# --------------------------------------------------------------------------------------------------- a flag --resume


def test_find_start(tmp_path, start):
    start({})
    output_dir, flags = str(tmp_path / "runs"), {"why": "a test"}
    assert report.find_start(output_dir, None, flags) == report.Start()
    folder = saved(tmp_path / "run", 1, 2)
    last, previous = folder / "last.pt", folder / "previous.pt"
    assert report.find_start(output_dir, str(folder), flags) == (last, folder, flags)
    assert report.find_start(output_dir, str(previous), flags) == (previous, None, flags)
    other = f"{previous} was trained with other flags: resume it with --why a test"
    assert message(report.find_start, output_dir, str(previous), {"why": "no reason"}) == other
    errors = []
    assert report.find_start(output_dir, str(previous), {"why": None}, error=errors.append) is None
    assert errors == [other]
