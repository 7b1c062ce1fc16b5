"""timeline/: its sentences.  Each says yes, no, or not seen, of programs whose truth is known."""

import argparse
import json
import re

import pytest
import torch
from test_timeline import picture, program, said, small
from torch import nn

from ddp_by_diff.timeline import say, why
from ddp_by_diff.timeline.data import Block, CoreWait, Message, Span
from ddp_by_diff.timeline.figures import compare, figures_of
from ddp_by_diff.timeline.picture import picture_of
from ddp_by_diff.timeline.steps import table_of

MS = 1_000_000


def test_ranks_that_send_nothing_are_a_warning():
    """A program whose ranks average is not, whatever it averages: equivalence/ says if that is right."""
    text = said(picture(separate))
    assert text["warning"].startswith(
        "no communication was seen in the recorded steps. Does each rank train on its own?"
    )
    assert text["messages"].startswith("per rank: no messages")
    assert "warning" not in said(picture(small))


def separate():
    """Each rank trains for itself."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(12):
        net(torch.ones(5, 4)).sum().backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------------- why


LENGTHS = {"loading": 2, "other": 0, "forward": 10, "backward": 20, "evaluation": 0, "optimizer": 3}  # ms


UP_TO = {2: "", 3: "up to ", 4: "up to "}  # with so many ranks


def nothing(rank, step, part):
    return 0


def made(extra, part="", core=nothing, moving=0, loading=(2,), ranks=3, also=nothing):
    """Recordings of steps in closed form: each rank loads, computes 10 + 20 ms, and waits for the last.

    extra: ms that rank 1 spends more in a part, in each step; loading: of each step, by turns; moving: of messages;
    also(rank, step, part): more ms; core(rank, step, part): how many of a part's ms the rank has no core.
    """
    found = []
    for rank in range(ranks):
        one = {"rank": rank, "lane": [], "idle": [], "messages": [], "cuts": [0], "bare": [], "machine": "one"}
        one |= {"first": 0, "last": len(extra) - 1, "worker_starts": [], "core_waits": [CoreWait(0, 0)]}
        found.append(one)
    for step, more in enumerate(extra):
        for one in found:
            spend(one, "loading", loading[step % len(loading)] - LENGTHS["loading"])
            for what in LENGTHS:
                own = more if one["rank"] == 1 and what == part else 0
                if what == "optimizer":
                    one["issued"] = one["lane"][-1].end
                    one["after"] = own + also(one["rank"], step, what)
                else:
                    spend(one, what, LENGTHS[what] + own + also(one["rank"], step, what))
        end = max(one["lane"][-1].end for one in found) + moving * MS
        for one in found:
            one["lane"].append(Span("waiting", one["lane"][-1].end, end))
            one["messages"].append(message(step, one.pop("issued"), end))
            spend(one, "optimizer", LENGTHS["optimizer"] + one.pop("after"))
            one["cuts"].append(one["lane"][-1].end)
            note_core_waits(one, lambda part, rank=one["rank"], step=step: core(rank, step, part))
    return found


def note_core_waits(one, core):
    """At the ends of the spans since the last note."""
    for span in one["lane"]:
        last = one["core_waits"][-1]
        if span.end > last.time:
            one["core_waits"].append(CoreWait(span.end, last.total + core(span.what) * MS))


def in_backward(core):
    return lambda rank, step, part: core * (part == "backward")


def message(step, begin, end):
    return Message("allreduce", "", None, None, 4, step, 0, begin, begin, begin, end)


def spend(one, part, length):
    begin = one["lane"][-1].end if one["lane"] else 0
    one["lane"].append(Span(part, begin, begin + round(length * MS)))


def shown(found):
    """The picture."""
    for one in found:
        one |= {"memory": [], "reserved": 0, "trace": [], "ranks": len(found), "setting": "", "device": "cpu"}
        one["bare"] = [1]
    return picture_of(found, argparse.Namespace(steps_shown=1, command=["train.py"]))[0]


def why_of(found, worker_starts=()):
    for one in found:
        one["worker_starts"] = [*worker_starts]
    return "; ".join(reason.text for reason in why.why(table_of(found)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("part", [*LENGTHS])
def test_why_names_the_rank_and_its_part(part, ranks):
    text = (
        f"rank 1 spends 60.0 ms more in {part} than the other ranks, which wait {UP_TO[ranks]}60.0 ms per step for it"
    )
    assert why_of(made([60] * 8, part, ranks=ranks)) == text


def test_the_others_may_differ_and_cores_may_be_the_reason():
    found = made([60] * 8, "forward", also=lambda rank, step, part: 20 * (rank == 2 and part == "forward"))
    text = "rank 1 spends 40.0 ms more in forward than the other ranks, which wait up to 60.0 ms per step for it"
    assert why_of(found) == text
    assert (
        say.who_came_last(table_of(found))
        == "last to arrive: rank 1 in 8 of 8 steps (the others waited 40.0 to 60.0 ms)"
    )
    for recording, each in zip(found, (10, 50, 20), strict=True):
        recording["core_waits"] = [CoreWait(cut, each * MS * step) for step, cut in enumerate(recording["cuts"])]
    assert why_of(found) == text.replace("ranks, which", "ranks (30.0 ms of it without a CPU core), which")
    for recording in found:
        recording["messages"] = [one._replace(end=one.begin) for one in recording["messages"]]
    assert say.who_came_last(table_of(found)) == "not seen, because the profiler tells no times of messages"


def test_workers_that_are_late_on_all_ranks_are_no_slow_rank():
    """Whose batches come last is chance, unless the others' next batches are there when it comes."""
    slow = "rank 1 spends 20.0 ms more in loading than the other ranks, which wait up to 20.0 ms per step for it"
    late = "each rank waits 10.0 to 30.0 of 63.0 ms for its next batch"
    assert why_of(made([20] * 8, "loading", loading=(10,)), [0]) == late
    assert why_of(made([20] * 8, "loading", loading=(10,))) == slow
    assert why_of(made([20] * 8, "loading", loading=(2,)), [0]) == slow
    assert "forward" in why_of(made([60] * 8, "forward", loading=(10,)), [0])


