"""measured.py and the studies: the store, the scripts' line, the tables of docs/; a step over a slowed network."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from world import forker, shell

from experiments import compare_variants, measured, studies, timed_runs


def store(folder, monkeypatch):
    """Points go to this folder; the machine is not asked for."""
    monkeypatch.setattr(measured, "machine", lambda: measured.Machine(2, [], "bf16", "9", "a machine"))
    return folder / "x.csv"


def test_a_point_is_measured_once(tmp_path, monkeypatch, capsys):
    path = store(tmp_path, monkeypatch)
    wanted = [{"n": n, "kind": "a,b"} for n in range(3)]
    for point in measured.missing(path, wanted):
        if point["n"] == 2:
            break  # stopped here
        measured.add(path, point, {"result": 10 * point["n"]})
    assert [row["result"] for row in measured.read(path)] == ["0", "10"]
    assert list(measured.missing(path, wanted)) == wanted[2:]
    assert "x: 3 of 3: 2, a,b" in capsys.readouterr().out


def test_a_point_that_is_measured_again_keeps_its_place(tmp_path, monkeypatch):
    path = store(tmp_path, monkeypatch)
    wanted = [{"n": n} for n in range(3)]
    for point in measured.missing(path, wanted):
        measured.add(path, point, {"result": "old"})
    assert list(measured.missing(path, wanted, again=True)) == wanted
    measured.add(path, wanted[1], {"result": "new"})
    assert [(row["n"], row["result"]) for row in measured.read(path)] == [("0", "old"), ("1", "new"), ("2", "old")]
    assert {(row["machine"], row["torch"]) for row in measured.read(path)} == {("a machine", "9")}


def test_a_point_with_other_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match="other"):
        measured.save(tmp_path / "x.csv", [{"n": 1}, {"n": 2, "other": 3}])


def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path):
    """RLIMIT_FSIZE fails as a full disk does: in the middle of a file."""
    program = """
import resource, sys
from pathlib import Path
from experiments.measured import write
path = Path(sys.argv[1])
write(path, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write(path, b"new" * 100)
except OSError:
    sys.exit(0 if path.read_bytes() == b"old" and len(list(path.parent.iterdir())) == 1 else 1)
sys.exit(2)
"""
    assert shell("-c", program, tmp_path / "file").code == 0


def test_the_scripts_line_is_read():
    printed = """synthetic on cpu, --batch-size 200: global batch 200 = 2 x 100
epoch 1/3  loss 2.1669  accuracy 67.85% (1357/2000)  6208 images/s
[0]<stdout>:epoch 2/3  loss 0.2883  accuracy 96.25% (1925/2000)  6300 images/s
epoch 3/3  loss 0.0834  6400 images/s
done in 6.1 s"""
    first, second, third = measured.epochs(printed)
    assert first == (2.1669, 1357, 2000, 6208) and first.accuracy == 67.85
    assert second.accuracy == 96.25
    assert third == (0.0834, None, None, 6400)


def test_a_table_is_markdown_whatever_is_in_it():
    assert measured.table([["a", "b"], ["1|2", ""]]) == "| a | b |\n|---|---|\n| 1\\|2 |  |\n"
    assert measured.table([["a", "b"], ["1", "long"]], align=True) == "| a | b    |\n|---|---|\n| 1 | long |\n"


@pytest.mark.parametrize("study", studies.STUDIES)
def test_the_tables_are_those_of_the_points(study, tmp_path, monkeypatch):
    """The points are in experiments/results/*.csv; nobody has edited the tables."""
    points = measured.read(measured.RESULTS / f"{study}.csv")
    assert points, f"experiments/results/{study}.csv is missing"
    shown = measured.RESULTS
    for module in {measured, studies.batch_size, studies.slow_link, timed_runs}:
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    studies.STUDIES[study].draw(points)
    written = list(tmp_path.glob("*.md"))
    assert written
    for table in written:
        assert (shown / table.name).read_bytes() == table.read_bytes(), "run  python -m experiments.studies draw"


def test_the_time_to_the_target_is_on_the_line_between_two_epochs():
    """99 % is a third of the way from 98.8 to 99.4 %; after the first epoch nothing is known of the time before."""
    seconds = [10.0, 20.0, 32.0]
    assert timed_runs.reached(seconds, [98.0, 98.8, 99.4]) == pytest.approx((24.0, 2 + 1 / 3))
    assert timed_runs.reached(seconds, [98.0, 99.0, 98.5]) == (20.0, 2.0)
    assert timed_runs.reached(seconds, [99.1, 99.2, 99.3]) == (10.0, 1.0)
    assert timed_runs.reached(seconds, [98.0, 98.8, 98.9]) is None


def test_what_can_not_be_measured_here_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(studies, "RESULTS", tmp_path)
    monkeypatch.delenv("XLA_ENVIRONMENT", raising=False)
    monkeypatch.setattr(studies.sys, "argv", ["studies.py", "variants", "--only", "mnist_xla"])
    assert studies.main() == 1
    assert "left as it is: set XLA_ENVIRONMENT" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bytes_are_those_of_the_table():
    """Exact: they depend on the model, not on the machine."""
    point = {"processes": 2, "script": "variants.mnist_fsdp"}
    (row,) = [row for row in measured.read(measured.RESULTS / "fsdp_bytes.csv") if measured._is(point, row)]
    assert compare_variants.hold(point, None).items() <= row.items()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_variant_is_a_row(tmp_path, monkeypatch):
    row = measured.read(measured.RESULTS / "variants.csv")[0]
    point = {name: row[name] for name in ("command", "dataset")}
    found = compare_variants.train(point, SimpleNamespace(data_dir=tmp_path))
    for name, tolerance in ("losses", 0.1), ("accuracies", 2):
        ours, theirs = (list(map(float, text.split(", "))) for text in (found[name], row[name]))
        assert ours == pytest.approx(theirs, abs=tolerance)


# ------------------------------------------------------------------------------------------------------- a slowed link


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_step_over_a_slow_link():
    """7.4 MB over 50 Mbit/s take more than a second: so slow a link is the limit on a busy machine, too."""
    done = shell("-m", "experiments.slow_link", "mlp", 3, 50, "--seconds", 1, "--repeats", 1, timeout=170)
    if done.code == 2:
        pytest.skip(done.err.splitlines()[-1])
    row = json.loads(done.out.splitlines()[-1])
    assert row["measured"] == pytest.approx(row["predicted"], rel=0.2), row
    assert row["measured"] > 2 * row["unslowed"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["mlp", 1, 50], "RANKS: invalid choice: 1"),
        (["none", 2, 50], "model: invalid choice: 'none'"),
        (["mlp", 2, 0], "from 1 to 100000 Mbit/s"),
        (["mlp", 2, 50, "--seconds", "nan"], "--seconds greater than 0"),
    ],
)
def test_slow_link_refuses_what_it_cannot_do(wrong, words):
    done = forker().run("-m", "experiments.slow_link", *wrong)
    assert done.code == 2 and words in done.err.splitlines()[-1]


def test_slow_link_says_what_to_install(tmp_path):
    done = forker().run("-m", "experiments.slow_link", "mlp", 2, 50, PATH=str(tmp_path))
    assert done.code == 2 and "apt-get install iproute2" in done.err.splitlines()[-1]


@pytest.mark.skipif(not shutil.which("ip"), reason="needs ip (iproute2)")
def test_no_interface_of_this_machine_was_changed():
    """After whatever has run before: the links live and end in namespaces of their own."""
    names = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
    assert "port0" not in names and "bridge" not in names.split()
