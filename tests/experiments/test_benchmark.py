"""benchmark.py: what it reads from the programs, the statistics, the table; and real runs that fail, end and go on."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from world import ENVIRONMENT, ROOT, SHELL, shell

from experiments import benchmark, measured
from experiments import benchmark_results as results
from experiments.baselines import common
from experiments.benchmark_results import Row, Run

TWO_CORES = measured.Machine(cores=2, gpus=[], half="bf16", torch="9", name="2 cores of a CPU")
SINGLE, DDP = Row("mnist_single.py", 1, 2, "fp32"), Row("mnist_ddp.py", 2, 1, "fp32")
LIMIT = DDP._replace(program=results.LIMIT)
PLAIN = DDP._replace(program="experiments/baselines/plain_ddp.py")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "123"}


def a_run(row, repeat, speeds, correct=(), seconds=(), attempt=1, **options):
    conditions = "mnist", len(speeds) or 3, TWO_CORES.name, "torch 9", "2030-01-02T03:04:05+00:00"
    run = Run(*row, attempt, repeat, *conditions)
    run.images_per_s, run.correct, run.epoch_s = list(speeds), list(correct), list(seconds)
    run.count = 200 if correct else None
    for name, value in options.items():
        setattr(run, name, value)
    return run


def flags(**given):
    defaults = {"scripts": benchmark.SCRIPTS, "nproc": [1, 2], "limit": False, "baseline": False}
    defaults |= {"dataset": "mnist", "data_dir": "data", "epochs": 3, "timeout": 100, "machine": TWO_CORES}
    defaults |= {"malloc": MALLOC, "repeats": 5, "runs": []}
    return SimpleNamespace(**(defaults | given))


# -------------------------------------------------------------------------------------------------- what is read


def test_the_lines_of_scripts_and_baselines_are_read():
    """Also those that the README shows, which the scripts have printed."""
    run = a_run(DDP, 1, [])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ python mnist_ddp.py --dataset synthetic\n")[2].partition("```")[0].splitlines()
    for text in ["first optimizer step", *shown]:
        benchmark.note(run, text, 2.5)
    assert run.first_step_s == 2.5 and run.epoch_s == [2.5, 2.5, 2.5] and run.count == 2000
    assert len(run.loss) == len(run.images_per_s) == 3 and run.correct[-1] / run.count > 0.96
    benchmark.note(run, common.epoch_line(4, 4, 0.25, 1990, 2000, 1234.5), 3)
    assert (run.loss[3], run.correct[3], run.images_per_s[3]) == (0.25, 1990, 1234)
    benchmark.note(run, "epoch 5/5  loss 0.1250  99 images/s", 4)  # of baselines/limit.py
    assert (run.loss[4], run.images_per_s[4], len(run.correct)) == (0.125, 99, 4)


@pytest.mark.parametrize(
    ("stderr", "code", "expected"),
    [
        ("Traceback ...\n[rank1]: ValueError: no such thing\nE torch FAILED\n===\n", 1, "ValueError: no such thing"),
        ("some warning\nrank 1 was killed by SIGKILL\n\n", 1, "rank 1 was killed by SIGKILL"),
        (
            "E1 api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 5) of\na.b.ChildFailedError: \n===\n",
            1,
            "local rank 1 ended with exit code -9",
        ),
        ("", -9, "killed by SIGKILL"),
        ("", 3, "exit code 3, without a word"),
    ],
)
def test_a_failure_is_one_line(stderr, code, expected):
    assert benchmark.reason(stderr, code) == expected


def test_speed_is_the_median_without_the_first_epoch():
    assert a_run(DDP, 1, [1, 10, 40, 20]).speed == 20
    assert a_run(DDP, 1, [7]).speed == 7


def test_ratios_are_those_of_the_medians_in_the_table():
    runs = [a_run(SINGLE, r, [speed]) for r, speed in enumerate((100, 50, 80), 1)]
    runs += [a_run(DDP, 1, [300]), a_run(DDP, 2, [100]), a_run(DDP, 3, [], error="failed")]
    assert results.ratio(runs, DDP, SINGLE) == 200 / 80
    assert results.ratio(runs, SINGLE, SINGLE) == 1
    assert results.ratio(runs, DDP, Row("other.py", 1, 1, "fp32")) is None


def test_the_limit_is_the_fastest_whatever_its_number_of_processes():
    runs = [a_run(LIMIT, 1, [900]), a_run(LIMIT._replace(processes=1, threads=2), 1, [1000]), a_run(DDP, 1, [800])]
    limit = results.fastest_limit(runs)
    assert limit.processes == 1 and results.ratio(runs, DDP, limit) == 0.8
    assert results.fastest_limit(runs[2:]) is None


def test_a_wide_row_is_measured_again_once_and_then_marked():
    """Five repeats of what the README quotes, three of the others; the second attempt counts when it is complete."""
    rows, args = [SINGLE, DDP._replace(processes=1, threads=2)], flags()
    asked = []
    while missing := benchmark.to_do(args, rows, args.runs):
        row, attempt, repeat = missing[0]
        asked.append((row, attempt, repeat))
        wide = row == SINGLE and repeat == 2
        args.runs.append(a_run(row, repeat, [1300 if wide else 1000], attempt=attempt))
    first = [(row, 1, repeat) for repeat in (1, 2, 3) for row in rows] + [(SINGLE, 1, 4), (SINGLE, 1, 5)]
    assert asked == first + [(SINGLE, 2, repeat) for repeat in (1, 2, 3, 4, 5)]
    assert [run.attempt for run in results.counted(args.runs, SINGLE)] == [2] * 5
    assert [run.attempt for run in results.counted(args.runs[:-1], SINGLE)] == [1] * 5
    single, ddp = results.table(args.runs).splitlines()[2:4]
    assert "1,000 (1,000 to 1,300) * |" in single and "*" not in ddp
    assert "wider than 20% of the median" in results.table(args.runs)
    assert "wider" not in results.table([run for run in args.runs if run.speed == 1000])


def stored_runs():
    good = {"correct": [180, 198], "seconds": [10, 20], "first_step_s": 2.0, "memory_mib": 700}
    runs = [a_run(SINGLE, r, [1, 1000 * r], **good) for r in (1, 2, 3)]
    runs += [a_run(DDP, r, [1, 1500 * r], **good) for r in (1, 2)] + [a_run(DDP, 3, [], error="ValueError: a|b")]
    runs += [a_run(LIMIT, r, [1, 1500 * r], first_step_s=1.0) for r in (1, 2, 3)]
    runs += [a_run(PLAIN, r, [1, 1000 * r], **good) for r in (1, 2, 3)]
    runs += [a_run(PLAIN._replace(flag=results.WHOLE), r, [1, 1500 * r], **good) for r in (1, 2, 3)]
    fabric = DDP._replace(program="experiments/baselines/with_fabric.py")
    return runs + [a_run(fabric, r, [], error="KeyError: 3") for r in (1, 2, 3)]


def test_table_and_sentences_from_a_stored_csv(tmp_path):
    path = tmp_path / "benchmark.csv"
    results.to_csv(path, stored_runs())
    runs = results.from_csv(path)
    assert runs == stored_runs()
    _, _, *lines = results.table(runs).partition("\n\n")[0].splitlines()
    single, ddp, limit, plain, whole, fabric = ([cell.strip() for cell in line.split(" | ")] for line in lines)
    assert single[1:] == ["1 x 2", "fp32", "2,000 (1,000 to 3,000) *", "1.00", "67%", "2.0", "99.00", "700 |"]
    assert ddp[3] == "2,250 (1,500 to 3,000) *; 1 of 3 runs failed: ValueError: a\\|b"
    assert ddp[4:6] == ["1.12", "75%"]
    assert limit[0] == "| compute only" and limit[4:] == ["1.50", "100%", "1.0", "–", "– |"]
    assert fabric[3] == "failed: KeyError: 3" and len(fabric) == len(single) == len(plain)
    assert (plain[0], whole[0]) == ("| plain DDP loop, image by image", "| plain DDP loop, in whole batches")
    assert results.findings(runs) == (
        "The images/s of `mnist_ddp.py` (2 x 1) are 1.12 times those of `mnist_single.py` (1 x 2), 75 % of the limit, "
        "1.12 times those of the plain DDP loop that loads image by image, "
        "0.75 times those of the plain DDP loop that loads in whole batches.\n"
    )
    assert "2 epochs of mnist, 3 runs of each, in alternation, 2030-01-02." in results.conditions(runs)


@pytest.mark.slow
def test_a_picture_also_of_failures_only():
    assert results.picture(stored_runs()).startswith(b"\x89PNG")
    assert results.picture([a_run(SINGLE, 1, [], error="ValueError")]).startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------ what is started


def test_every_program_gets_the_same_cores():
    rows = benchmark.plan(flags(limit=True, baseline=True), TWO_CORES)
    one = DDP._replace(processes=1, threads=2)
    assert rows[:4] == [SINGLE, Row("mnist_dataparallel.py", 1, 2, "fp32"), one, DDP]
    assert rows[4] == Row("mnist_amp.py", 2, 1, "bf16")
    assert {row.processes * row.threads for row in rows} == {2}
    assert [row for row in rows if row.program == results.LIMIT] == [LIMIT._replace(processes=1, threads=2), LIMIT]
    peers = [(row.program, row.flag) for row in rows if row.program in results.PEERS]
    assert sorted(peers) == sorted((program, flag) for program in benchmark.BASELINES for flag in ("", results.WHOLE))
    assert len(rows) == len(set(rows)) == 5 + 2 + 8


@pytest.mark.parametrize(("gpus", "there"), [([], False), (["a"], False), (["a", "a"], True)])
def test_dataparallel_is_measured_where_it_differs_from_one_device(gpus, there, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "look", lambda *args: (TWO_CORES._replace(gpus=gpus), MALLOC))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--output", str(tmp_path)])
    assert ("mnist_dataparallel.py" in benchmark.parse_args().scripts) == there
    sys.argv += ["--scripts", "mnist_dataparallel.py"]
    assert benchmark.parse_args().scripts == ["mnist_dataparallel.py"]


def test_on_gpus_the_processes_share_the_cores():
    machine = TWO_CORES._replace(gpus=["GPU", "GPU"], cores=16, half="fp16")
    rows = benchmark.plan(flags(), machine)
    assert rows[2:] == [
        Row("mnist_ddp.py", 1, 16, "fp32"),
        Row("mnist_ddp.py", 2, 8, "fp32"),
        Row("mnist_amp.py", 2, 8, "fp16"),
    ]


def test_threads_are_set_only_where_a_user_has_to(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "1")
    for row in SINGLE, DDP, DDP._replace(processes=1, threads=2):
        line, variables = benchmark.command(row, flags(), seed=3)
        assert "OMP_NUM_THREADS" not in variables and "RANK" not in variables
        assert line[3] == row.program.removesuffix(".py") and ("--nproc" in line) == (row != SINGLE)
        assert line[line.index("--seed") + 1] == "3"
    for row in DDP._replace(processes=1), PLAIN:
        assert benchmark.command(row, flags())[1]["OMP_NUM_THREADS"] == "1"


def test_every_row_has_the_same_allocator(monkeypatch):
    """The scripts by data.py, which a variable of the user's would stop; the others by data.py's own limits."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    for row in benchmark.plan(flags(limit=True, baseline=True), TWO_CORES):
        line, variables = benchmark.command(row, flags())
        found = {name: value for name, value in variables.items() if name.startswith(("MALLOC", "GLIBC"))}
        assert found == (MALLOC if row.program.startswith("experiments/") else {})
        assert (results.WHOLE in line) == (row.flag == results.WHOLE)