def test_why_is_silent_where_it_is_chance_or_nothing():
    assert why_of(made([0] * 8)) == ""
    assert why_of(made([0, 0, 0, 0, 60, 0, 0, 0], "forward")) == ""  # in one of eight steps
    assert why_of(made([1] * 8, "forward")) == ""  # of 36 ms


@pytest.mark.parametrize("part", [*LENGTHS])
@pytest.mark.parametrize(("interval", "count"), [(4, 5), (7, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_pause_at_regular_intervals_of_one_rank_or_of_all(ranks, interval, count, part):
    def pause(rank, step, what):
        return (60 + rank) * (step % interval == 0 and what == part)

    for also in pause, lambda rank, *where: pause(rank, *where) if rank == ranks - 1 else 0:
        found = made([0] * 20, ranks=ranks, also=also)
        subject = "each rank" if also is pause else f"rank {ranks - 1}"
        more = 60 if also is pause else 59 + ranks
        text = f"{subject if ranks > 1 else 'the process'} spends {more}.0 ms more in {part} in {count} of 20 steps"
        (reason,) = why.why(table_of(found))
        assert (reason.text, reason.steps) == (text, [*range(0, 20, interval)])
        drawn = shown(found)
        assert drawn["steps"][0] in reason.steps and drawn["length"] >= 95 * MS


def test_parts_that_have_more_in_the_same_steps_are_one_sentence():
    """As an evaluation has."""
    more = {"forward": 60, "other": 40}
    found = made([0] * 20, ranks=2, also=lambda rank, step, part: more.get(part, 0) * (step % 7 == 0 and rank == 0))
    assert why_of(found) == "rank 0 spends 100.0 ms more in forward and other in 3 of 20 steps"


def test_workers_that_start_in_each_epoch_are_named():
    found = made([0] * 20, ranks=2, loading=(302, 2, 2, 2, 2))
    text = "each rank spends 300.0 ms more in loading in 4 of 20 steps"
    assert why_of(found) == text
    assert (
        why_of(found, [0, 5, 10, 15])
        == f"{text}, where its DataLoader starts workers (persistent_workers=True keeps them)"
    )


def test_a_pause_once_and_pauses_of_a_few_are_no_habit():
    assert why_of(made([0] * 20, ranks=2, loading=(902, *[2] * 19))) == ""
    assert why_of(made([0] * 20, ranks=2, loading=(4, 2))) == ""


def test_a_step_is_one_that_a_rank_had():
    """A pause at the end of a rank's step is the others' wait in the next one: it counts once."""
    table = table_of(made([60, 0, 0] * 6, "optimizer", ranks=2))
    assert table.usual_length == 35 * MS and sum(table.lengths) <= (18 * 35 + 6 * 60) * MS


def test_many_small_messages_are_messages_and_no_slow_rank():
    """Between two waits the process ends a message and begins the next; rank 1 takes longer for it."""
    found = made([0] * 8, ranks=2)
    for one in found:
        handling = 0.1 + 0.1 * one["rank"]
        one["lane"], one["cuts"], one["messages"] = [], [0], []
        for step in range(8):
            spend(one, "forward", 10)
            for _ in range(100):
                begin = one["lane"][-1].end
                one["messages"].append(message(step, begin, begin + MS // 4))
                spend(one, "waiting", 0.5 - handling)
                spend(one, "other", handling)
            spend(one, "optimizer", 1)
            one["cuts"].append(one["lane"][-1].end)
        one["core_waits"] = [CoreWait(cut, step * 20 * MS) for step, cut in enumerate(one["cuts"])]
    assert why_of(found).startswith("communication in 100 messages takes ") and ";" not in why_of(found), why_of(found)


def test_what_comes_and_goes_is_named_only_if_chance_would_seldom_do_it():
    """n pauses that come by chance all come to one of two ranks with probability 2 ** -n: 1 % is between 6 and 7."""
    for steps, named in ([0, 1, 5, 9, 12, 14], False), ([0, 1, 5, 9, 12, 14, 17], True), ([0, 5, 10, 15], True):
        found = made([60 * (step in steps) for step in range(20)], "backward", ranks=2)
        assert bool(why_of(found)) == named, steps
    also = {"also": lambda rank, step, part: 60 * (step == 3 and (rank, part) == (0, "other"))}
    found = made([60 * (step in (0, 1, 5, 9, 12, 14, 17)) for step in range(20)], "backward", ranks=2, **also)
    assert not why_of(found), "the other rank has one, too"


@pytest.mark.parametrize("part", [*LENGTHS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_long_pauses_are_no_chance(ranks, part):
    """Two come to one of two ranks with probability 1/4; but of 34 usual steps' length they don't come by chance."""
    found = made([1200 * (step in (3, 12)) for step in range(20)], part, ranks=ranks)
    (reason,) = why.why(table_of(found))
    assert (reason.text, reason.steps) == (f"rank 1 spends 1200.0 ms more in {part} in 2 of 20 steps", [3, 12])
    short = made([300 * (step in (3, 12)) for step in range(20)], part, ranks=2)
    once = made([60_000 * (step == 3) for step in range(20)], part, ranks=ranks)
    also = {"also": lambda rank, step, what: 60_000 * ((rank, step, what) == (0, 8, "forward"))}
    both = made([60_000 * (step in (3, 12)) for step in range(20)], part, ranks=2, **also)
    assert why_of(short) == why_of(once) == why_of(both) == ""


def test_of_unequal_pauses_and_waits_the_smallest_and_the_largest_are_said():
    found = made([{3: 1200, 12: 900}.get(step, 0) for step in range(20)], "forward", ranks=2)
    assert why_of(found) == "rank 1 spends 900.0 to 1200.0 ms more in forward in 2 of 20 steps"
    found = made([60, 0.01] * 4, "backward", ranks=2)
    assert (
        say.who_came_last(table_of(found))
        == "last to arrive: rank 1 in 8 of 8 steps (the others waited 0.0 to 60.0 ms)"
    )


@pytest.mark.parametrize(
    ("pause", "text"), [(1200, "median 35.0 ms, mean 95.0 ms of 20"), (100, "median 35.0 ms of 20")]
)
def test_the_mean_of_a_step_is_said_if_it_is_far_from_the_median(pause, text):
    found = shown(made([pause * (step == 3) for step in range(20)], "other", ranks=2))
    drawn = "recorded steps (0.0 ms of 1 without profiling); drawn: step "
    assert said(found)["step"].startswith(f"{text} {drawn}")


def test_what_comes_and_goes_as_others_take_cores_is_chance():
    """Without a core a rank is late in one part; if it has none in another part, that explains nothing."""
    extra = [60 * (step % 3 == 0) for step in range(20)]
    for where, text in ("forward", ""), ("waiting", "rank 1 spends 60.0 ms more in forward in 7 of 20 steps"):
        found = made(extra, "forward", core=lambda rank, step, part, w=where: extra[step] * ((rank, part) == (1, w)))
        assert why_of(found) == text


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_are_late_by_turns(ranks):
    found = made([0] * 20, ranks=ranks, also=lambda rank, step, part: 60 * (part == "other" and step % ranks == rank))
    text = (
        f"now one rank is late, now another, and the others wait {UP_TO[ranks]}60.0 of 95.0 ms for it. Does the work "
    )
    assert why_of(found) == f"{text}of a batch differ, do the ranks take turns at a lock, or is the machine shared?"
    for one in found:
        one["core_waits"] = [CoreWait(cut, 40 * MS * step) for step, cut in enumerate(one["cuts"])]
    assert why_of(found) == "each rank is ready to run, but has no CPU core for 40.0 of 95.0 ms"
    for one, (kind, peer) in zip(found, [("send", 1), ("recv", 0)], strict=False):
        one["messages"].append(message(3, 1, 2)._replace(kind=kind, peer=peer))
        one["core_waits"] = []
    assert why_of(found) == "", "stages of a pipeline wait for each other by design"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_has_more_to_compute(ranks):
    """Forward and backward take 2.5 times as long, as with longer texts."""
    longer = {"forward": 15, "backward": 30}
    found = made([0] * 8, ranks=ranks, also=lambda rank, step, part: longer.get(part, 0) * (rank == 1))
    text = "rank 1 spends 45.0 ms more in forward and backward than the other ranks"
    assert why_of(found) == f"{text}, which wait {UP_TO[ranks]}45.0 ms per step for it"


def test_why_says_what_all_ranks_spend():
    assert why_of(made([0] * 8, loading=(40,)), [0]) == "each rank waits 40.0 of 73.0 ms for its next batch"
    itself = "spends 40.0 of 73.0 ms loading its next batch itself (num_workers=0)"
    assert why_of(made([0] * 8, loading=(40,))) == f"each rank {itself}"
    by_turns = made([0] * 9, loading=(900, 60, 2, 60, 2, 60, 2, 60, 2))  # two workers, which begin in the first step
    assert why_of(by_turns) == "each rank spends 58.0 ms more in loading in 4 of 9 steps"
    found = why_of(made([0] * 8, moving=30))
    assert found == "communication takes 30.0 of 65.0 ms and is not overlapped with computation"
    found = why_of(made([0] * 8, core=in_backward(12)))
    assert found == "each rank is ready to run, but has no CPU core for 12.0 of 35.0 ms"
    alone = why_of(made([0] * 8, loading=(40,), ranks=1))
    assert alone == f"the process {itself}"


# ------------------------------------------------------------------------------------- against another run


def figures(program=("train.py",), blocks=(), **more):
    """As --json writes them, and --against reads them, of 20 steps on two ranks, or what `made` makes."""
    found = made(**({"extra": [0] * 20, "ranks": 2} | more))
    for one in found:
        one |= {"ranks": len(found), "device": "cpu", "memory": [*blocks], "bare": [1]}
    return json.loads(json.dumps(figures_of([*program], found, table_of(found), [], [])))


@pytest.mark.parametrize("part", [*LENGTHS])
def test_what_became_slower_is_named_with_its_part_and_rank(part):
    text, code = compare(figures(), figures(extra=[4] * 20, part=part), 5)
    assert code == 1 and text.startswith("slower by 4.0 ms (11 %) in a step (noise: 0.0 ms, tolerance: 5 %): "), text
    assert text.endswith(f": {part} +4.0 ms on rank 1")
    assert compare(figures(), figures(extra=[4] * 20, part=part), 15)[1] == 0
    assert compare(figures(extra=[4] * 20, part=part), figures(), 5)[0].startswith("faster by 4.0 ms")


def test_slower_messages_are_of_each_rank():
    text, code = compare(figures(), figures(moving=4), 5)
    assert code == 1 and text.endswith(": messages +4.0 ms on each rank"), text


def test_each_part_of_each_rank_is_compared_by_its_own_noise():
    """Rank 0's backward takes up to 12 ms more by chance; rank 1's forward 4 ms more in each step."""
    noisy = {"also": lambda rank, step, part: 6 * (step % 3) * ((rank, part) == (0, "backward"))}
    text, code = compare(figures(**noisy), figures(extra=[4] * 20, part="forward", **noisy), 5)
    assert code == 1 and text.endswith(": forward +4.0 ms on rank 1"), text
    text, code = compare(figures(**noisy), figures(extra=[4] * 20, part="backward", **noisy), 5)
    assert code == 1 and text.endswith(": backward +4.0 ms on rank 1"), text


def test_where_noise_is_more_than_the_tolerance_it_is_not_known():
    noisy = {"extra": [6 * (step % 3) for step in range(20)], "part": "forward"}
    text, code = compare(figures(**noisy), figures(**noisy), 5)
    assert (text, code) == (
        "can't tell: differences below 6.0 ms (17 %) in forward don't show on this machine (tolerance: 5 %)",
        2,
    )
    text, code = compare(figures(**noisy), figures(**noisy), 20)
    assert code == 0 and text.startswith("not slower, and not faster: no part differs by more than its noise"), text


def busy(each):
    """Each rank has no core for so many ms in the backwards of the steps, by turns."""

    def core(rank, step, part):
        return each[step % len(each)] * (part == "backward")

    return {"core": core, "also": core}


@pytest.mark.parametrize("each", [(9,), (0, 90, 30), (60, 40)])
def test_time_without_a_core_is_in_no_difference(each):
    for before, after in (busy(each), busy(each)), (busy([0]), busy(each)), (busy(each), busy([0])):
        text, code = compare(figures(**before), figures(**after), 5)
        assert code == 0 and text.startswith("not slower, and not faster: no part differs"), text
        text, code = compare(figures(**before), figures(extra=[4] * 20, part="forward", **after), 5)
        assert code == 1 and text.startswith("slower by 4.0 ms") and text.endswith(": forward +4.0 ms on rank 1"), text


def test_more_to_compute_in_the_time_of_a_wait_is_not_slower():
    late = {"also": lambda rank, step, part: 20 * ((rank, part) == (0, "forward"))}
    text, code = compare(figures(**late), figures(extra=[4] * 20, part="backward", **late), 5)
    assert code == 0 and text.startswith("not slower, and not faster: backward +4.0 ms on rank 1 (noise"), text


def test_a_step_that_is_longer_because_ranks_are_late_by_turns_is_slower():
    """Each rank has 9 ms more in five of 20 steps: before in the same ones."""
    before, after = (
        figures(
            ranks=4,
            also=lambda rank, step, part, is_turn=is_turn: 9 * (part == "forward" and step % 4 == rank * is_turn),
        )
        for is_turn in (0, 1)
    )
    text, code = compare(before, after, 5)
    assert code == 1 and text.startswith("slower by 9.0 ms (26 %) in a step"), text
    assert text.endswith(": no part differs by more than its noise"), text


def sent(found, rank, number, size):
    """The figures, in which the rank sends so many all-reduces, of so many bytes together."""
    found = json.loads(json.dumps(found))
    found["ranks"][rank]["exact"] |= {"all-reduce messages": number, "all-reduce bytes": size}
    return found


def test_messages_and_memory_are_compared_exactly():
    """Such as those of a forgotten no_sync: the time of a small message does not show."""
    before = figures()
    exact = {key: number for key, number in before["ranks"][0]["exact"].items() if number}
    assert exact == {"all-reduce messages": 20, "all-reduce bytes": 80}
    twice = sent(sent(before, 0, 40, 160), 1, 40, 160)
    sizes = [f"{now} all-reduce bytes (before: {then})" for now, then in ((160, 80), (80, 160))]
    text, code = compare(before, twice, 5)
    assert code == 1 and text.endswith(f"; in 20 steps, per rank: 40 all-reduce messages (before: 20), {sizes[0]}"), (
        text
    )
    text, code = compare(twice, before, 5)
    assert code == 0 and text.endswith(f"; in 20 steps, per rank: 20 all-reduce messages (before: 40), {sizes[1]}"), (
        text
    )
    assert compare(before, sent(before, 0, 20, 100), 5)[0].endswith("(before: 80); rank 1: as before")
    text, code = compare(before, sent(before, 1, 20, 100), 5)
    assert code == 1 and text.endswith(", rank 0: as before; rank 1: 100 all-reduce bytes (before: 80)"), text
    held = [figures(blocks=[Block("weights", size, 0)]) for size in (1000, 1004)]
    text, code = compare(*held, 5)
    assert code == 1 and text.endswith(", per rank: 1,004 peak bytes of weights (before: 1,000)"), text
    assert compare(*reversed(held), 5)[1] == compare(before, before, 5)[1] == 0
    assert compare(before, figures(extra=[0] * 30), 5)[1] == 0, "fewer steps have fewer messages"


def test_another_program_or_device_is_not_compared():
    for other in {"program": ["-m", "train"]}, {"processes": 3}, {"device": "a GPU"}:
        text, code = compare(figures(), figures() | other, 5)
        assert code == 2 and text.startswith("not compared: "), text
    assert "other flags before: train.py" in compare(figures(), figures(["there/train.py", "--lr", "1"]), 5)[0]


def test_figures_are_written_and_read(tmp_path):
    done = program(tmp_path, 100, options=["--steps", 3, "--json", "before.json"])
    assert done.code == 0, done
    found = json.loads((tmp_path / "before.json").read_text())
    assert found["program"] == ["train.py", "100"] and len(found["ranks"][0]["forward"]) == 3
    done = program(tmp_path, 100, options=["--steps", 3, "--against", "before.json", "--tolerance", 10_000])
    assert done.code == 0 and re.search(r"^against +not slower", done.out, re.MULTILINE), done
    done = program(tmp_path, 100, options=["--against", "timeline.json"])
    assert done.code == 2 and done.err.startswith("timeline: error: timeline.json can't be read"), done


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
LATER = (
    PROFILES.replace("with torch.profiler.profile() as prof:", "if True:")
    + """
        if step == 20:  # it is recorded
            torch.profiler.profile().start()
"""
)
SCHEDULED = PROFILES.replace("profile()", "profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3))")
SCHEDULED += "        prof.step()\n"
REFUSED = [
    (PROFILES, "torch.profiler itself, and two can't run at once: switch it off there"),
    (LATER, "torch.profiler itself, and two can't run at once: switch it off there"),
    (SCHEDULED, "torch.profiler itself, and two can't run at once: switch it off there"),
    (SPAWNS, "processes of its own, which are not seen: call its worker function under torchrun"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=["profiler", "later profiler", "scheduled one", "processes"])
def test_a_program_that_cannot_be_recorded_is_told_why(text, words, tmp_path):
    done = program(tmp_path, text=text, nproc=2)
    assert done.code == 1 and f"timeline: the program starts {words}" in done.err and "Traceback" not in done.err, done
