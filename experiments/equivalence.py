"""Is it the same as one process?

    python -m experiments.equivalence                              # writes to experiments/results/: 3 minutes
    torchrun --nproc_per_node=2 -m experiments.equivalence         # with the launcher's processes

Trains a small network on the same global batches with 1, 2, 3 and 4 processes, in all the right and wrong ways of
equivalence_ways.py.  After each step the weights are compared with those of a plain loop in one process.  The distance
is max |dw|: the largest difference of any weight, on any rank.  A right way differs by rounding only: if one is further
away than LIMITS (times the way's own limit) after the last step, the exit code is 1.  Started by a launcher, it
measures with the launcher's processes, so it also checks a cluster.

The results are printed, and written to OUTPUT/equivalence.md (tables), .png (a picture) and .json (all distances).
"""

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import distributed as dist
from experiments import measured
from experiments.equivalence_ways import BATCH, WAYS, Run, Way, ddp

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LIMITS = {"fp32": 1e-6, "fp64": 1e-12}  # after 100 steps; a weight of size 1 is rounded to 6e-8 and 1e-16
WORLD_SIZES = [1, 2, 3, 4, 6, 8]  # shares of the global batch that can be halved, and no empty share of the last batch
TORCHRUN_TIMEOUT = 600  # seconds
TORCHRUN = Way("DDP, started by torchrun", ddp, True)
# Of the wrong ways: colour-blind people can tell them apart (Okabe and Ito, Tol).  The right ways are blue.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9", "#999933", "#882255", "#888888")


class Row(NamedTuple):
    """What was measured of a way in one precision with one number of processes."""

    distances: list[float]  # after each step; empty if the way can't run here
    note: str  # what it has counted, or why it can't run


Results = dict[str, dict[int, dict[str, Row]]]  # [dtype][number of processes][name of the way]


# ----------------------------------------------------------------------------------------------------------- measuring


def values(state: nn.Module | torch.Tensor) -> torch.Tensor:
    """All weights (or the accuracy) in one dimension, float64 on the CPU.  With FSDP a collective."""
    tensors = [state] if isinstance(state, torch.Tensor) else state.parameters()
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole]).to("cpu", torch.float64)


def measure(local_rank: int, world_size: int, ways: list[str], steps: int, backend: str | None) -> dict:
    """Runs in each process; returns {dtype: {name: Row}}, the same on every rank."""
    dist.init_process_group(backend=backend)
    torch.set_num_threads(1)  # the same sums, however many cores there are
    rows: dict[str, dict[str, Row]] = {dtype: {} for dtype in DTYPES}
    for dtype in DTYPES:
        right: dict = {}  # what one process computes
        for way in (way for way in WAYS if way.name in ways):
            run = Run(DTYPES[dtype], steps)
            if way.against not in right:
                right[way.against] = [values(state) for state in way.against(run)]
            try:
                pairs = zip(way.function(run), right[way.against], strict=True)
                distances = torch.stack([(values(state) - expected).abs().max() for state, expected in pairs])
                rows[dtype][way.name] = Row(dist.all_reduce(distances, "max").tolist(), run.note)
            except NotImplementedError as problem:
                rows[dtype][way.name] = Row([], str(problem))
    return rows


