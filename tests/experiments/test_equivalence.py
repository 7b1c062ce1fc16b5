"""equivalence.py: right ways are equal, wrong ones are not, and the exit code says so."""

import json
import re

import pytest
from PIL import Image
from world import forker

import distributed as dist
from experiments import equivalence
from experiments.equivalence_ways import WAYS

NO_ERROR = ["no_sync around backward only", "dropout, a seed per rank"]
MISTAKES = [way.name for way in WAYS if not way.must_be_equal and way.name not in NO_ERROR]
RIGHT = [way for way in WAYS if way.must_be_equal]


def check(rows, nproc, steps):
    """rows: {dtype: {name: (distances, note)}}, after at least 6 steps: in the sixth a new epoch has begun."""
    for dtype, limit in ("fp32", 1e-6), ("fp64", 1e-12):
        distances = {name: row[0] for name, row in rows[dtype].items()}
        notes = {name: row[1] for name, row in rows[dtype].items()}
        assert {len(row) for row in distances.values()} == {steps}
        for way in RIGHT:
            assert max(distances[way.name]) <= way.limit * limit, (way.name, dtype)
        for name in MISTAKES:
            assert max(distances[name]) > 1e-3, (name, dtype)
        assert max(distances["no_sync around backward only"]) <= limit
        assert distances["evaluation, exact"] == [0] * steps
        # In the first step one is the gradient times n - 1 away, the other times 1 - 1 / n.
        ratio = distances["learning rate x processes"][0] / distances["loss divided twice"][0]
        assert ratio == pytest.approx(nproc, rel=1e-3)
        assert notes["no_sync around backward only"] == f"{2 * steps} all-reduces in {steps} steps"
        assert notes["dropout, one seed for all"] == f"{48 // nproc} different masks for 48 examples"
        assert notes["dropout, a seed per rank"] == "48 different masks for 48 examples"
        assert notes["no set_epoch"] == "11 of 203 examples never seen"
        assert notes["evaluation, exact"] == "203 of 203 examples counted"
        assert notes["evaluation, padded"] == "204 of 203 examples counted"


@pytest.mark.slow
def test_right_ways_are_equal_and_wrong_ones_are_not():
    rows = dist.launch(equivalence.measure, [way.name for way in WAYS], 6, "gloo", nproc=2)
    assert list(rows["fp32"]) == [way.name for way in WAYS]
    check(rows, 2, 6)


def program(folder, *args, **options):
    return forker().run("-m", "experiments.equivalence", "--output", folder, *args, **options)


FAST = ("--nproc", "2", "--steps", "5", "--ways", "ddp_by_hand", "lr_scaled")


@pytest.mark.slow
def test_what_is_printed_and_written(tmp_path):
    done = program(tmp_path / "a" / "b", *FAST)
    assert done.code == 0, done.err
    written = (tmp_path / "a" / "b" / "equivalence.md").read_text()
    assert done.out.endswith(f"{written}\nall ways that must be equal are equal\n")
    right, wrong = (line.split("|") for line in written.splitlines() if line.startswith(("| DDP by", "| learning")))
    assert float(right[2]) <= 1e-6 and float(right[3]) <= 1e-12 and float(wrong[2]) > 1e-2
    results = json.loads((tmp_path / "a" / "b" / "equivalence.json").read_text())
    assert len(results["fp64"]["2"]["DDP by hand"][0]) == 5
    with Image.open(tmp_path / "a" / "b" / "equivalence.png") as picture:
        assert picture.size[0] > 1000


BREAK = """
import distributed
right = distributed.all_reduce
distributed.all_reduce = lambda tensor, op="sum": MISTAKE if op == "mean" else right(tensor, op)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "size"), [('right(tensor, "sum")', r"0\.\d+"), ("tensor * float('nan')", "nan")])
def test_a_broken_way_is_found(tmp_path, mistake, size):
    """DDP by hand without the division, and with gradients that are NaN."""
    done = program(tmp_path, *FAST, before=BREAK.replace("MISTAKE", mistake))
    assert done.code == 1
    for dtype, limit in ("fp32", "1e-6"), ("fp64", "1e-12"):
        assert re.search(
            f"^not equal: DDP by hand, {dtype}, 2 processes: {size}, but the limit is {limit}$", done.out, re.M
        )
    assert "all ways that must be equal are equal" not in done.out


TORCHRUNS = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "environment", "message"),
    [
        (["--nproc", "5"], {}, "--nproc: invalid choice: 5 (choose from"),
        (["--steps", "0"], {}, "--steps must be at least 1"),
        (["--backend", "nccl"], {}, "backend nccl needs a visible CUDA GPU"),
        (["--output", "/dev/null/x"], {}, "--output /dev/null/x: Not a directory"),
        ([], TORCHRUNS, "5 processes can't share a batch of 48: start one of [1, 2, 3, 4, 6, 8]"),
        (["--nproc", "2"], TORCHRUNS, "a launcher has started 5 process(es): leave out --nproc"),
    ],
)
def test_what_cant_run_is_one_line(tmp_path, args, environment, message):
    done = program(tmp_path, *args, **environment)
    assert done.code == 2 and message in done.err and done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_old_torch_has_a_row_that_says_so():
    skipped = {"fp32": {2: {"FSDP": equivalence.Row([], "needs torch 2.9")}}}
    fsdp = [way for way in WAYS if way.name == "FSDP"]
    assert equivalence.table(skipped, fsdp, ["fp32"]).splitlines()[2] == "| FSDP | needs torch 2.9 |"
    assert equivalence.too_far(skipped) == []


def test_more_steps_may_be_further_away():
    row = equivalence.Row([0.0] * 999 + [9e-6], "")
    assert equivalence.too_far({"fp32": {2: {"DDP": row}}}) == []
    assert equivalence.too_far({"fp32": {2: {"DDP": row._replace(distances=row.distances[-100:])}}}) == [
        "not equal: DDP, fp32, 2 processes: 9e-6, but the limit is 1e-6"
    ]
