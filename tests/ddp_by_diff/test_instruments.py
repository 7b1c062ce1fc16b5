"""instruments/: programs that end early, fail, hang, change folders, have files named as ours: nothing is lost."""

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from world import ROOT, forker, free_port, wait_for

from ddp_by_diff.equivalence.batches import tensors_in
from ddp_by_diff.instruments.command import write_file
from ddp_by_diff.instruments.meeting import CHUNK, Folder, Place, Store

PROGRAM = """
import os, sys, threading, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
del os.environ["RANK"], os.environ["WORLD_SIZE"]  # as Lightning does
if mode == "moves":  # and leaves a thread behind
    threading.Thread(target=time.sleep, args=(1000,)).start()
    os.mkdir(f"of rank {rank}")
    os.chdir(f"of rank {rank}")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(100):
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 8 and rank == 1:
        if mode == "exits":
            sys.exit()
        if mode == "fails":
            raise ValueError("as planned")
        if mode == "hangs":
            threading.Event().wait(1000)  # in a file of Python's own
"""
STEPS = ("--steps", 4)
SAYS = {
    "moves": (0, "of 4 recorded"),
    "exits": (1, "what was recorded before is drawn"),
    "fails": (1, "ValueError: as planned"),
    "hangs": (1, "timeline: rank 1 made no step for {} s, after 9; it stands in train.py:23, <module>"),
}
NAMES = ["distributed", "distributed_launcher", "timeline", "instruments", "data"]  # of ours, and of a program's files


def write_program(folder):
    """With files beside it that have our names."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"print('own {name}.')")
    (folder / "train.py").write_text(f"import {', '.join(NAMES)}{PROGRAM}")


def imported_own(done, ranks):
    """Without the ends of the lines: two processes may write theirs at the same time."""
    return all(done.out.count(f"own {name}.") == ranks for name in NAMES)


def drawn_ranks(folder):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    own = {event["pid"] for event in events if event.get("cat") == "timeline"}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] in own}
    return [int(name.removeprefix("rank ")) for name in sorted(names)]


@pytest.mark.parametrize("mode", SAYS)
def test_what_was_recorded_is_drawn(mode, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--nproc", 3, *STEPS, "--timeout", 5)
    done = forker().run("-m", "ddp_by_diff.timeline", *options, "train.py", mode, path=[ROOT], cwd=tmp_path)
    code, text = SAYS[mode]
    assert done.code == code and text.format(5) in " ".join((done.out + done.err).split()), done
    assert drawn_ranks(tmp_path) == [0, 1, 2]
    assert f"written {tmp_path}/timeline.svg" in " ".join(done.out.split())


@pytest.mark.slow
def test_under_torchrun_from_another_folder(tmp_path):
    """The program has files with our names beside it.  Here rank 0 draws, and torchrun ends it."""
    write_program(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "ddp_by_diff.timeline")
    options = (*STEPS, "--timeout", 15)  # processes that import torch on a busy machine
    done = forker().run(*torchrun, *options, "train.py", "fails", path=[ROOT], cwd=tmp_path)
    code, text = SAYS["fails"]
    assert done.code == code and text in done.err, done
    assert drawn_ranks(tmp_path) == [0, 1] and imported_own(done, 2), done


def test_one_process_and_two_of_a_program_in_another_folder(tmp_path):
    """It has its neighbours, also those with our names, and torchrun's variables."""
    write_program(tmp_path / "home")
    done = forker().run(
        "-m", "ddp_by_diff.timeline", "--nproc", 1, *STEPS, tmp_path / "home/train.py", "", path=[ROOT], cwd=tmp_path
    )
    assert done.code == 0 and imported_own(done, 1) and drawn_ranks(tmp_path) == [0], done
    done = forker().run("-m", "ddp_by_diff.timeline", *STEPS, "-m", "train", "", path=[ROOT], cwd=tmp_path / "home")
    assert done.code == 0 and imported_own(done, 2), done


DRAWS = """
import random, numpy, torch.distributed
def train(*_):
    {group}
    drawn = [None] * 2
    torch.distributed.all_gather_object(drawn, (random.random(), numpy.random.rand()))
    print("drew the same" if drawn[0] == drawn[1] else "drew", len({{*drawn[0], *drawn[1]}}), "numbers")
"""
BY_TORCHRUN, SEEDED = "torch.distributed.init_process_group('gloo')", "random.seed(0); numpy.random.seed(0); "
WHO_STARTS = {  # the group, what follows at the file's end, and what is printed
    "launch": ("start.distributed.init_process_group()", "import start\nstart.begin(train)", "drew the same 2 numbers"),
    "torchrun": (BY_TORCHRUN, "train()", "drew 4 numbers"),
    "torchrun, after a seed": (SEEDED + BY_TORCHRUN, "train()", "drew the same 2 numbers"),
}


@pytest.mark.parametrize("who", WHO_STARTS)
def test_ranks_draw_as_those_of_launch_or_as_those_of_torchrun(who, tmp_path):
    """As without the tool: launch, which another file calls here, gives its caller's numbers to all ranks."""
    group, end, said = WHO_STARTS[who]
    (tmp_path / "start.py").write_text("import distributed\ndef begin(train): distributed.launch(train)")
    (tmp_path / "train.py").write_text(DRAWS.format(group=group) + end)
    done = forker().run("-m", "ddp_by_diff.timeline", "train.py", path=[ROOT], cwd=tmp_path)
    assert done.out.count(said) == 2, done


def test_without_torchrun_the_ranks_meet_at_a_store_of_rank_0(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    ranks = [Store("tool", Place(rank, 2), 30) for rank in range(2)]
    for number, size in enumerate((1, CHUNK - 1000, CHUNK, 2 * CHUNK, 5_000_000)):  # a value may have 8 MB
        notes = os.urandom(size)
        ranks[0].put(f"rank {number}", notes)
        wait_for(lambda key=f"rank {number}": ranks[1].has(key))
        assert ranks[1].get(f"rank {number}") == notes and not ranks[1].has(f"rank {number + 1}")


def test_several_leave_one_key_at_once(tmp_path):
    """As ranks do that fail together."""
    folder = Folder(str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: folder.put("failed", torch.full((100_000,), number)), range(40)))
    value = folder.get("failed")
    assert value.eq(value[0]).all() and [path.name for path in tmp_path.iterdir()] == ["failed"]


def test_tensors_are_found_in_an_object_that_holds_itself():
    item = SimpleNamespace(values=[torch.ones(1)], name="item")
    item.itself = item
    assert {id(tensor) for tensor in tensors_in({"batch": item})} == {id(item.values[0])}


@pytest.fixture
def small_disk():
    """Files of at most 1,000 bytes: what comes after is an OSError, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["old", "link", "new"])
def test_a_file_is_written_as_a_whole_or_not_at_all(name, tmp_path, small_disk):
    old, link = tmp_path / "old", tmp_path / "link"
    write_file(str(old), "old")
    link.symlink_to(old)
    with pytest.raises(OSError):
        write_file(str(tmp_path / name), 2000 * "x")
    assert old.read_text() == "old" and {*tmp_path.iterdir()} == {old, link}
    write_file(str(tmp_path / name), "new")
    assert old.read_text() == ("old" if name == "new" else "new") and link.is_symlink()


def test_what_is_no_file_is_written_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_file(str(tmp_path / "pipe"), "text")
        assert read.result(10) == "text"
    assert (tmp_path / "pipe").is_fifo() and len([*tmp_path.iterdir()]) == 1
