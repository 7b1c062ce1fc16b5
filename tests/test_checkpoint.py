"""checkpoint.py: what was saved comes back on every rank, whatever was killed, full, flipped or forged in between.

What is about files runs in pytest's own process, a world of one; what is about ranks in 1, 2 and 3 forked processes.
"""

import ctypes
import errno
import io
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
import zipfile

import pytest
import torch
from torch import nn
from world import WORLDS, joined, launched

import checkpoint
import distributed as dist


def linear(value=0.0, outputs=2):
    model = nn.Linear(2, outputs, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def saved(folder, *steps, **options):
    """A folder with a checkpoint of each step; the weights are the step.  Its lock is free again."""
    model = linear()
    keeper = checkpoint.Keeper(folder, {"why": "a test"}, model=model, **options)
    for step in steps:
        nn.init.constant_(model.weight, step)
        keeper.save(step)
    keeper.lock.release()
    return folder


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def message(call, *args):
    """What it says; it must be one line without control characters."""
    with pytest.raises(checkpoint.CheckpointError) as raised:
        call(*args)
    assert str(raised.value).isprintable()
    return str(raised.value)


# --------------------------------------------------------------------------------------------------- there and back


def trained(seed):
    """Parts whose every kind of state matters for the next step: momentum, running averages, a schedule, dropout."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = dist.prepare_ddp_model(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def steps(parts, count):
    """Training; returns all that it ends in: tensors by name, and the next random numbers."""
    for _ in range(count):
        parts["model"](torch.rand(6, 4)).square().mean().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
    state = dict(dist.unwrap_model(parts["model"]).state_dict())
    momenta = parts["optimizer"].state_dict()["state"]
    state |= {f"momentum {i}": momentum["momentum_buffer"] for i, momentum in momenta.items()}
    lr = parts["optimizer"].param_groups[0]["lr"]
    state |= {"lr": torch.tensor([lr, parts["scheduler"].last_epoch]), "random": torch.rand(5)}
    return {name: tensor.clone() for name, tensor in state.items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def _there_and_back(rank, n, folder):
    folder = folder if rank == 0 else folder / f"rank {rank} has no business here"
    parts = trained(seed=1)
    torch.manual_seed(10 + rank)
    keeper = checkpoint.Keeper(folder, {"lr": 0.1, "names": ["a"]}, **parts)
    assert keeper.restore(None) == {}
    at_3 = steps(parts, 3)
    assert at_3["lr"].tolist() == pytest.approx([0.1 * 0.5, 3])
    keeper.save(3, note="x", mean=1.5, values=[torch.tensor([2.0])])
    at_5 = steps(parts, 2)
    draws = {tuple(row.tolist()) for row in dist.gather(at_5["random"])}
    assert len(draws) == n  # each rank has numbers of its own

    if rank == 0:
        keeper.lock.release()
    parts = trained(seed=2)  # another start, other random numbers
    assert differing(steps(parts, 2), at_5) >= {"0.weight", "1.running_mean", "momentum 0", "random"}
    keeper = checkpoint.Keeper(folder, **parts)
    state = keeper.restore(folder / "last.pt" if rank == 0 else None)  # rank 0's path counts
    assert (state["step"], state["note"], state["mean"]) == (3, "x", 1.5)
    assert state["values"][0].item() == 2.0 and state["config"] == {"lr": 0.1, "names": ["a"]}
    # Rank 0's running averages are those that count, and all get them: the others' own are not kept.
    allowed = {"1.running_mean", "1.running_var"} if rank else set()
    assert differing(steps(parts, 2), at_5) <= allowed
    return {name: value for name, value in at_3.items() if "." in name}


@WORLDS
def test_there_and_back(tmp_path, n):
    expected = launched(_there_and_back, n, tmp_path)
    assert names(tmp_path) == [".lock", "last.pt"]
    state = torch.load(tmp_path / "last.pt", weights_only=True)  # as anybody's program would read it
    assert state.keys() == {"step", "config", "parts", "random", "note", "mean", "values"}
    assert state["parts"].keys() == {"model", "optimizer", "scheduler"}
    assert len(state["random"]) == n
    assert differing(state["parts"]["model"], expected) == set()  # the names are those without DDP: no "module."


def _other_number(rank, n, folder):
    parts = trained(seed=3)
    torch.manual_seed(20 + rank)
    before = torch.get_rng_state()
    state = checkpoint.Keeper(folder, **parts).restore(folder / "last.pt")
    assert state["step"] == 3 and len(state["random"]) == 2
    assert torch.equal(torch.get_rng_state(), before)
    return dict(dist.unwrap_model(parts["model"]).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_another_number_of_processes(tmp_path, n):
    expected = launched(_there_and_back, 2, tmp_path)
    got = launched(_other_number, n, tmp_path)
    assert differing(got, {name: expected[name] for name in got}) == set()


def _takes_a_name(rank, n, folder):
    """The same error on every rank, before anything is written; the group still works."""
    keeper = checkpoint.Keeper(folder, model=linear())
    for name in "config", "parts", "random":
        with pytest.raises(ValueError, match=f"save: {name} is the checkpoint's own entry"):
            keeper.save(1, **{name: "mine"})
    assert not list(folder.glob("*.pt"))
    keeper.save(1, note="mine")
    assert keeper.restore(folder / "last.pt")["note"] == "mine"


@WORLDS
def test_what_a_caller_saves_is_never_dropped(tmp_path, n):
    launched(_takes_a_name, n, tmp_path)


def _extra_is_rank_0s(rank, n, folder):
    keeper = checkpoint.Keeper(folder, model=linear())
    keeper.save(1, mine=rank, all=torch.stack(dist.gather(torch.tensor(rank))))
    state = keeper.restore(folder / "last.pt")
    assert state["mine"] == 0 and state["all"].tolist() == list(range(n))


@WORLDS
def test_extra_values_are_rank_0s(tmp_path, n):
    launched(_extra_is_rank_0s, n, tmp_path)


def _changes_folder(rank, n, folder):
    os.chdir(folder)
    keeper = checkpoint.Keeper("run", model=linear(1.0))
    keeper.save(1)
    (folder / "elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")
    keeper.save(2)
    assert keeper.restore(folder / "run" / "last.pt")["step"] == 2
    assert names(folder / "run") == [".lock", "last.pt", "previous.pt"] and names(folder / "elsewhere") == []


@WORLDS
def test_a_relative_folder_stays_where_it_was(tmp_path, n):
    launched(_changes_folder, n, tmp_path)


def _checked(rank, n):
    """What torch logs in a group that is checked, as if its backend were nccl: a line for each object that it sends."""
    lines = []
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    c10d = torch.distributed.distributed_c10d
    c10d.is_nccl_available, c10d.get_backend = lambda: True, lambda group=None: "nccl"
    c10d.get_backend_config = c10d.get_backend
    c10d.logger.warning = lambda *args, **options: lines.append(args)
    value = {"path": os.getcwd(), "weights": torch.arange(3), "rank": rank, "none": None}
    found = checkpoint.from_primary(value)
    assert found.pop("weights").tolist() == [0, 1, 2]
    assert found == {"path": os.getcwd(), "rank": 0, "none": None}
    assert checkpoint.from_primary(None) is None and checkpoint.from_primary(b"") == b""
    assert lines == []


@WORLDS
def test_from_primary_prints_nothing_in_a_checked_group(n):
    launched(_checked, n)


# ------------------------------------------------------------------------------------- last, previous and the best


def test_last_and_previous(tmp_path):
    saved(tmp_path, 10)
    assert names(tmp_path, "*.pt") == ["last.pt"]
    saved(tmp_path, 20, 30)
    assert names(tmp_path) == [".lock", "last.pt", "previous.pt"]
    for name, step in ("last.pt", 30), ("previous.pt", 20):
        state = checkpoint.read(tmp_path / name)
        assert state["step"] == step and state["parts"]["model"]["weight"].unique().tolist() == [step]


@pytest.mark.parametrize(
    ("keep", "saves", "expected"),
    [
        (2, [(0.5, 1)], ["0.5000-step-1"]),
        (2, [(0.1, 1), (0.2, 2), (0.3, 3)], ["0.2000-step-2", "0.3000-step-3"]),
        (2, [(0.3, 1), (0.2, 2), (0.1, 3)], ["0.2000-step-2", "0.3000-step-1"]),
        (2, [(0.3, 1), (0.1, 2), (0.2, 3)], ["0.2000-step-3", "0.3000-step-1"]),
        (2, [(0.5, 1), (0.5, 2), (0.5, 3)], ["0.5000-step-1", "0.5000-step-2"]),  # equal: the earlier is the better
        (2, [(0.5, 9), (0.5, 10), (0.5, 11)], ["0.5000-step-10", "0.5000-step-9"]),  # 9 < 10: as numbers
        (2, [(0.1, 1), (0.2, 2), (0.2, 2)], ["0.1000-step-1", "0.2000-step-2"]),  # the same step again: no third one
        (1, [(0.9, 1), (1.0, 2)], ["1.0000-step-2"]),
        (1, [(9.5, 1), (10.5, 2)], ["10.5000-step-2"]),
        (0, [(0.9, 1)], []),
        (3, [(None, 1), (0.2, 2), (None, 3)], ["0.2000-step-2"]),
        (2, [(-2.5, 1), (-0.5, 2), (-1.5, 3)], ["-0.5000-step-2", "-1.5000-step-3"]),  # a loss with its sign turned
        (1, [(-4e-5, 1), (-2e-5, 2), (-3e-5, 3)], ["-2e-05-step-2"]),  # four digits don't tell them apart
        (2, [(1 / 3, 1), (0.33334, 2), (0.33332, 3)], ["0.3333333333333333-step-1", "0.33334-step-2"]),
    ],
)
def test_best(tmp_path, keep, saves, expected):
    model = linear()
    keeper = checkpoint.Keeper(tmp_path, keep=keep, model=model)
    for score, step in saves:
        nn.init.constant_(model.weight, step)
        keeper.save(step, score)
    assert names(tmp_path, "best-*") == [f"best-{name}.pt" for name in expected]
    for name in expected:
        state = checkpoint.read(tmp_path / f"best-{name}.pt")
        step = int(name.rpartition("-")[2])
        assert state["step"] == step and state["parts"]["model"]["weight"].unique().tolist() == [step]
    assert checkpoint.read(tmp_path / "last.pt")["step"] == saves[-1][1]


@pytest.mark.parametrize("score", [-1e300, 1e300], ids=str)
def test_a_huge_score_is_ranked_too(tmp_path, score):
    # All its digits would make a name that no file system takes.
    keeper = checkpoint.Keeper(tmp_path, keep=2, model=linear())
    for step, value in enumerate((0.5, score, score / 10, 2 * score, 123456.75), 1):
        keeper.save(step, value)
    best = {1e300: ["2e+300-step-4", "1e+300-step-2"], -1e300: ["123456.7500-step-5", "0.5000-step-1"]}
    assert set(names(tmp_path, "best-*")) == {f"best-{name}.pt" for name in best[score]}
    assert checkpoint.read(tmp_path / "last.pt")["step"] == 5


NOT_FINITE = [math.nan, math.inf, -math.inf, torch.tensor(math.nan)]


def _diverges(rank, n, folder):
    """With nothing saved yet, with one good checkpoint, and with as many as are kept."""
    keeper = checkpoint.Keeper(folder, keep=2, model=linear())
    best = ["best-0.1000-step-5.pt", "best-0.2000-step-10.pt", "best-0.3000-step-15.pt"]
    for step, score in enumerate([*NOT_FINITE, 0.1, *NOT_FINITE, 0.2, *NOT_FINITE, 0.3], 1):
        keeper.save(step, score)
        assert checkpoint.read(folder / "last.pt")["step"] == step
        assert step == 1 or checkpoint.read(folder / "previous.pt")["step"] == step - 1
        assert names(folder, "best-*") == best[: step // 5][-2:]


@pytest.mark.slow
@WORLDS
def test_a_diverged_run_is_saved_and_is_never_among_the_best(tmp_path, n):
    launched(_diverges, n, tmp_path)


def test_a_file_that_only_looks_like_a_best_one_is_left_alone(tmp_path):
    (tmp_path / "best-so-far.pt").write_text("mine")
    keeper = checkpoint.Keeper(tmp_path, keep=1, model=linear())
    for step in 1, 2:
        keeper.save(step, step / 10)
    assert names(tmp_path, "best-*") == ["best-0.2000-step-2.pt", "best-so-far.pt"]
    assert (tmp_path / "best-so-far.pt").read_text() == "mine"


def test_what_could_not_be_read_is_not_written(tmp_path):
    # A path, torch's version (a class of its own), numpy's numbers: read with weights_only=True they are all refused.
    saved(tmp_path, 1)
    keeper = checkpoint.Keeper(tmp_path, model=linear())
    with pytest.raises(TypeError, match=r"^torch\.torch_version\.TorchVersion can't be read back"):
        keeper.save(2, score=0.5, version=torch.__version__)
    assert names(tmp_path) == [".lock", "last.pt"]
    assert checkpoint.newest(tmp_path)[0] == tmp_path / "last.pt" and checkpoint.read(tmp_path / "last.pt")["step"] == 1


# ------------------------------------------------------------------------------------------------ write: all or nothing


def in_child(function, *args):
    """The exit status of function(*args) in a forked process: 0, or the number of the signal below 0."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_write(tmp_path):
    path, previous = tmp_path / "a.csv", tmp_path / "b.csv"
    checkpoint.write(path, b"one", previous)
    assert names(tmp_path) == ["a.csv"]
    checkpoint.write(path, b"two", previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"two", b"one")
    checkpoint.write(path, b"three")
    assert (path.read_bytes(), previous.read_bytes()) == (b"three", b"one")
    assert names(tmp_path) == ["a.csv", "b.csv"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("content", [b"new", bytes(1_000_000)], ids=["small", "large"])  # with Python's buffer, past it
def test_a_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch, content, links):
    """The order of the system calls: a power cut after any of them must leave the old file, or the complete new one."""
    path, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    calls, fsync, replace = [], os.fsync, os.replace
    path.write_bytes(b"old")

    def noted_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced = [file for file in (tmp_path, *tmp_path.iterdir()) if os.path.samestat(file.stat(), status)]
        calls.extend(("sync", "folder" if file == tmp_path else file.read_bytes()) for file in synced)

    def noted_replace(source, target):
        calls.append(("rename", source.read_bytes(), target))
        replace(source, target)

    def no_link(source, target):
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    checkpoint.write(path, content, previous)
    first, *_, last_but_one, last = calls
    assert first == ("sync", content)  # all of it, and before any name changes
    assert calls[1:-2] == [("rename", b"old", previous)]
    assert last_but_one == ("rename", content, path)
    assert last == ("sync", "folder")


def test_last_is_never_missing_whatever_a_killed_run_has_left(tmp_path, monkeypatch):
    path, previous, replace = tmp_path / "last.pt", tmp_path / "previous.pt", os.replace
    path.write_bytes(b"old")
    (tmp_path / ".previous.pt.tmp").write_bytes(b"left")

    def noted_replace(source, target):
        replace(source, target)
        assert path.exists()

    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoint.write(path, b"new", previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"new", b"old")
    assert names(tmp_path) == ["last.pt", "previous.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("size", [10, 10_000_000], ids=["at the flush", "at the write"])
def test_full_disk(tmp_path, size):
    path, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    path.write_bytes(b"good")
    previous.write_bytes(b"older")
    (tmp_path / ".last.pt.tmp").symlink_to("/dev/full")
    text = message(checkpoint.write, path, bytes(size), previous)
    assert text == f"can't write {path} (No space left on device); {path} is as it was"
    assert (path.read_bytes(), previous.read_bytes()) == (b"good", b"older")
    assert names(tmp_path) == ["last.pt", "previous.pt"]

    other = tmp_path / "other.pt"  # which isn't there yet
    (tmp_path / ".other.pt.tmp").symlink_to("/dev/full")
    assert message(checkpoint.write, other, bytes(size)) == f"can't write {other} (No space left on device)"
    assert names(tmp_path) == ["last.pt", "previous.pt"]


def _too_large(folder):
    keeper = checkpoint.Keeper(folder, model=linear(2.0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    text = message(lambda: keeper.save(2, score=0.5))
    assert "File too large" in text and f"{folder / 'last.pt'} is as it was" in text, text


def test_save_to_a_full_disk(tmp_path):
    saved(tmp_path, 1)
    content = (tmp_path / "last.pt").read_bytes()
    assert in_child(_too_large, tmp_path) == 0
    assert (tmp_path / "last.pt").read_bytes() == content
    assert names(tmp_path) == [".lock", "last.pt"]


def _too_large_for_rank_0(rank, n, folder):
    keeper = checkpoint.Keeper(folder, model=linear(2.0))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    said = torch.tensor(list(message(keeper.save, 2).encode()))
    assert all(torch.equal(other, said) for other in dist.gather(said))


def _waits(rank, n, folder):
    write = checkpoint.write

    def slow(*args, **kwargs):
        time.sleep(0.3)
        write(*args, **kwargs)

    checkpoint.write = slow
    checkpoint.Keeper(folder, model=linear(3.0)).save(3)
    assert checkpoint.read(folder / "last.pt")["step"] == 3


@WORLDS
def test_save_ends_on_all_ranks_when_rank_0_has_written(tmp_path, n):
    # A rank that were ahead could end, and whoever started them would end rank 0 in the middle of it.
    launched(_too_large_for_rank_0, n, saved(tmp_path, 1))
    assert checkpoint.read(tmp_path / "last.pt")["step"] == 1
    launched(_waits, n, tmp_path)


def test_missing_folder(tmp_path):
    path = tmp_path / "gone" / "last.pt"
    assert message(checkpoint.write, path, b"") == f"can't write {path} (No such file or directory)"


def _killed_at(point, folder, links):
    """Save step 3, and die at the point-th step of the way: in the middle of a write, before and after a rename..."""
    passed = [0]

    def pass_point():
        passed[0] += 1
        if passed[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def with_points(function):
        def call(*args, **kwargs):
            pass_point()
            result = function(*args, **kwargs)
            pass_point()
            return result

        return call

    class Halting(io.FileIO):
        def write(self, content):
            half = len(content) // 2
            super().write(content[:half])
            pass_point()
            super().write(content[half:])
            pass_point()

    keeper = checkpoint.Keeper(folder, keep=1, model=linear(3.0))
    checkpoint.open = Halting  # instead of the built-in one
    os.fsync, os.replace = with_points(os.fsync), with_points(os.replace)

    def no_link(*args):
        raise PermissionError("this file system has no hard links")

    os.link = with_points(os.link) if links else no_link
    keeper.save(3, score=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_any_point_of_a_save(tmp_path, links):
    steps, code, point, missing = [], -signal.SIGKILL, 0, 0
    while code:
        point += 1
        folder = tmp_path / str(point)
        keeper = checkpoint.Keeper(saved(folder, 1), keep=1, model=linear(2.0))
        keeper.save(2, score=0.2)
        keeper.lock.release()
        code = in_child(_killed_at, point, folder, links)
        assert code in (0, -signal.SIGKILL)
        missing += not (folder / "last.pt").exists()

        for path in folder.glob("*.pt"):
            state = checkpoint.read(path)  # none is half
            assert state["parts"]["model"]["weight"].unique().tolist() == [state["step"]]
        path, problems = checkpoint.newest(folder)
        steps.append(checkpoint.read(path)["step"])
        assert problems == []
        model = linear()
        keeper = checkpoint.Keeper(folder, keep=1, model=model)
        assert names(folder, ".*.tmp") == []  # tidied up
        keeper.restore(path)
        assert model.weight.unique().tolist() == [steps[-1]]
        keeper.save(4, score=0.4)
        assert names(folder) == [".lock", "best-0.4000-step-4.pt", "last.pt", "previous.pt"]
        kept = [checkpoint.read(folder / name)["step"] for name in ("last.pt", "previous.pt")]
        assert kept in ([4, 2], [4, 3])
    assert steps == sorted(steps) and set(steps) == {2, 3}  # nothing lost: from one point on the new one counts
    assert missing == 0 if links else missing > 0
    assert 15 <= point <= 40  # of the two files: two halves, two syncs and the renames, each before and after


# ------------------------------------------------------------------------------------------- read: what is not good


class Code:
    """Runs when it is unpickled without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_missing(tmp_path):
    path = tmp_path / "nope.pt"
    assert message(checkpoint.read, path) == f"can't read {path} (No such file or directory)"
    assert f"can't read {tmp_path} (" in message(checkpoint.read, tmp_path)


def in_old_format(path):
    state = {"step": 1, "config": {}, "parts": {}, "random": []}
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("step 1\n"), "is corrupt, or no checkpoint ("),
        (lambda path: path.write_bytes(b""), "is corrupt, or no checkpoint ("),
        (in_old_format, "is corrupt, or no checkpoint ("),
        (lambda path: torch.save(linear().state_dict(), path), "has config, parts, random, step"),
        (lambda path: torch.save(torch.zeros(3), path), "is no checkpoint of this program"),
        (lambda path: torch.save([], path), "is no checkpoint of this program"),
    ],
    ids=["text", "empty", "old format", "state dict", "tensor", "list"],
)
def test_another_file(tmp_path, make, words):
    path = tmp_path / "file.pt"
    make(path)
    text = message(checkpoint.read, path)
    assert text.startswith(f"{path} is ") and words in text


def test_foreign_code_does_not_run(tmp_path):
    path, marker = tmp_path / "evil.pt", tmp_path / "marker"
    torch.save({"step": 1, "config": Code(marker), "parts": {}, "random": []}, path)
    assert message(checkpoint.read, path).startswith(f"{path} is no checkpoint of this program: it holds more than ")
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have run


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_one_flipped_bit_in_a_tensor(tmp_path):
    path = saved(tmp_path, 1.2345) / "last.pt"
    content = path.read_bytes()
    weights = torch.full((2, 2), 1.2345).numpy().tobytes()
    start = content.index(weights)
    assert content.count(weights) == 1
    for bit in range(8 * len(weights)):
        flipped = bytearray(content)
        flipped[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert "is corrupt, or no checkpoint (wrong checksum of " in message(checkpoint.read, path)


@pytest.mark.slow
def test_one_flipped_byte_anywhere(tmp_path):
    # In a part of the file that means nothing it may go unseen: then all that is read must be as it was.
    path = saved(tmp_path, 1) / "last.pt"
    content, state = path.read_bytes(), checkpoint.read(path)
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    for place in [*range(0, directory, 31), *range(directory, len(content))]:
        flipped = bytearray(content)
        flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        try:
            assert equal(checkpoint.read(path), state), place
        except checkpoint.CheckpointError as problem:
            assert str(problem).isprintable() and str(path) in str(problem)


def test_truncated_anywhere(tmp_path):
    path = saved(tmp_path, 1) / "last.pt"
    content = path.read_bytes()
    for length in {*range(0, len(content), 97), len(content) - 1}:
        path.write_bytes(content[:length])
        assert f"{path} is corrupt, or no checkpoint (" in message(checkpoint.read, path)


# ------------------------------------------------------------------------------------------- newest, after an accident


def spoil(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_newest_is_last(tmp_path):
    saved(tmp_path, 1, 2)
    spoil(tmp_path / "previous.pt")  # nobody asks
    assert checkpoint.newest(tmp_path) == (tmp_path / "last.pt", [])


def test_newest_without_last(tmp_path):
    # As if killed between the two renames, where there are no hard links.
    saved(tmp_path, 1, 2)
    (tmp_path / "last.pt").unlink()
    assert checkpoint.newest(tmp_path) == (tmp_path / "previous.pt", [])


def folder_with_best(folder):
    """last.pt of step 30, previous.pt of 20; the best of 10 and 25."""
    keeper = checkpoint.Keeper(folder, model=linear())
    for step, score in (10, 0.5), (20, None), (25, 0.6), (20, None), (30, None):
        keeper.save(step, score)
    keeper.lock.release()
    return folder


def test_newest_when_last_is_corrupt(tmp_path):
    folder_with_best(tmp_path)
    spoil(tmp_path / "last.pt")
    path, problems = checkpoint.newest(tmp_path)
    assert path == tmp_path / "best-0.6000-step-25.pt"  # by step; not the first, not the last of the names
    assert len(problems) == 1 and f"{tmp_path / 'last.pt'} is corrupt" in problems[0]

    spoil(path)
    path, problems = checkpoint.newest(tmp_path)
    assert path == tmp_path / "previous.pt" and len(problems) == 2


def test_newest_of_none(tmp_path):
    assert message(checkpoint.newest, tmp_path) == f"there is no checkpoint in {tmp_path}"
    folder_with_best(tmp_path)
    for path in tmp_path.glob("*.pt"):
        spoil(path)
    text = message(checkpoint.newest, tmp_path)
    assert all(f"{tmp_path / name} is corrupt" in text for name in names(tmp_path, "*.pt"))


def test_a_corrupt_last_does_not_push_out_the_good_one(tmp_path):
    saved(tmp_path, 1, 2)
    spoil(tmp_path / "last.pt")
    corrupt = (tmp_path / "last.pt").read_bytes()
    path, _ = checkpoint.newest(tmp_path)
    assert path == tmp_path / "previous.pt"
    model = linear()
    keeper = checkpoint.Keeper(tmp_path, model=model)
    assert keeper.restore(path)["step"] == 1 and model.weight.unique().tolist() == [1]
    assert (tmp_path / "last.pt.corrupt").read_bytes() == corrupt
    assert checkpoint.newest(tmp_path) == (path, [])
    keeper.save(5)
    kept = {name: checkpoint.read(tmp_path / name)["step"] for name in names(tmp_path, "*.pt")}
    assert kept == {"last.pt": 5, "previous.pt": 1}


def test_another_runs_checkpoint_leaves_last_alone(tmp_path):
    other = saved(tmp_path / "other", 7)
    saved(tmp_path / "mine", 1)
    keeper = checkpoint.Keeper(tmp_path / "mine", model=linear())
    assert keeper.restore(other / "last.pt")["step"] == 7
    assert names(tmp_path / "mine", "*.pt*") == ["last.pt"]


# -------------------------------------------------------------------------------------- what doesn't fit, on all ranks


def _misfits(rank, n, folder):
    """Every one is the same error on all ranks, and the group still works."""
    cases = [
        ("last.pt", {"model": linear(outputs=3)}, "last.pt doesn't fit this model (", "size mismatch"),
        ("last.pt", {"model": nn.Linear(2, 2)}, "last.pt doesn't fit this model (", "bias"),
        ("last.pt", {"net": linear()}, "last.pt doesn't fit this net (", "net"),
        ("nope.pt", {"model": linear()}, "can't read ", "No such file"),
        ("text.pt", {"model": linear()}, "text.pt is corrupt, or no checkpoint (", ""),
    ]
    for name, parts, *words in cases:
        keeper = checkpoint.Keeper(folder, **parts)
        text = message(keeper.restore, folder / name if rank == 0 else None)
        assert all(word in text for word in words), text
        said = torch.tensor(list(text.encode()))
        assert all(torch.equal(other, said) for other in dist.gather(said))
        if rank == 0:
            keeper.lock.release()


@WORLDS
def test_what_does_not_fit_is_one_error_on_all_ranks(tmp_path, n):
    saved(tmp_path, 1)
    (tmp_path / "text.pt").write_text("?")
    launched(_misfits, n, tmp_path)


# ------------------------------------------------------------------------------------------------- one at a time


def _hold(folder, pipe):
    keeper = checkpoint.Keeper(folder, model=linear())
    pipe.send("held")
    pipe.recv()
    keeper.save(1)
    os._exit(0)


def test_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT", 0.3)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    try:
        assert ours.recv() == "held"
        (tmp_path / ".last.pt.tmp").write_text("half")  # the holder's, which is at work
        started = time.monotonic()
        text = message(lambda: checkpoint.Keeper(tmp_path, model=linear()))
        assert 0.3 <= time.monotonic() - started < 15
        assert text == f"another process is writing to {tmp_path}: end it first"
        assert (tmp_path / ".last.pt.tmp").exists()
    finally:
        holder.kill()  # gives it no chance to let go
        holder.join()
    checkpoint.Keeper(tmp_path, model=linear())
    assert names(tmp_path) == [".lock"]  # and what was left half is gone


def test_a_run_that_failed_in_this_process_does_not_lock_out_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT", 0.3)
    failed = checkpoint.Keeper(tmp_path, model=linear())  # a traceback may keep it, as sys.last_traceback does
    checkpoint.Keeper(tmp_path, model=linear()).save(1)
    assert failed.lock.is_locked


def test_a_folder_that_can_not_be_locked(tmp_path, monkeypatch):
    def read_only(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoint.FileLock, "acquire", read_only)
    assert message(lambda: checkpoint.locked(tmp_path)) == (
        f"can't write to {tmp_path} (Read-only file system): copy it, or start a new run from a checkpoint in it"
    )


def test_waits_for_the_processes_of_a_killed_run(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    assert ours.recv() == "held"
    ours.send("go on")
    try:
        checkpoint.Keeper(tmp_path, model=linear())
        assert checkpoint.read(tmp_path / "last.pt")["step"] == 1  # it came after the other's last word
    finally:
        holder.join()


# ---------------------------------------------------------------------------------------------- told to stop (SIGTERM)


def _told(rank, n, which):
    stop = checkpoint.Preemption()
    assert not stop.asked
    answers = []
    for call in range(4):
        if call == 2 and rank == which:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(stop.agreed())
    assert stop.asked == (rank == which)  # this process's own answer
    assert answers == [False, False, True, True]  # on every rank, whoever was told
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which multiprocessing ends this process


@WORLDS
def test_sigterm_to_one_rank_is_agreed_on_at_the_same_call(n):
    launched(_told, n, n - 1)


def _late_to_agree(rank, n):
    stop = checkpoint.Preemption()
    if rank == 1:
        time.sleep(8)
    stop.agreed()


@pytest.mark.slow
def test_agreed_has_the_time_out_of_the_other_collectives(monkeypatch):
    monkeypatch.setenv("DIST_TIMEOUT", "1")
    monkeypatch.setenv("DIST_GRACE", "0")
    with pytest.raises(SystemExit, match=r"rank 0 of 2 failed first: (?s:.*)\n  rank 1: .*, _late_to_agree$"):
        launched(_late_to_agree, 2)


def _asleep():
    time.sleep(60)


def _asleep_in_c():
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL: no Python code can run, so no Python handler either


def _parent_of_a_sleeper(pipe):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    pipe.send(child)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _ends_its_children(rank, n):
    stop, context = checkpoint.Preemption(), multiprocessing.get_context("fork")
    for target in [_asleep, _asleep_in_c] * 3:
        child = context.Process(target=target, daemon=True)
        child.start()
        child.terminate()  # at once: it has hardly run a line
        child.join(5)
        code = child.exitcode
        child.kill()  # or, if this fails, it would sleep on
        assert code == -signal.SIGTERM
    ours, theirs = context.Pipe()
    parent = context.Process(target=_parent_of_a_sleeper, args=(theirs,), daemon=True)
    thread = threading.Thread(target=parent.start)  # a fork by another thread than the main one
    thread.start()
    thread.join()
    os.kill(ours.recv(), signal.SIGTERM)
    assert ours.poll(5) and ours.recv() == -signal.SIGTERM
    assert not stop.agreed()
    os.kill(os.getpid(), signal.SIGTERM)  # this process itself still handles it
    assert stop.agreed()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("n", [1, 2])
def test_forked_processes_end_by_sigterm(n):
    if n == 1:
        assert in_child(joined, 0, 1, _ends_its_children, ()) == 0
    else:
        launched(_ends_its_children, n)


def _leaves_a_daemon(rank, n):
    stop = checkpoint.Preemption()
    multiprocessing.get_context("fork").Process(target=_asleep, daemon=True).start()
    assert not stop.asked


def test_a_run_ends_though_a_daemon_process_of_a_worker_sleeps():
    # multiprocessing ends the daemons of a process by SIGTERM, and waits for them.
    started = time.monotonic()
    launched(_leaves_a_daemon, 2)
    assert time.monotonic() - started < 30


def _expect(handler, mask):
    assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def _has_handlers_of_its_own(rank, n):
    for handler in signal.SIG_IGN, signal.SIG_DFL, print:
        signal.signal(signal.SIGTERM, handler)
        stops = []
        for _ in range(2):  # a second one in the same process, too
            stops.append(checkpoint.Preemption())
            for mask in set(), {signal.SIGTERM}:  # `launch` blocks it while it starts the workers
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                assert in_child(_expect, handler, mask) == 0
                assert signal.pthread_sigmask(signal.SIG_SETMASK, []) == mask
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _puts_back(rank, n):
    before = signal.signal(signal.SIGTERM, print)
    stop = checkpoint.Preemption()
    first = signal.getsignal(signal.SIGTERM)
    stop = checkpoint.Preemption()  # the first one goes when the second one is there
    assert not stop.asked and signal.getsignal(signal.SIGTERM) not in (first, print)
    del stop
    assert signal.getsignal(signal.SIGTERM) == print
    signal.signal(signal.SIGTERM, before)


def test_the_handler_from_before_comes_back():
    launched(_puts_back, 1)


def test_forked_processes_get_the_handler_from_before():
    launched(_has_handlers_of_its_own, 1)