def test_the_page_shows_how_to_keep_memory():
    typed = " ".join(f"{name}={value}" for name, value in benchmark.MALLOC_LIMITS.items())
    assert f"{typed} python" in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def test_what_is_not_installed_says_what_to_type(monkeypatch):
    monkeypatch.setitem(benchmark.BASELINES, "experiments/baselines/with_fabric.py", ("no_such_module", "lightning"))
    run = a_run(Row("experiments/baselines/with_fabric.py", 2, 1, "fp32"), 1, [])
    benchmark.measure(run, flags())
    assert run.error == "not installed: pip install lightning"
    assert "| not installed: pip install lightning |" in results.table([run])


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_hangs_is_ended(ends):
    program = "import signal, time; print('line', flush=True); time.sleep(60)"
    if not ends:
        program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {program}"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    with pytest.MonkeyPatch.context() as patch, process.stdout:
        patch.setattr(benchmark, "STOP_GRACE", 0.3)
        found = benchmark.lines(process, 2)
        assert next(found) == "line"
        with pytest.raises(TimeoutError, match="not finished after 2 s"):
            next(found)
        benchmark.end(process)
    assert process.returncode == -(signal.SIGTERM if ends else signal.SIGKILL)


def test_it_is_a_small_process():
    """A child's ru_maxrss is at least what its parent had when it was started."""
    program = "import experiments.benchmark, sys; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert shell("-c", program).code == 0