def measure_torchrun(nproc: int, steps: int, backend: str | None) -> dict:
    """This program again, started by torchrun, with DDP alone; returns {dtype: {name: Row}}, with NaN if it fails."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that torchrun ends as well
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += ["-m", "experiments.equivalence", "--ways", "ddp", f"--steps={steps}", f"--output={folder}"]
        command += [f"--backend={backend}"] if backend else []
        env = {"OMP_NUM_THREADS": "1"} | os.environ  # or torchrun warns that it sets it
        options = {"cwd": measured.ROOT, "env": env, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, **options, timeout=TORCHRUN_TIMEOUT)
            rows = json.loads(Path(folder, "equivalence.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, subprocess.TimeoutExpired) as problem:
            reason = problem if isinstance(problem, subprocess.TimeoutExpired) else done.stderr
            print(f"torchrun failed: {reason}", file=sys.stderr)
            return {dtype: {TORCHRUN.name: Row([math.nan], "")} for dtype in DTYPES}
    return {dtype: {TORCHRUN.name: Row(*rows[dtype][str(nproc)]["DDP"])} for dtype in DTYPES}


def limit_after(steps: int, dtype: str) -> float:
    """Rounding errors of later steps add up."""
    return LIMITS[dtype] * max(1, steps / 100)


def too_far(results: Results) -> list[str]:
    """A line for each row that must be equal, and isn't."""
    lines = []
    for way in (way for way in (*WAYS, TORCHRUN) if way.must_be_equal):
        for dtype, nproc in itertools.product(results, results["fp32"]):
            row = results[dtype][nproc].get(way.name)
            if row is None or not row.distances:
                continue
            distance, limit = row.distances[-1], way.limit * limit_after(len(row.distances), dtype)
            if not distance <= limit:  # not: so that NaN is too far
                size = f"{short(distance)}, but the limit is {short(limit)}"
                lines.append(f"not equal: {way.name}, {dtype}, {nproc} processes: {size}")
    return lines


# ------------------------------------------------------------------------------------------------- tables and a picture


def short(number: float) -> str:
    """With one digit: more would differ from machine to machine."""
    return f"{number:.0e}".replace("e-0", "e-") if 0 < number < 1e-3 else f"{number:.1g}"


def cell(way: Way, row: Row | None) -> str:
    """The distance after the last step."""
    if row is None or not row.distances:
        return row.note if row else "-"
    return f"{short(100 * row.distances[-1])} points" if way.is_accuracy else short(row.distances[-1])


def table(results: Results, ways: list[Way], dtypes: list[str], sentences: bool = False) -> str:
    """In Markdown: a row for each way, a column for each precision and number of processes, and perhaps a sentence."""
    columns = list(itertools.product(dtypes, results["fp32"]))
    rows = [["way", *(f"{dtype}, {nproc}" for dtype, nproc in columns)]]
    for way in ways:
        rows.append([way.name, *(cell(way, results[dtype][nproc].get(way.name)) for dtype, nproc in columns)])
    if sentences:
        dtype, nproc = columns[-1]
        rows[0].append(f"what happens ({nproc} processes)")
        for row, way in zip(rows[1:], ways, strict=True):
            note = results[dtype][nproc][way.name].note
            row.append(way.sentence + (f" {note[:1].upper()}{note[1:]}." if note else ""))
    return measured.table(rows, align=True)


def tables(results: Results, steps: int, backend: str) -> str:
    """The text of equivalence.md."""
    found = {name for rows in results["fp32"].values() for name in rows}
    right = [way for way in (*WAYS, TORCHRUN) if way.name in found and way.must_be_equal]
    wrong = [way for way in WAYS if way.name in found and not way.must_be_equal]
    text = f"The distance from one process after {steps} steps, with a global batch of {BATCH}: max |dw|, the largest "
    text += "difference of any weight on any rank. For an evaluation: percentage points of accuracy. The columns are "
    text += f"precision and number of processes. torch {torch.__version__}, {backend}.\n"
    if right:
        text += "\n**The same as one process**, but for rounding:\n\n" + table(results, right, list(DTYPES))
    if wrong:
        text += "\n**Mistakes**, and what is taken for one:\n\n" + table(results, wrong, ["fp32"], sentences=True)
    return text


