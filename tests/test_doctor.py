"""doctor.py as a user meets it: healthy, with real faults planted one at a time."""

import os
import re
import socket
import sys
import time
from unittest import mock

import pytest
import torch
from world import ROOT, SHELL, forker, shell

import doctor

ROWS = [
    *("command", "python", "torch", "torchvision", "CPU", "GPUs", "backends", "launcher", "limits", "temporary folder"),
    *("loopback", "host name", "collectives, gloo", "training, gloo"),
]
FAST = {"DIST_TIMEOUT": "3", "DIST_GRACE": "0.5"}  # for ranks that hang


def _host_has_an_address():
    try:
        return bool(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False


whole_table = pytest.mark.skipif(not _host_has_an_address(), reason="this machine's own host name has no address")


def python(*args, **environment):
    return forker().run(*args, **(SHELL | environment))


def examined(done):
    """The table as {what: (verdict, found)}; every line of the output has its place in it."""
    assert "Traceback" not in done.out + done.err, done.out + done.err
    *lines, last = done.out.splitlines()
    table = {}
    for line in lines:
        if row := re.fullmatch(r"(ok   |WRONG)  (.{17})  (\S.*)", line):
            what = row[2].rstrip()
            table[what] = row[1].strip(), row[3]
        else:
            assert line.startswith(" " * 26), line
            table[what] = table[what][0], f"{table[what][1]}\n{line.strip()}"
    wrong = {what: found for what, (verdict, found) in table.items() if verdict == "WRONG"}
    assert last == (f"{len(wrong)} to put right" if wrong else "all is well")
    assert done.code == (1 if wrong else 0)
    return table, wrong


# ----------------------------------------------------------------------------------------------------------- healthy


@pytest.mark.slow
@whole_table
def test_a_healthy_machine():
    started = time.monotonic()
    done = shell(ROOT / "doctor.py", **SHELL)
    seconds = time.monotonic() - started
    table, wrong = examined(done)
    assert not wrong and list(table) == ROWS and done.err == ""
    found = {what: text for what, (_, text) in table.items()}
    assert found["command"] == f"python {ROOT / 'doctor.py'}" and torch.__version__ in found["torch"]
    assert re.match(rf"{len(os.sched_getaffinity(0))} cores, OMP_NUM_THREADS not set", found["CPU"])
    assert found["GPUs"] == "none (CUDA_VISIBLE_DEVICES empty): everything runs on the CPU"
    assert all(re.fullmatch(r"2 processes, right answers in \d+\.\d s", found[what]) for what in ROWS[-2:])
    assert seconds < 60  # or it has waited for something; on an idle machine it takes less than 10


# ---------------------------------------------------------------------------------------- faults, planted one at a time

PLANTED = [  # environment, the line that is wrong, what it says
    ({"RANK": "0"}, "launcher", "RANK=0, WORLD_SIZE=, .*: set all four .*or unset RANK.*"),
    ({"NPROC": "0"}, "launcher", r"nproc \(or NPROC\) is 0: start at least 1 process"),
    ({"OMP_NUM_THREADS": "banana"}, "CPU", r"\d+ cores, OMP_NUM_THREADS banana: unset it, or take 1 to \d+"),
    (
        {"CUDA_VISIBLE_DEVICES": "97,98"},
        "GPUs",
        "CUDA_VISIBLE_DEVICES 97,98, but only 0 of those can be used: correct it, or unset it",
    ),
    (
        {"TMPDIR": "/proc"},  # no one can write there, not even root
        "temporary folder",
        "TMPDIR is /proc, which can't be written: correct it, or unset it",
    ),
    (
        {"DIST_TIMEOUT": "soon"},
        "limits",
        "DIST_TIMEOUT soon: DIST_TIMEOUT must be a number of seconds; or unset it",
    ),
]


@pytest.mark.slow
@whole_table
@pytest.mark.parametrize(("environment", "what", "says"), PLANTED, ids=[next(iter(case[0])) for case in PLANTED])
def test_a_wrong_environment_is_one_wrong_line(environment, what, says):
    table, wrong = examined(python("doctor.py", **environment))
    assert list(table) == ROWS and list(wrong) == [what], table
    assert re.fullmatch(says, wrong[what]), wrong


def test_as_many_threads_as_cores_are_right_and_more_are_wrong(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    for threads, right in (1, True), (cores, True), (cores + 1, False), (0, False):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        assert [ok for ok, what, _ in doctor.look() if what == "CPU"] == [right], threads


@whole_table
def test_a_torchvision_that_does_not_fit(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nmore')")
    table, wrong = examined(python("doctor.py", path=[tmp_path], before="sys.modules.pop('torchvision')"))
    assert list(table) == ROWS
    advice = "pip install --upgrade torch torchvision (data.py needs it)"
    assert wrong == {"torchvision": f"operator torchvision::nms does not exist: {advice}"}


def test_without_torch_it_says_so_and_stops(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    done = shell(ROOT / "doctor.py", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err) == (1, "")
    assert done.out == "WRONG  torch              libcudart.so.12: cannot open shared object file: pip install torch\n"


FAULTS = {
    "wrong answer": """
right = distributed.all_reduce
distributed.all_reduce = lambda tensor, op="sum": right(tensor, op) + 1
""",
    "wrong gradient": """
distributed.prepare_ddp_model = lambda model: model
distributed.unwrap_model = lambda model: model
""",
    "a rank hangs": """
right = distributed.gather
def gather(tensor):
    if distributed.get_rank() == 1:
        time.sleep(60)
    return right(tensor)
distributed.gather = gather
""",
    "all ranks hang": """
def sync_params(params):
    time.sleep(60)
distributed.sync_params = sync_params
""",
    "a rank dies": """
def gather(tensor):
    os.kill(os.getpid(), 11 if distributed.get_rank() == 1 else 0)
    time.sleep(60)
distributed.gather = gather
""",
}


def planted(fault, tmp_path, **environment):
    """`python doctor.py` with a fault in distributed.py."""
    path = tmp_path / "planted.py"
    start = (
        f"import runpy\nsys.argv = ['doctor.py']\nrunpy.run_path({str(ROOT / 'doctor.py')!r}, run_name='__main__')\n"
    )
    path.write_text(f"import os, sys, time\nimport distributed\n{FAULTS[fault]}{start}")
    started = time.monotonic()
    table, wrong = examined(python(path, path=[ROOT], **environment))
    assert list(table) == ROWS
    assert time.monotonic() - started < 50  # they would hang for 60
    return path, wrong


@pytest.mark.slow
@whole_table
@pytest.mark.parametrize(
    ("fault", "what", "says"),
    [
        ("wrong answer", "collectives, gloo", r"AssertionError: all_reduce gave 2\.0, and 1\.0 is right: don't train"),
        ("wrong gradient", "training, gloo", "AssertionError: DDP's gradient gave one that is wrong by .* don't train"),
    ],
)
def test_wrong_answers(fault, what, says, tmp_path):
    _, wrong = planted(fault, tmp_path)
    assert list(wrong) == [what]
    assert re.match(rf"rank \d of 2 failed first: {says}", wrong[what])


@pytest.mark.slow
@whole_table
def test_a_rank_that_hangs(tmp_path):
    path, wrong = planted("a rank hangs", tmp_path, **FAST)
    assert list(wrong) == ["collectives, gloo"]
    first, zero, one = wrong["collectives, gloo"].splitlines()
    assert re.match("rank 0 of 2 failed first: .*[Tt]imed out.*: is a firewall or a security tool in the way", first)
    assert re.match(rf"rank 0: {re.escape(str(path))}:\d+, gather", zero)
    assert re.match(rf"rank 1: {re.escape(str(path))}:\d+, gather", one)


@pytest.mark.slow
@whole_table
def test_ranks_that_all_hang(tmp_path):
    """No collective can time out here: the doctor's own limit does."""
    path, wrong = planted("all ranks hang", tmp_path, **FAST)
    assert list(wrong) == ["collectives, gloo"]
    first, *stand = wrong["collectives, gloo"].splitlines()
    assert first.startswith("TimeoutError: no end after 11 s: is a firewall")
    assert len(stand) == 2
    assert all(
        re.fullmatch(rf"rank {r}: {re.escape(str(path))}:\d+, sync_params", line) for r, line in enumerate(stand)
    )


@whole_table
def test_a_rank_that_dies(tmp_path):
    path, wrong = planted("a rank dies", tmp_path)
    assert list(wrong) == ["collectives, gloo"]
    first, *stand = wrong["collectives, gloo"].splitlines()
    assert first == "rank 1 of 2 failed first: ended by SIGSEGV: report this"
    assert [re.sub(r"\d+, ", "N, ", line) for line in stand] == [f"rank {r}: {path}:N, gather" for r in (0, 1)]


# -------------------------------------------------------------------------------------------- what a CPU can't show


def test_gpus_are_described(monkeypatch, capsys):
    gpu = mock.Mock(major=9, minor=0, total_memory=139 * 2**30)
    gpu.name = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(sys, "argv", ["-c", "2"])
    exec(doctor._DESCRIBE_GPUS, {})
    assert capsys.readouterr().out == "0: NVIDIA H200, 9.0, 139 GiB\n1: NVIDIA H200, 9.0, 139 GiB\n"


@pytest.mark.slow
@whole_table
def test_cuda_that_cannot_start():
    """device_count counts the GPUs of a driver that is too old; only the start of CUDA fails."""
    old_driver = "import torch; torch.cuda.device_count = lambda: int(os.environ.get('CUDA_VISIBLE_DEVICES') != '')"
    # On a machine with GPUs, too, there is no GPU 97: CUDA can't start, whatever the driver is.
    table, wrong = examined(python("doctor.py", before=old_driver, CUDA_VISIBLE_DEVICES="97"))
    wrong.pop("backends", None)  # a torch for the CPU only has no nccl
    assert list(wrong) == ["GPUs"], table
    says = r"1 \(CUDA_VISIBLE_DEVICES 97\), but CUDA can't start: \w+Error: .*\w.*: nvidia-smi must show CUDA .*"
    assert re.fullmatch(says, wrong["GPUs"])
    assert list(table) == ROWS, "the self-test on GPUs could only say the same again"


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that has counted two GPUs, without the GPUs; what starts CUDA there is replaced by the test."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    doctor._start_cuda.cache_clear()
    yield monkeypatch
    doctor._start_cuda.cache_clear()


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("raise RuntimeError('The driver is too old\\nfound version 11040')", "RuntimeError: The driver is too old"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["raises", "dies", "exits", "hangs"],
)
def test_a_start_of_cuda_that_fails(start, reason, two_gpus):
    two_gpus.setattr(doctor, "_DESCRIBE_GPUS", start)
    two_gpus.setattr(doctor, "CUDA_START", 0.5)
    two_gpus.setattr(doctor, "CUDA_START_PER_GPU", 0.25)
    started = time.monotonic()
    ok, _, found = doctor._gpus()
    assert not ok and "\n" not in found
    assert found.startswith(f"2 (CUDA_VISIBLE_DEVICES not set), but CUDA can't start: {reason}: "), found
    assert time.monotonic() - started < 30


def test_a_start_of_cuda_that_works(two_gpus):
    two_gpus.setattr(doctor, "_DESCRIBE_GPUS", "import sys; print(f'0: one of {sys.argv[1]}\\n1: another')")
    ok, what, found = doctor._gpus()
    assert (ok, what, found) == (True, "GPUs", "2 (CUDA_VISIBLE_DEVICES not set)\n0: one of 2\n1: another")


@pytest.mark.parametrize(
    "given", [{}, {"DIST_TIMEOUT": "3"}, {"DIST_TIMEOUT": "600"}], ids=["default", "lowered", "raised"]
)
def test_the_more_gpus_the_more_time(given, monkeypatch):
    """Eight GPUs that no process has used take longer than 10 s to start.  The user can only lower the time-outs."""
    runs = []

    def record(check, backend, n, limit):
        runs.append((backend, n, float(os.environ["DIST_TIMEOUT"]), limit))
        return ""

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DIST_", "CUDA_"))}
    monkeypatch.setattr(doctor, "_start_cuda", lambda count: ([], ""))
    monkeypatch.setattr(doctor, "_trouble", record)
    for gpus in (1, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with mock.patch.dict(os.environ, clean | given, clear=True):
            assert all(ok for ok, _, _ in doctor.self_test())
    assert [run[:2] for run in runs[::2]] == [("gloo", 2), ("nccl", 1), ("gloo", 2), ("nccl", 8)]
    assert runs[::2] == runs[1::2], "both checks have the same time"
    for backend, n, seconds, limit in runs:
        assert 2 * seconds < limit
        if given == {"DIST_TIMEOUT": "3"}:
            assert seconds == 3
        elif backend == "gloo":
            assert seconds == 10
        else:
            assert seconds >= 20 + 5 * n and limit < 240


@pytest.mark.parametrize(
    ("chosen", "count", "ok"), [("0,1", 1, False), ("0", 0, False), ("-1", 0, True), ("", 0, True), (None, 0, True)]
)
def test_gpus_that_are_asked_for_and_not_there(chosen, count, ok, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert doctor._gpus()[0] == ok


def test_a_torch_that_can_not_use_the_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidia0")
    ok, _, found = doctor._gpus()
    assert not ok and "torch can't use it" in found


def test_ctrl_c_ends_the_self_test(monkeypatch):
    def told(*args, **options):
        raise SystemExit(130)

    monkeypatch.setattr("distributed.launch", told)
    with pytest.raises(SystemExit) as end:
        doctor._trouble(doctor.check_training, "gloo", 2, 5.0)
    assert end.value.code == 130


# --------------------------------------------------------------------------------------------------------- the command


def test_gpus_that_only_nvml_counts_are_named(monkeypatch):
    """MIG: the driver's library counts two cards, and CUDA uses one part of one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "_start_cuda", lambda count: (["0: a GPU, 9.0, 20 GiB"], ""))
    ok, _, found = doctor._gpus()
    assert not ok and found.startswith(
        "2 (CUDA_VISIBLE_DEVICES not set) by NVML, but CUDA can use only 1 (MIG?): start 1"
    )


@pytest.mark.parametrize("args", [["nonsense"], ["--fast"]])
def test_unknown_usage(args):
    done = python("doctor.py", *args)
    assert (done.code, done.out) == (2, "") and "python doctor.py --report" in done.err


def test_help():
    done = python("doctor.py", "--help")
    assert (done.code, done.err) == (0, "") and "python doctor.py --report" in done.out


def test_under_a_launcher_there_is_one_table_per_machine():
    done = python("doctor.py", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert (done.code, done.out, done.err) == (0, "", "")