# ----------------------------------------------------------------------------------------------------- flags, resume


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--epochs", "0"], "must be at least 1"),
        (["--repeats", "-1"], "must be at least 1"),
        (["--nproc", "2", "0"], "must be at least 1"),
        (["--timeout", "0"], "--timeout greater than 0"),
        (["--scripts", "no.py"], "there is no"),
        (["--dataset", "no"], "invalid choice"),
        (["--output", str(ROOT / "README.md")], "--output: can't make"),
    ],
)
def test_bad_flags_end_before_anything_starts(wrong, words):
    done = shell("-m", "experiments.benchmark", *wrong)
    assert done.code == 2 and words in done.err.splitlines()[-1] and done.out == ""


def conditions(args):
    """Without the versions of what is installed here."""
    return {"dataset": args.dataset, "epochs": args.epochs, "machine": args.machine.name, "versions": "torch 9"}


def test_resume_keeps_good_runs_and_repeats_the_others(tmp_path, monkeypatch):
    results.to_csv(tmp_path / "benchmark.csv", stored_runs())
    monkeypatch.setattr(benchmark, "conditions_of", conditions)
    args = flags(output=tmp_path, epochs=2)
    args.runs = benchmark.stored(args, pytest.fail)
    assert args.runs == [run for run in stored_runs() if not run.error]
    for flag, other in {"epochs": 3, "dataset": "cifar10"}.items():
        said = []
        benchmark.stored(flags(**{"output": tmp_path, "epochs": 2, flag: other}), said.append)
        assert f"{flag} was {getattr(args.runs[0], flag)}, and is {other} now" in said[0]


