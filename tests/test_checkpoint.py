"""checkpoint.py: what was saved comes back on every rank, whatever was killed, full or damaged in between."""

import contextlib
import io
import math
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from world import error_of, gone, on_ranks, run, wait_for

import checkpoint
import distributed as dist


def linear(value=0.0, outputs=2):
    model = nn.Linear(2, outputs, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def save(folder, *steps, **options):
    """A checkpoint of each step, on every rank; the weights are the step."""
    model = linear()
    keeper = checkpoint.Keeper(folder, model=model, **options)
    for step in steps:
        nn.init.constant_(model.weight, step)
        keeper.save(step)
    return keeper


def restored(folder):
    """The weights that `restore` brings back, or its error."""
    model = linear()
    error = error_of(checkpoint.Keeper(folder, model=model).restore)
    return error if isinstance(error, str) else model.weight[0, 0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


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
    state |= {"lr": torch.tensor(parts["optimizer"].param_groups[0]["lr"]), "random": torch.rand(5)}
    return {name: tensor.clone() for name, tensor in state.items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def there_and_back(folder):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = trained(seed=1)
    torch.manual_seed(10 + rank)
    keeper = checkpoint.Keeper(folder, {"lr": 0.1, "names": ["a"]}, **parts)
    assert keeper.restore() == {}
    at_3 = steps(parts, 3)
    keeper.save(3, notes=checkpoint.from_all(rank), mean=1.5, values=[torch.tensor([2.0])])
    at_5 = steps(parts, 2)
    assert len({tuple(row.tolist()) for row in dist.gather(at_5["random"])}) == n  # each rank has numbers of its own

    parts = trained(seed=2)  # another start, other random numbers
    assert differing(steps(parts, 2), at_5) >= {"0.weight", "1.running_mean", "momentum 0", "random"}
    with pytest.MonkeyPatch.context() as patch:
        if n > 1:
            patch.setenv("LOCAL_RANK", "0")  # as if each were on a machine of its own
        state = checkpoint.Keeper(folder, **parts).restore()
    assert (state["step"], state["notes"], state["mean"]) == (3, list(range(n)), 1.5)
    assert state["values"][0].item() == 2.0 and state["config"] == {"lr": 0.1, "names": ["a"]}
    # Rank 0's running averages are those that count, and all get them: the others' own are not kept.
    assert differing(steps(parts, 2), at_5) <= ({"1.running_mean", "1.running_var"} if rank else set())
    return {name: value for name, value in at_3.items() if "." in name}


def of_another_world(folder):
    parts = trained(seed=3)
    before = torch.get_rng_state()
    assert checkpoint.Keeper(folder, **parts).restore()["step"] == 3
    assert torch.equal(torch.get_rng_state(), before)
    return dict(dist.unwrap_model(parts["model"]).state_dict())


@pytest.mark.parametrize("n", [1, 3])
def test_there_and_back(tmp_path, n):
    expected = run(there_and_back, n, tmp_path)[0]
    assert names(tmp_path) == ["step-3.pt"]
    state = torch.load(tmp_path / "step-3.pt", weights_only=True)  # as anybody's program would read it
    assert state.keys() == {"step", "config", "parts", "orders", "random", "notes", "mean", "values"}
    assert state["parts"].keys() == {"model", "optimizer", "scheduler"} and len(state["random"]) == n
    assert differing(state["parts"]["model"], expected) == set()  # the names are those without DDP: no "module."
    for got in run(of_another_world, 4 - n, tmp_path):
        assert differing(got, expected) == set()


@pytest.mark.parametrize(
    ("keep", "saves", "expected"),
    [
        (1, [(1, 0.5), (2, 0.5), (3,), (4,)], "1-score-0.5 3 4"),
        (1, [(1, -2), (2, -1e-30), (3,), (4,)], "2-score--1e-30 3 4"),
        (2, [(1, 3), (2, 9), (3, 10), (4, 1), (5,)], "2-score-9.0 3-score-10.0 4-score-1.0 5"),
        (0, [(8, 0.5), (9,), (10,)], "9 10"),
        (2, [(1, 0.5), (2, 0.9), (2, 0.1), (2,)], "1-score-0.5 2"),  # of one step the last counts
    ],
)
def test_a_save_keeps_the_last_two_and_the_best(tmp_path, keep, saves, expected):
    (tmp_path / "step-one.pt").write_text("not ours")
    keeper = checkpoint.Keeper(tmp_path, keep=keep)
    for arguments in saves:
        keeper.save(*arguments)
    assert names(tmp_path) == sorted(f"step-{name}.pt" for name in [*expected.split(), "one"])
    assert keeper.restore()["step"] == saves[-1][0]


@on_ranks(3)
def test_a_step_or_a_score_that_differs_between_ranks_is_refused(tmp_path):
    """Or "best" would be what one rank's own examples say."""
    rank = dist.get_rank()
    keeper = save(tmp_path, 1)
    alone = "differs from rank 0's, which alone would be kept."
    of_steps = f"rank 1's {alone} Call save after the same number of steps on all ranks"
    of_scores = f"rank 2's {alone} Reduce the score over all ranks before saving: dist.reduce(score)"
    assert error_of(keeper.save, 2 + rank) == f"CheckpointError: can't save step: {of_steps}"
    for score in (0.5, 0.5, 0.5000001), (0.5, 0.5, None), (None, None, 0.0), (1e300, 1e300, -1e300):
        assert error_of(keeper.save, 2, score[rank]) == f"CheckpointError: can't save score: {of_scores}"
    assert names(tmp_path) == ["step-1.pt"]
    keeper.save(2, (1, 1.0, torch.ones(1))[rank])  # equal numbers
    assert names(tmp_path) == ["step-1.pt", "step-2-score-1.0.pt"]


@on_ranks(3)
def test_a_bad_argument_of_one_rank_is_refused_on_all(tmp_path):
    """Whichever rank it is; and none of them waits: the next save works."""
    keeper, rank = save(tmp_path, 1), dist.get_rank()
    for culprit in range(3):
        scores = [{"score": score} for score in (math.nan, "0.5", 10**400, torch.ones(2))]
        for arguments in {"step": True}, {"step": -1}, {"step": 2.0}, *scores, {"parts": 1}:
            error = error_of(keeper.save, **{"step": 2} | (arguments if rank == culprit else {}))
            assert error.startswith("ValueError: save: " if rank == culprit else "CheckpointError: ValueError: save: ")
        for arguments in {"keep": -1}, {"keep": True}, {"folder": None}, {"best": 0.5}:
            error = error_of(checkpoint.Keeper, **{"folder": tmp_path} | (arguments if rank == culprit else {}))
            assert ("CheckpointError: " in error) == (rank != culprit) and "\n" not in error
    assert names(tmp_path) == ["step-1.pt"]
    keeper.save(2)
    assert names(tmp_path) == ["step-1.pt", "step-2.pt"]


@on_ranks(3)
def test_a_value_that_could_not_be_restored_is_not_saved(tmp_path):
    keeper = save(tmp_path, 1)
    for kind, value in ("pathlib", Path("a")), ("numpy", np.float64(1)):
        error = error_of(keeper.save, 2, value=value)
        assert error.startswith(f"CheckpointError: can't write {tmp_path}/step-2.pt ({kind}")
    assert names(tmp_path) == ["step-1.pt"]


def part(state):
    """A part that has this state; an error is raised."""

    def state_dict():
        if isinstance(state, Exception):
            raise state
        return state

    return SimpleNamespace(state_dict=state_dict, load_state_dict=lambda saved: None)


def momenta(*values):
    """The state of an optimizer with a momentum for each value."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = torch.full((2,), float(value))
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    optimizer.step()
    return optimizer


def refusal(folder, advice, values=(), **parts):
    """The error of `save`, the same on all ranks, in one line with this advice; nothing is written."""
    keeper = checkpoint.Keeper(folder, **parts)
    before = names(folder)
    error = error_of(keeper.save, 2, **dict(values))
    assert names(folder) == before and "\n" not in error and advice in error, error
    assert checkpoint.from_all(error) == [error] * dist.get_world_size()
    return error


OF_ALL = "save all ranks' values: save(step, name=checkpoint.from_all(mine))"
SHARDS = "with torch.distributed.checkpoint"


@on_ranks(3)
def test_parts_that_differ_between_ranks_are_refused(tmp_path):
    rank = dist.get_rank()
    is_last = rank == 2
    save(tmp_path, 1)
    weight = torch.ones(3, 2, dtype=torch.bfloat16)
    weight[2, 1] += is_last / 128  # bfloat16's next number
    for state, name in [  # what the ranks have, and the name that is given
        ({"a": torch.zeros(2), "b": [weight]}, ".b.0"),
        ({"a": torch.zeros(2, 3) if is_last else torch.zeros(3, 2)}, ".a"),
        ({"a": torch.zeros(1, dtype=torch.int32 if is_last else torch.float32)}, ".a"),
        ({"best": [float("inf") if is_last else float("nan")]}, ".best.0"),  # of a schedule by the rank's own loss
        ({"a": 0, "more": 0} if is_last else {"a": 0}, ".more"),
        ({"a": 0} if is_last else {"a": 0, "more": 0}, ".more"),
    ]:
        error = refusal(tmp_path, OF_ALL, model=linear(), net=part(state))
        assert error.startswith(f"CheckpointError: can't save net{name}: rank 2's differs from rank 0's"), error
        error = refusal(tmp_path, OF_ALL, {"net": state}, model=linear())  # the same, as a value by name
        assert error.startswith(f"CheckpointError: can't save net{name}: rank 2's differs from rank 0's"), error
    error = refusal(tmp_path, SHARDS, optimizer=momenta(1, rank))  # ZeRO-1 by hand; the first that differs is named
    assert "can't save optimizer.state.1.momentum_buffer: rank 1's differs" in error
    assert "Wrap the model in DDP" in refusal(tmp_path, SHARDS, model=linear(rank))
    error = refusal(tmp_path, SHARDS, net=part(ValueError("of\nmine") if rank == 1 else {}))  # as torch's ZeRO-1 does
    assert "can't save net: rank 1's state_dict raises an error (ValueError: of mine)" in error


@on_ranks(3)
def test_a_call_on_some_ranks_only_gets_the_table_of_calls(tmp_path):
    rank = dist.get_rank()
    keeper = checkpoint.Keeper(tmp_path, model=linear())
    calls = {"Keeper.save": lambda: keeper.save(1), "Keeper.restore": keeper.restore}
    calls |= {"Keeper": lambda: checkpoint.Keeper(tmp_path), "from_all": lambda: checkpoint.from_all(0)}
    for name, call in calls.items():
        error = error_of(call if rank == 1 else lambda: dist.reduce(torch.zeros(2)))
        others = "reduce mean of torch.float32 [2]"
        assert error.endswith(f"\n  rank 0: {others}\n  rank 1: {name}\n  rank 2: {others}"), error
    assert names(tmp_path) == []


def adam(model, order):
    optimizer = torch.optim.Adam([{"params": [list(model.parameters())[i] for i in order]}])
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    return optimizer


@on_ranks(1, 3)
def test_an_optimizer_whose_parameters_have_another_order_is_refused(tmp_path):
    """torch keeps the state by position, so that a group made from a set would get another parameter's."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(3)]
    checkpoint.Keeper(tmp_path, model=models[0], optimizer=adam(models[0], (0, 2, 1, 3))).save(1)
    same = checkpoint.Keeper(tmp_path, model=torch.compile(models[1]), optimizer=adam(models[1], (0, 2, 1, 3)))
    assert same.restore()["step"] == 1
    moment = same.parts["optimizer"].state[models[1][1].weight]["exp_avg"]
    assert torch.allclose(moment, torch.full((3, 3), 0.2))  # a tenth of the gradient of the third parameter
    other = checkpoint.Keeper(tmp_path, model=models[2], optimizer=adam(models[2], (2, 0, 1, 3)))
    error = error_of(other.restore)
    assert re.fullmatch("CheckpointError: .* doesn't fit this optimizer .*order.*from lists, not sets", error), error
    state = checkpoint.read(tmp_path / "step-1.pt")
    del state["orders"]  # as version 0.8 and older ones wrote it
    if dist.is_primary():
        checkpoint.write(tmp_path / "step-2.pt", state)
    dist.barrier()
    assert other.restore()["step"] == 1
    if dist.get_world_size() == 3:
        order = (2, 0, 1, 3) if dist.get_rank() == 1 else (0, 2, 1, 3)
        error = refusal(tmp_path, "make its groups from lists", model=models[1], optimizer=adam(models[1], order))
        assert error.startswith("CheckpointError: can't save optimizer: rank 1's differs"), error


@on_ranks(1, 3)
def test_a_set_is_equal_in_any_order_and_an_error_of_one_rank_is_one_of_all(tmp_path):
    rank = dist.get_rank()
    order = (0, 8) if rank == 1 else (8, 0)  # as in two processes that hash strings differently
    assert repr(set(order)) == ("{0, 8}" if rank == 1 else "{8, 0}")
    refusal = error_of(checkpoint.Keeper(tmp_path, other=part({"names": set(order)})).save, 1)
    assert not refusal or "builtins.set in it is not a tensor" in refusal  # by torch 2.4, which can't read one
    error = error_of(checkpoint.Keeper, "a\0b")  # rank 0 makes the folder: the others don't wait for it
    assert error.startswith("ValueError: " if rank == 0 else "CheckpointError: ValueError: ") and "null" in error


@on_ranks(1, 3)
def test_parts_that_are_equal_on_all_ranks_are_saved(tmp_path):
    rank = dist.get_rank()
    net = nn.Sequential(linear(float("nan")), nn.BatchNorm1d(2))
    nn.init.constant_(net[1].running_mean, rank)  # each rank's own
    state = {"empty": torch.zeros(0, 2), "scalar": torch.tensor(True), "nan": [float("nan"), torch.tensor(math.nan)]}
    state |= {"half": torch.ones(2, dtype=torch.bfloat16), "strides": torch.arange(6).view(2, 3)}
    state |= {"sparse": torch.eye(2).to_sparse(), "conjugate": torch.ones(2, dtype=torch.complex64).conj()}
    net.register_buffer("adjacency", torch.eye(3).to_sparse())
    if rank == 1:
        state = dict(reversed(state.items())) | {"strides": torch.arange(6).view(2, 3).T.contiguous().T}
    parts = {"net": net, "average": torch.optim.swa_utils.AveragedModel(net), "other": part(state)}
    checkpoint.Keeper(tmp_path, **parts, optimizer=momenta(1, math.nan)).save(2, state=state)
    keeper = checkpoint.Keeper(tmp_path, **parts, optimizer=momenta(0, 0))
    assert (keeper.restore()["state"]["scalar"].item(), net[1].running_mean.tolist()) == (True, [0, 0])
    assert torch.equal(keeper.parts["optimizer"].state_dict()["state"][0]["momentum_buffer"], torch.ones(2))


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="FSDP on the CPU: see variants/sharded.py")
@on_ranks(3)
def test_a_sharded_model_is_refused(tmp_path):
    """Even if the shares happen to be equal."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 3)
    for param in model.parameters():
        nn.init.constant_(param, 1.5)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (3,)))
    assert "can't save model.weight: rank 1's differs from rank 0's" in refusal(tmp_path, SHARDS, model=model)


def test_names_are_those_without_torch_compile(tmp_path):
    """Of one layer, too.  And whether it is compiled now may be another answer than when it was saved."""

    def net(value, compiled):
        layers = linear(value), nn.BatchNorm1d(2)
        return nn.Sequential(*(torch.compile(layer, backend="eager") if compiled else layer for layer in layers))

    for was_compiled, is_compiled in (True, True), (True, False), (False, True):
        folder = tmp_path / f"{was_compiled} {is_compiled}"
        checkpoint.Keeper(folder, net=net(2.0, was_compiled)).save(1)
        model = net(0.0, is_compiled)
        saved = checkpoint.Keeper(folder, net=model).restore()["parts"]["net"]
        assert [*saved] == [*net(0.0, False).state_dict()] and next(model.parameters()).tolist() == [[2.0] * 2] * 2
    old = {"step": 2, "config": {}, "parts": {"net": net(3.0, True).state_dict()}, "random": []}
    checkpoint.write(tmp_path / "True True" / "step-2.pt", old)  # as this file wrote it before
    for model in net(0.0, True), net(0.0, False):
        checkpoint.Keeper(tmp_path / "True True", net=model).restore()
        assert next(model.parameters()).tolist() == [[3.0] * 2] * 2
    error = error_of(checkpoint.Keeper(folder, net=nn.Sequential(linear())).restore)
    assert "doesn't fit this net (RuntimeError: " in error and "Unexpected key(s)" in error


@on_ranks(3)
def test_full_disk(tmp_path):
    folder = tmp_path / "run"
    keeper = checkpoint.Keeper(folder, model=linear(1.0))
    keeper.save(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    errors = [error_of(keeper.save, 2, much=torch.zeros(size)) for size in (30_000, 1_000_000)]
    keeper.save(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert errors == [f"CheckpointError: can't write {folder}/step-2.pt ([Errno 27] File too large)"] * 2
    assert names(folder) == ["step-1.pt", "step-3.pt"]


def test_nothing_is_written_through_what_somebody_has_planted(tmp_path, monkeypatch):
    """In a folder that others may write to: links of both kinds, and folders, under names that can be foreseen."""
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    keeper = save(folder, 1)
    (folder / ".step-2.pt.tmp").symlink_to(precious)
    (folder / "step-2.pt").symlink_to(precious)
    os.link(precious, folder / "step-3.pt")
    (folder / ".step-3.pt.tmp").mkdir()
    assert error_of(keeper.save, 2).endswith("step-3.pt is later than step 2: restore it, or use another folder")
    keeper.save(3)
    (folder / "step-4.pt").symlink_to(tmp_path / "new")  # leads nowhere yet
    keeper.save(4)
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (folder / ".step-5.pt.guessed.tmp").symlink_to(precious)
    assert error_of(keeper.save, 5).startswith(f"CheckpointError: can't write {folder}/step-5.pt ([Errno 17] ")
    keeper = save(folder, 5)
    assert names(folder) == [".step-3.pt.tmp", "step-4.pt", "step-5.pt"]
    assert not any(path.is_symlink() for path in folder.iterdir()) and restored(folder) == 5
    assert precious.read_text() == "precious" and not (tmp_path / "new").exists()


def test_only_files_count(tmp_path):
    """Whoever opens a FIFO is blocked, and a link may lead nowhere."""
    save(tmp_path, 1)
    os.mkfifo(tmp_path / "step-7.pt")
    (tmp_path / "step-8.pt").symlink_to(tmp_path / "nothing")
    assert restored(tmp_path) == 1
    save(tmp_path, 7)  # in the FIFO's place
    assert restored(tmp_path) == 7


def test_a_later_chdir_does_not_matter(tmp_path, monkeypatch):
    for name in "here", "there":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    keeper = save(Path("run"), 1)
    monkeypatch.chdir(tmp_path / "there")
    keeper.save(2)
    assert keeper.restore()["step"] == 2
    assert names(tmp_path / "here" / "run") == ["step-1.pt", "step-2.pt"] and names(tmp_path / "there") == []


def test_newest_while_another_process_saves(tmp_path):
    save(tmp_path, 0)
    pid = os.fork()
    if not pid:
        save(tmp_path, *range(1, 100), keep=0)
        os._exit(0)
    seen = [0]
    while seen[-1] < 99:
        path, problems = checkpoint.newest(tmp_path)
        assert not problems
        seen.append(int(path.stem.removeprefix("step-")))
    assert seen == sorted(seen) and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kill_at(call, folder):
    """Save, in a fork of this process; SIGKILL it before this call of what touches files."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    calls = iter(range(call))

    def dying(function):
        def wrapper(*args, **options):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapper

    torch.save, os.fsync, os.replace, os.unlink = map(dying, (torch.save, os.fsync, os.replace, os.unlink))
    Path.unlink = dying(Path.unlink)
    save(folder, 2, 3)  # in place of another, and beside it
    os._exit(0)


def test_killed_at_any_point_of_a_save(tmp_path):
    codes = []
    while not codes or codes[-1]:
        folder = tmp_path / str(len(codes))
        save(folder, 1, 2)
        codes.append(kill_at(len(codes), folder))
        path, damaged = checkpoint.newest(folder)
        assert int(path.stem.removeprefix("step-")) == restored(folder) >= 2 and not damaged
        assert {name for name in names(folder) if name.endswith(".tmp")} == set()  # `restored` has removed it
        assert len(names(folder)) in (2, 3)
    assert set(codes[:-1]) == {-signal.SIGKILL} and len(codes) > 8


def flip(path, position, mask):
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def test_a_flipped_bit_anywhere_is_seen(tmp_path):
    """Or it is where nothing looks: in the padding between the parts."""
    save(tmp_path, 1, 2)
    path = tmp_path / "step-2.pt"
    expected = checkpoint.read(path)["parts"]["model"]["weight"].clone()
    seen = 0
    for position in range(0, path.stat().st_size, 29):
        flip(path, position, 64)
        state = error_of(checkpoint.read, path, test=True)
        if isinstance(state, str):
            seen += 1
            assert state.startswith(f"Damaged: {path} is damaged") and "\n" not in state
        else:
            assert torch.equal(state["parts"]["model"]["weight"], expected) and state["step"] == 2
        flip(path, position, 64)
    assert seen > path.stat().st_size / 29 / 3


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("it ran"),)


def test_a_foreign_file_is_refused_and_the_one_before_is_used(tmp_path, monkeypatch, capsys):
    """And it does not count among the last two."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    save(folder, 1, 2)
    foreign = folder / "step-30.pt"
    for content in "text", {"weights": torch.zeros(2)}, {"step": 3, "config": Trap(), "parts": {}, "random": []}:
        foreign.write_text(content) if content == "text" else torch.save(content, foreign)
        assert restored(folder) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{foreign} is damaged, or not a checkpoint (")
        assert line.endswith(f": resuming from {folder}/step-2.pt")
    assert not (tmp_path / "it ran").exists()
    keeper = checkpoint.Keeper(folder, model=linear())
    keeper.restore()
    keeper.save(15)
    assert [name for name in names(folder) if name.endswith(".pt")] == ["step-15.pt", "step-2.pt"]


def test_an_error_that_is_not_the_files_fault_ends_the_run_and_leaves_every_file(tmp_path):
    """A folder in the file's place; then too many open files, in our test or in torch's reader."""
    save(tmp_path, 1, 2)
    keeper = checkpoint.Keeper(tmp_path, model=linear())
    (tmp_path / "step-3.pt").mkdir()
    errors = [error_of(keeper.restore)]
    assert names(tmp_path) == ["step-1.pt", "step-2.pt", "step-3.pt"]
    (tmp_path / "step-3.pt").rmdir()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        numbers = [opened.enter_context(open(os.devnull)).fileno() for _ in range(20)]  # so that no lower one is free
        for free in 0, 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers) + 1 + free, limits[1]))
            errors.append(error_of(keeper.restore))
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for error in errors:
        assert error.startswith(f"CheckpointError: can't read {tmp_path}") and "\n" not in error
    assert names(tmp_path) == ["step-1.pt", "step-2.pt"]


@on_ranks(1, 3)
def test_a_wrong_random_state_a_folder_and_a_loss_of_one_rank_are_one_line_each(tmp_path):
    keeper = save(tmp_path, 1)
    if dist.is_primary():
        for step, random in enumerate([[{}], {"cpu": 1}, "text", [None], [{"cpu": 3}], [{"cpu": torch.zeros(3)}]], 2):
            torch.save({"step": step, "config": {}, "parts": {}, "random": random}, tmp_path / f"step-{step}.pt")
    dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert keeper.restore()["step"] == 1
    said = err.getvalue().splitlines()
    assert len(said) == (6 if dist.is_primary() else 0)
    assert all("(it lacks step, config, parts or the random states): resuming from" in line for line in said)
    (tmp_path / "step-9.pt").mkdir(exist_ok=True)
    dist.barrier()
    reason = "(it is a folder, not a checkpoint: give it another name)"
    assert error_of(keeper.restore) == f"CheckpointError: can't read {tmp_path}/step-9.pt {reason}"
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    scheduler.step(1.5 + dist.get_rank())
    keeper = checkpoint.Keeper(tmp_path / "other", scheduler=scheduler)
    error = str(error_of(keeper.save, 1))
    own = "which alone would be kept. Give a loss to an optimizer or a scheduler as dist.reduce(loss)"
    assert own in error if dist.get_world_size() > 1 else error == "None"


@on_ranks(1, 3)
def test_agreed_in_some_steps_only():
    stop = checkpoint.Preemption()
    stop.asked = dist.get_rank() == dist.get_world_size() - 1
    assert [stop.agreed(every=3) for _ in range(7)] == [False, False, True] * 2 + [False]
    assert stop.agreed()
    for wrong in 0, -1, 2.5, "2", None:
        assert error_of(stop.agreed, wrong) == f"ValueError: agreed: every is {wrong!r}: give an integer of at least 1"


@on_ranks(3)
def test_if_all_are_damaged_it_is_an_error_on_all_ranks(tmp_path):
    save(tmp_path, 1, 2)
    if dist.is_primary():
        for path in tmp_path.glob("*.pt"):
            flip(path, path.read_bytes().index(b"data/0"), 1)
    error = restored(tmp_path)
    assert error.startswith("CheckpointError: ") and "\n" not in error
    assert all(f"{tmp_path}/step-{step}.pt is damaged" in error for step in (1, 2))


@on_ranks(3)
def test_what_does_not_fit_is_one_error_on_all_ranks(tmp_path):
    save(tmp_path, 1)
    outputs = 3 if dist.get_rank() == 1 else 2  # no rank goes on without the one that can't
    for name, part in ("model", linear(outputs=outputs)), ("net", linear()):
        error = error_of(checkpoint.Keeper(tmp_path, **{name: part}).restore)
        assert error.startswith(f"CheckpointError: {tmp_path}/step-1.pt doesn't fit this {name} ("), error
        assert "\n" not in error


@on_ranks(3)
def test_a_rank_that_sees_another_folder(tmp_path):
    """And maybe a checkpoint of its own there: of the same name, but of another run."""
    folder = tmp_path
    if dist.get_rank() == 1:
        folder = folder / "other"
        folder.mkdir()
    save(folder, 1)
    said = f"CheckpointError: rank 1 doesn't see rank 0's {tmp_path}/step-1.pt: put the run's folder where all "
    assert restored(folder).startswith(said)
    if dist.get_rank() == 1:
        random = [{"cpu": torch.get_rng_state()} for _ in range(3)]
        state = {"step": 1, "config": {}, "parts": {"model": linear(5.0).state_dict()}, "random": random}
        checkpoint.write(folder / "step-1.pt", state)
    assert restored(folder).startswith(said)


def test_a_second_run_waits_for_one_that_is_still_ending(tmp_path):
    """If that one goes on: test_cifar10.py."""
    pid = os.fork()
    if not pid:
        try:
            with save(tmp_path, 1).lock:
                time.sleep(0.3)
                os._exit(0)  # it still has the lock
        finally:
            os._exit(1)
    wait_for((tmp_path / "step-1.pt").exists)
    save(tmp_path, 2)
    assert gone(pid) and names(tmp_path) == ["step-1.pt", "step-2.pt"]
    os.waitpid(pid, 0)


@on_ranks(1, 3)
def test_sigterm_to_one_rank_is_agreed_on_by_all_and_a_forked_process_ends_by_it():
    is_told = dist.get_rank() == dist.get_world_size() - 1
    usual = signal.getsignal(signal.SIGTERM)
    stop = checkpoint.Preemption()
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(theirs, b"!")
        time.sleep(30)
        os._exit(0)
    os.read(ours, 1)  # it runs: Python forgets what comes during a fork
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM and not stop.agreed()
    if is_told:
        os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.asked, stop.agreed()) == (is_told, True)
    signal.signal(signal.SIGTERM, usual)


@on_ranks(1, 3)
def test_outside_the_main_thread_sigterm_is_left_to_its_owner():
    """As in Ray Train, whose loops run in a thread, and whose own handler stays."""
    usual = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(io.StringIO()) as out, ThreadPoolExecutor(1) as pool:
        stop = pool.submit(checkpoint.Preemption).result()
        assert (stop.asked, pool.submit(stop.agreed).result()) == (False, False)
    line = "SIGTERM is not noticed outside the main thread: use the platform's own notice\n"
    assert out.getvalue() == (line if dist.is_primary() else "") and signal.getsignal(signal.SIGTERM) == usual
