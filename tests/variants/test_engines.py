"""The same training under other engines, and in the process groups of other libraries.

Each of these packages has an environment of its own (gigabytes, minutes of compiling).  HOROVOD_ENVIRONMENT,
XLA_ENVIRONMENT, RAY_ENVIRONMENT, ACCELERATE_ENVIRONMENT and LIGHTNING_ENVIRONMENT name their folders.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from world import ENVIRONMENT, ROOT, SHELL, forker

SYNTHETIC = ("--dataset", "synthetic")
PACKAGES = {"mnist_horovod": "horovod", "mnist_xla": "torch_xla"}
VENV = "python -m venv FOLDER && FOLDER/bin/pip install torch numpy"
INSTALL = {
    "HOROVOD": "bash variants/install_horovod.sh FOLDER",
    "XLA": "bash variants/install_xla.sh FOLDER",
    "RAY": f'{VENV} "ray[train]"',
    "ACCELERATE": f"{VENV} accelerate",
    "LIGHTNING": f"{VENV} lightning",
}
HOROVODRUN = ("horovodrun", "-np", "2", "--gloo", "python", "-m", "variants.mnist_horovod")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_one_line(name):
    if importlib.util.find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is installed")
    done = forker().run("-m", f"variants.{name}", *SYNTHETIC)
    program = rf"(?:{name}\.py|python3? -m variants\.{name})"  # since Python 3.14 the second
    said = re.fullmatch(rf"{program}: error: .+ is not installed.*: type bash (variants/\S+\.sh) FOLDER\n", done.err)
    assert (done.code, done.out) == (2, "") and said, done.err
    usage = subprocess.run(["bash", ROOT / said[1]], capture_output=True, text=True, timeout=30)
    assert usage.returncode == 2 and usage.stderr.startswith(f"usage: bash {said[1]} FOLDER"), usage.stderr


def run_with(engine, *command, **variables):
    """(exit code, stdout, stderr) of a program in the engine's environment."""
    variable = f"{engine}_ENVIRONMENT"
    if variable not in os.environ:
        pytest.skip(f"{variable}=FOLDER is not set: {INSTALL[engine]}")
    env = ENVIRONMENT | {"PATH": f"{os.environ[variable]}/bin:{os.environ['PATH']}"} | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    return done.returncode, done.stdout, done.stderr


def assert_same_training(out, *ddp_flags):
    """The losses and the last accuracy that mnist_ddp.py prints: other layouts, other compilers round otherwise."""
    done = forker().run("mnist_ddp.py", *SYNTHETIC, *ddp_flags, timeout=600, **SHELL)
    ours, theirs = (re.findall(r"loss ([\d.]+)  accuracy ([\d.]+)%", text) for text in (out, done.out))
    assert len(ours) == len(theirs) == 3, out + done.err
    assert [float(loss) for loss, _ in ours] == pytest.approx([float(loss) for loss, _ in theirs], rel=0.05)
    assert float(ours[-1][1]) == pytest.approx(float(theirs[-1][1]), abs=0.2)


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_horovod_trains_as_ddp_does():
    code, out, err = run_with("HOROVOD", *HOROVODRUN, *SYNTHETIC)
    assert code == 0, out + err
    assert_same_training(out, "--nproc", 2)
    assert out.count("epoch 1/3") == 1, "rank 0 alone prints"
    code, out, err = run_with("HOROVOD", *HOROVODRUN, *SYNTHETIC, "--batch-size", "1")
    assert code != 0 and "--batch-size 1 is too small" in out + err and "Traceback" not in out


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_xla_trains_as_ddp_does():
    """BatchNorm sees the whole batch, as with one process of DDP: hence that reference."""
    script = ("python", "-m", "variants.mnist_xla", *SYNTHETIC)
    code, out, err = run_with("XLA", *script, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert code == 0, out + err
    assert "XLA: 1 process, 2 device(s), CPU" in out
    assert_same_training(out, "--nproc", 1)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    code, out, err = run_with("XLA", *script, PJRT_DEVICE="CPU", **place)
    assert code == 2 and "start this script with python, not with a launcher" in err


# Ray listens on all networks: here only on a loopback of its own, if the system has namespaces for users.
OWN_NETWORK = ("unshare", "-rnu", "sh", "-c", 'hostname localhost && ip link set lo up && exec "$@"', "sh")
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
PROGRAM = re.compile(r"```python\n(((?!```).)*)```\n\n```sh\n([^\n]+ train\.py)\n```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("library", ["RAY", "ACCELERATE", "LIGHTNING"])
def test_the_program_of_launching_md_trains_in_the_group_of_the_library(library):
    """Each program but Ray's then uses the group again, which is an error if it is gone."""
    programs = PROGRAM.findall((ROOT / "docs/launching.md").read_text(encoding="utf-8"))
    (program, _, line), *others = [one for one in programs if f"from {library.lower()}" in one[0]]
    start = ("sh", "-c", f'cd "$TMPDIR" && {line}')
    if library == "RAY" and shutil.which("unshare") and subprocess.run([*OWN_NETWORK, "true"]).returncode == 0:
        start = (*OWN_NETWORK, *start)
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the names of Ray's sockets
        Path(folder, "train.py").write_text(program)
        variables = QUIET | {"PYTHONPATH": str(ROOT), "HOME": folder, "TMPDIR": folder}
        code, out, err = run_with(library, *start, **variables)
    five_lines = forker().run("min_DDP.py", "--nproc", 2).out.splitlines()[1:]
    assert (code, len(five_lines), others) == (0, 5, []), out + err
    for printed in "distributed: 2 processes, gloo, cpu, in another library's group", *five_lines:
        assert out.count(printed) == 1, out + err