def test_resume_of_what_was_stopped_before_the_first_run(tmp_path):
    assert benchmark.stored(flags(output=tmp_path), pytest.fail) == []


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "not a table", ""])
def test_resume_from_another_table_is_one_line(tmp_path, content):
    (tmp_path / "benchmark.csv").write_text(content)
    with pytest.raises(SystemExit) as end:
        benchmark.stored(flags(output=tmp_path), sys.exit)
    assert "benchmark.csv" in end.value.code and "\n" not in end.value.code


# ------------------------------------------------------------------------------------------------------------ real runs

PROGRAM = ("-m", "experiments.benchmark")
QUICK = ("--dataset", "synthetic", "--epochs", "1", "--repeats", "1")
ENV = {**SHELL, "MPLCONFIGDIR": None}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_run(tmp_path):
    command = (*PROGRAM, *QUICK, "--scripts", "mnist_ddp.py", "--nproc", "2", "--limit", "--baseline")
    done = shell(*command, "--output", tmp_path, timeout=850, **ENV)
    assert done.code == 0, done.err
    runs = results.from_csv(tmp_path / "benchmark.csv")
    ddp = runs[0].row
    peers = [ddp._replace(program=program, flag=flag) for flag in results.WAYS for program in benchmark.BASELINES]
    assert [run.row for run in runs] == [ddp, ddp._replace(program=results.LIMIT), *peers]
    for run in runs:
        if run.error:
            assert run.error == f"not installed: pip install {benchmark.BASELINES[run.program][1]}"
            continue
        assert 0 < run.first_step_s < run.epoch_s[0] and run.images_per_s[0] > 0 and run.memory_mib > 100
        assert run.program == results.LIMIT or run.count == 2000
    assert (tmp_path / "benchmark.md").read_text() == done.out == results.markdown(runs)
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert " % of the limit, " in done.out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(tmp_path):
    command = [sys.executable, *PROGRAM, *QUICK, "--scripts", "mnist_ddp.py", "--nproc", "2", "1"]
    command += ["--output", str(tmp_path)]
    env = {name: value for name, value in (ENVIRONMENT | ENV).items() if value is not None}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    path, deadline = tmp_path / "benchmark.csv", time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # into the second run
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 130 and "1 runs are kept" in said and "--resume" in said and "Traceback" not in said
    (kept,) = results.from_csv(path)
    assert (tmp_path / "benchmark.md").exists() and (tmp_path / "benchmark.png").exists()
    done = shell(*command[1:], "--resume", timeout=500, **ENV)
    runs = results.from_csv(path)
    assert done.code == 0 and kept in runs and len(runs) >= 2
    assert not [run for run in runs if run.error]


def test_every_baseline_is_a_program_of_the_folder():
    folder = ROOT / "experiments/baselines"
    assert {ROOT / program for program in benchmark.BASELINES} == {folder / "plain_ddp.py", *folder.glob("with_*.py")}
    assert set(results.PEERS) == {*benchmark.BASELINES}
