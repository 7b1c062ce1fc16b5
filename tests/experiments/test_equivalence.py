"""equivalence.py: a right way is equal to one process, a wrong one is visibly not; the exit code says so."""

import re

import pytest
from world import forker, launched, refused, run

from experiments import equivalence, equivalence_ways
from experiments.equivalence_ways import WAYS

STEPS = 3  # an epoch has two whole batches and a smaller one: in the third step it is the smaller one's, or a new epoch
NO_ERROR = ["no_sync_backward_only", "dropout_seed_per_rank"]
RIGHT = [way for way in WAYS if way.must_be_equal]
WRONG = [way.name for way in WAYS if not way.must_be_equal and way.name not in NO_ERROR]


def measure(ways, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equivalence_ways, "EXAMPLES", 2 * 48 + 11)
        patch.setattr(equivalence_ways, "EVERY", 2)
        return {way.name: equivalence.measure(way, steps) for way in ways}


def measure_all(rank, world_size):
    return measure(WAYS, STEPS)


@pytest.fixture(scope="module")
def three():
    return run(measure, 3, WAYS, STEPS)[0]


@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.name)
def test_a_right_way_is_equal(way, three):
    found = three[way.name]
    if found.note.startswith("needs torch"):
        pytest.skip(found.note)
    assert found.distances.keys() == {"fp32", "fp64"} and not equivalence.is_wrong(way, found, STEPS)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_way_is_not(name, three):
    visible = 1e-4 if name == "evaluation_padded" else 1e-3  # one example more, of 107
    assert min(three[name].distances.values()) > visible


def test_what_was_counted(three):
    assert three["no_sync_backward_only"].note == f"{2 * STEPS} all-reduces in {STEPS} steps"
    assert three["no_sync_backward_only"].distances["fp64"] <= 1e-12
    assert three["dropout_one_seed"].note == "16 different masks for 48 examples"
    assert three["dropout_seed_per_rank"].note == "48 different masks for 48 examples"
    assert three["no_set_epoch"].note == "11 of 107 examples never seen"
    assert three["evaluation"].note == "107 of 107 examples counted"
    assert three["evaluation_padded"].note == "108 of 107 examples counted"


def test_the_first_step_in_closed_form():
    """With n times the learning rate it is n - 1 steps too long, with the loss divided twice 1 - 1 / n too short."""
    ways = [way for way in WAYS if way.name in ("lr_times_processes", "loss_divided_twice")]
    long, short = (result.distances["fp64"] for result in run(measure, 3, ways, 1)[0].values())
    assert long / short == pytest.approx(3, rel=1e-9)


def test_one_process_hides_mistakes():
    one = launched(measure_all, 1)
    assert [name for name in WRONG if one[name].distances["fp64"] > 1e-12] == ["no_set_epoch"]
    assert not any(equivalence.is_wrong(way, one[way.name], STEPS) for way in RIGHT)


def test_limits():
    ddp = RIGHT[0]
    for distance, steps, wrong in ((9e-7, 10, False), (2e-6, 10, True), (9e-6, 1000, False), (float("nan"), 10, True)):
        assert equivalence.is_wrong(ddp, equivalence.Result({"fp32": distance}, ""), steps) is wrong
    assert not equivalence.is_wrong(ddp, equivalence.Result({}, "needs torch 2.9"), 10)


BREAK = """
import distributed
right = distributed.all_reduce
distributed.all_reduce = lambda tensor, op="sum": right(tensor, "sum" if op == "mean" else op)
"""


@pytest.mark.parametrize(("before", "code", "word"), [("", 0, "equal"), (BREAK, 1, "NOT EQUAL")])
def test_the_program(before, code, word):
    """A line for each way, no warnings, no file written; exit code 1 with DDP by hand that forgets to divide."""
    files = {path: path.read_text() for path in equivalence.measured.RESULTS.iterdir()}
    done = forker().run("-m", "experiments.equivalence", "ddp_by_hand", "no_set_epoch", "--steps", 5, before=before)
    assert (done.code, done.err) == (code, "")
    assert {path: path.read_text() for path in equivalence.measured.RESULTS.iterdir()} == files
    assert re.search(rf"^ddp_by_hand +fp32 \S+ +fp64 \S+ +{word}", done.out, re.M)
    assert re.search(r"^no_set_epoch .* never seen\.$", done.out, re.M)


def test_what_cant_run_is_one_line():
    refused(equivalence.parse_args, "no way 'nope'", flags=["nope"])
    refused(equivalence.parse_args, "--steps", "at least 1", flags=["--steps", 0])
    refused(equivalence.parse_args, "5 processes can't share", flags=["--nproc", 5])
    refused(equivalence.parse_args, "--save takes all ways", flags=["--save", "ddp"])
