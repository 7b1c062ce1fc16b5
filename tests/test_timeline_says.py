"""timeline/: its sentences.  Each says yes, no, or not seen, of programs whose truth is known."""

import itertools
import re

import pytest
import torch
from test_timeline import picture, program, said, small, variant
from torch import nn

from timeline import say, why
from timeline.data import Span

MS = 1_000_000


def test_ranks_that_send_nothing_are_a_warning():
    """A program whose ranks average is not, whatever it averages: equivalence/ says if that is right."""
    text = said(picture(separate))
    assert text["warning"].startswith("no message was seen in the recorded steps: does each rank train for itself?")
    assert text["messages"].startswith("each rank: no messages")
    assert "warning" not in said(picture(small))


def separate():
    """Each rank trains for itself."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(12):
        net(torch.ones(5, 4)).sum().backward()
        optimizer.step()


def test_steps_of_two_kinds_are_said():
    text = said(picture(variant, "variants.mnist_local_sgd", "--every 2"))["step"]
    assert re.search(r"; 2 of the 4 have other passes or messages \(median [\d.]+ ms\)$", text)
    assert "other passes" not in said(picture(small))["step"]


# ---------------------------------------------------------------------------------------------- why


def made(extra, part="", core=0, moving=0, loading=(2,), ranks=3, also=0, workers=False):
    """Recordings of steps in closed form: each rank loads, computes 10 + 20 ms, and waits for the last.

    extra: ms that rank 1 spends more in a part, in each step; loading: of each step, by turns; core: ms that each has
    no core; moving: of messages; also: that rank 2 spends more in forward.
    """
    found = []
    for rank in range(ranks):
        spans, messages, cuts, waits, now = [], [], [], [0], 0
        for step, more in enumerate(extra):
            cuts.append(now)
            late, load = now, loading[step % len(loading)]
            for what, length in ("data", load), ("forward", 10), ("backward", 20), ("optimizer", 3):
                if what == "optimizer":
                    last = late + (load + 30 + (more if part != "optimizer" else 0)) * MS
                    message = {"kind": "allreduce", "bytes": 4, "peer": None, "issued": now, "begin": now}
                    messages.append(message | {"until": max(now, last), "last": 1, "end": max(now, last) + moving * MS})
                    spans.append(Span("wait", now, messages[-1]["end"]))
                    now = messages[-1]["end"]
                own = more if rank == 1 and part == what else 0
                own += also if rank == 2 and what == "forward" else 0
                spans.append(Span(what, now, now + (length + own) * MS))
                now = spans[-1].end
            if part == "optimizer":
                now = late + (load + 33 + moving + more) * MS if rank == 1 else now
            waits.append(waits[-1] + core * MS)
        recording = {"rank": rank, "spans": spans, "messages": messages, "cuts": [*cuts, now], "core_waits": waits}
        recording["has_workers"] = workers
        found.append(recording)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("part", ["data", "forward", "backward"])
def test_why_names_the_rank_and_its_part(part, ranks):
    name = "loading" if part == "data" else part
    text = f"rank 1 spends 60.0 ms more in {name} than the others, who wait 60.0 ms a step for it"
    assert why.why(made([60] * 8, part, ranks=ranks), 0, 7) == text


def test_the_others_may_differ_and_cores_may_be_the_reason():
    found = made([60] * 8, "forward", also=20)
    text = "rank 1 spends 50.0 ms more in forward than the others, who wait 50.0 ms a step for it"
    assert why.why(found, 0, 7) == text
    assert say.who_came_last(found, 0, 7) == "the others waited longest for rank 1 in 8 of 8 steps, 50.0 ms each"
    for recording, each in zip(found, (10, 50, 20), strict=True):
        recording["core_waits"] = [each * MS * step for step in range(9)]
    assert why.why(found, 0, 7) == text.replace("than the others", "than the others (35.0 ms of it without a core)")
    for message in itertools.chain(*(recording["messages"] for recording in found)):
        message["end"] = message["begin"]
    assert say.who_came_last(found, 0, 7) == "not seen, as the profiler tells no times of messages"


def test_workers_that_are_late_on_all_ranks_are_no_slow_rank():
    """Whose batches come last is chance, unless the others' next batches are there when it comes."""
    slow = "rank 1 spends 20.0 ms more in loading than the others, who wait 20.0 ms a step for it"
    late = "each rank waits 10.0 to 30.0 of 63.0 ms for its next batch"
    assert why.why(made([20] * 8, "data", loading=(10,), workers=True), 0, 7) == late
    assert why.why(made([20] * 8, "data", loading=(10,)), 0, 7) == slow
    assert why.why(made([20] * 8, "data", loading=(2,), workers=True), 0, 7) == slow
    assert "forward" in why.why(made([60] * 8, "forward", loading=(10,), workers=True), 0, 7)


def test_why_is_silent_where_it_is_chance_or_nothing():
    assert why.why(made([0] * 8), 0, 7) == ""
    assert why.why(made([60, 0, 0, 0, 60, 0, 0, 0], "forward"), 0, 7) == ""  # in two of eight steps
    assert why.why(made([1] * 8, "forward"), 0, 7) == ""  # of 36 ms


def test_why_says_what_all_ranks_spend():
    assert why.why(made([0] * 8, loading=(40,)), 0, 7) == "each rank waits 40.0 of 73.0 ms for its next batch"
    by_turns = made([0] * 9, loading=(900, 60, 2, 60, 2, 60, 2, 60, 2))  # two workers, which begin in the first step
    assert why.why(by_turns, 0, 8) == "each rank waits 31.0 of 64.0 ms for its next batch"
    found = why.why(made([0] * 8, moving=30), 0, 7)
    assert found == "messages take 30.0 of 65.0 ms in which each rank does nothing else"
    found = why.why(made([0] * 8, core=12), 0, 7)
    assert found == "each rank is ready, but has no core for 12.0 of 35.0 ms"
    one_waits = made([0] * 8, moving=30)
    for message in one_waits[0]["messages"]:
        message["until"] = message["end"]  # no bytes move for rank 0
    assert why.why(one_waits, 0, 7) == ""
    alone = why.why(made([0] * 8, loading=(40,), ranks=1), 0, 7)
    assert alone == "the process waits 40.0 of 73.0 ms for its next batch"


# ------------------------------------------------------------------------------------- what it can't

PROFILES = """
import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with torch.profiler.profile() as prof:
    for step in range(99):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
SPAWNS = """
import torch
def worker(rank): pass
if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=2)
"""
REFUSED = [
    (PROFILES, "torch.profiler itself, and two can't run at once: switch it off there"),
    (SPAWNS, "processes of its own, which are not seen: call its worker function under torchrun"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=["profiler", "processes"])
def test_a_program_that_cannot_be_recorded_is_told_why(text, words, tmp_path):
    done = program(tmp_path, text=text, nproc=2)
    assert done.code == 1 and f"timeline: the program starts {words}" in done.err and "Traceback" not in done.err, done