def picture(results: Results) -> bytes:
    """PNG: the distance over the steps, for the largest number of processes; a panel for each precision."""
    nproc = max(results["fp32"])
    rows = results["fp32"][nproc]
    ways = [way for way in WAYS if way.name in rows and rows[way.name].distances and not way.is_accuracy]
    ways.sort(key=lambda way: (way.must_be_equal, -rows[way.name].distances[-1]))  # for the legend
    colours = itertools.cycle(COLOURS)
    styles = {way: ("-", "#0072B2") if way.must_be_equal else ("--", next(colours)) for way in ways}
    figure, panels = measured.new_picture(1, 1, size=(12, 5.6), sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for way, (line, colour) in styles.items():
            distances = [distance or math.nan for distance in results[dtype][nproc][way.name].distances]
            axes.plot(range(1, len(distances) + 1), distances, line, color=colour, label=way.name)
        last = max([2, *(len(rows[way.name].distances) for way in ways)])
        limit = limit_after(last, dtype)
        axes.axhline(limit, color="0.5", linewidth=0.8, linestyle=":")
        axes.text(last, limit, f"limit of right ways: {short(limit)} ", color="0.4", va="bottom", ha="right")
        axes.set(title=dtype, xlabel="step", yscale="log", ylim=(1e-18, 10), xlim=(1, last))
    panels[0].set_ylabel("max |dw|: distance of the weights from one process")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(
        f"{nproc} processes against one: right ways (solid) differ by rounding only, mistakes (dashed) by far more"
    )
    return measured.png(figure)


# --------------------------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [way.function.__name__ for way in WAYS]
    parser.add_argument(
        "--nproc", type=int, nargs="+", choices=WORLD_SIZES, help="(default: 1 2 3 4; with GPUs as many as there are)"
    )
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="WAY", help=" ".join(names))
    parser.add_argument("--output", type=Path, default=measured.RESULTS, help="(default: experiments/results)")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="(default: nccl for GPUs, else gloo)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        args.nproc = world_sizes(args.nproc, args.backend)
        args.output.mkdir(parents=True, exist_ok=True)
    except ValueError as problem:
        parser.error(str(problem))
    except OSError as problem:
        parser.error(f"--output {args.output}: {problem.strerror}")
    return args


def world_sizes(nproc: list[int] | None, backend: str | None) -> list[int]:
    """The numbers of processes to measure; ValueError, in one line, if they can't run."""
    dist.get_timeout()
    started = dist.get_world_size()  # writes srun's and mpirun's variables into torchrun's
    if "WORLD_SIZE" in os.environ:
        if nproc:
            raise ValueError(f"a launcher has started {started} process(es): leave out --nproc")
        if started not in WORLD_SIZES:
            raise ValueError(f"{started} processes can't share a batch of {BATCH}: start one of {WORLD_SIZES}")
        return [started]
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    sizes = nproc or [size for size in (1, 2, 3, 4) if size <= (gpus or 4)]
    if backend == "nccl" and not gpus:
        raise ValueError("backend nccl needs a visible CUDA GPU and a torch that was built with it: use gloo")
    if gpus and max(sizes) > gpus:
        raise ValueError(f"{max(sizes)} processes, but {gpus} visible GPU(s): use gloo")
    return sorted(set(sizes))


def main() -> int:
    """0; 1 if a way that must be equal isn't."""
    args = parse_args()
    ways = [way.name for way in WAYS if way.function.__name__ in args.ways]
    results: Any = {dtype: {nproc: {} for nproc in args.nproc} for dtype in DTYPES}
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # imports what every process would import by itself
    for nproc in args.nproc:
        rows = dist.launch(measure, ways, args.steps, args.backend, nproc=nproc)
        if rows is None:  # under a launcher rank 0 goes on alone
            return 0
        for dtype in DTYPES:
            results[dtype][nproc].update(rows[dtype])
    several = [nproc for nproc in args.nproc if nproc > 1]
    if several and "ddp" in args.ways and "WORLD_SIZE" not in os.environ:
        for dtype, rows in measure_torchrun(several[0], args.steps, args.backend).items():
            results[dtype][several[0]].update(rows)
    text = tables(results, args.steps, args.backend or ("nccl" if torch.cuda.device_count() else "gloo"))
    lines = too_far(results)
    print(text, *lines, "" if lines else "all ways that must be equal are equal", sep="\n")
    for name, content in (
        ("equivalence.md", text.encode()),
        ("equivalence.png", picture(results)),
        ("equivalence.json", json.dumps(results).encode()),
    ):
        measured.write(args.output / name, content)
    return 1 if lines else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as problem:
        sys.exit(f"can't write {problem.filename}: {problem.strerror}")
