"""The pages of docs/replays/, a picture of one of them, and the table of patterns in variants/README.md.

python -m dev.replays ddp hang      # two pages, into the folder replays/
python -m dev.replays patterns      # the table
python -m dev.replays --save        # all: docs/replays/, dev/results/patterns.md; three minutes, with chromium
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from dev import measured, programs
from dev.programs import ROOT


class Run(NamedTuple):
    command: str
    nproc: int = 3
    flags: str = ""  # of replay
    start: str = ""  # the page opens where a line with this text runs first (default: where replay opens it)


DRY = "--dataset synthetic --dry-run"
PAGES = {
    "min_DDP": Run("min_DDP.py --epochs 1 --batch-size 200", 2, "--steps 5", "loss.backward()"),
    "ddp": Run(f"mnist_ddp.py {DRY}", start="loss.backward()"),
    "by_hand": Run(f"-m variants.mnist_by_hand {DRY}", start="loss.backward()"),
    "local_sgd": Run(f"-m variants.mnist_local_sgd {DRY}", start="optimizer.step()"),
    "fsdp": Run(f"-m variants.mnist_fsdp {DRY}", start="fully_shard(layer"),
    "fsdp_by_hand": Run(f"-m variants.mnist_fsdp_by_hand {DRY}", flags="--steps 1", start="loss.backward()"),
    "tensor_parallel": Run(f"-m variants.mnist_tensor_parallel {DRY}", start="loss = F."),
    "pipeline": Run(f"-m variants.mnist_pipeline {DRY}", start="step(*inputs"),
    "hang": Run("-m demos.mistakes collective wrong", 2, "--timeout 20"),
}
PATTERNS = {  # a row of the table, and how many processes the script accepts
    "mnist_ddp": 3,
    "mnist_by_hand": 3,
    "mnist_overlap": 3,
    "mnist_accumulate": 3,
    "mnist_local_sgd": 3,
    "mnist_zero": 3,
    "mnist_fsdp": 3,
    "mnist_fsdp_by_hand": 3,
    "mnist_tensor_parallel": 3,
    "mnist_mesh": 4,
    "mnist_pipeline": 3,
    "mnist_pipeline_1f1b": 3,
    "mnist_transformer": 3,
    "mnist_context_parallel": 3,
    "mnist_experts": 4,
}
NAMES = {"images": "images", "gradients": "model gradients", "weights": "model weights"}


def record(run: Run, page: Path) -> None:
    flags = ("--nproc", run.nproc, *run.flags.split(), "--out", page)
    done = programs.shell("-m", "ddp_by_diff.replay", *flags, *run.command.split(), timeout=200)
    if not page.exists():
        raise RuntimeError(done.err)


def add_links(page: Path, name: str, run: Run) -> None:
    """Give a recorded page the title and the sentence of its row in docs/replay.md, links, and the line to start at."""
    row = rf"\[(.+)\]\(replays/{name}.html\) \| (.+) \|"
    title, hint = re.search(row, (ROOT / "docs/replay.md").read_text(encoding="utf-8")).groups()
    hint = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(hint))
    about = (
        f'<a href="../../README.md">ddp-by-diff</a> › <a href="../replay.md">replay</a>. Look for: {hint}. '
        f"Recorded with <code>--nproc {run.nproc} {run.command}</code>"
    )
    text, data = page.read_text(encoding="utf-8"), read_data(page)
    if run.start:
        starts = (k for k, row in enumerate(data["rows"], 1) if run.start in data["files"][row[0]][1][row[1] - 1])
        text = re.sub(r'"start":\d+', f'"start":{next(starts)}', text, count=1)
    text = re.sub(r"<(title|h1)>.*?<", lambda match: f"<{match[1]}>{title}<", text)
    text = text.replace('<p id="about" class="small">', f'<p id="about" class="small">{about}')
    page.write_text(text, encoding="utf-8")


def read_data(page: Path) -> dict:
    """Return what the page shows: see page() of ddp_by_diff/replay/show.py."""
    return json.loads(re.search("const data = (.*);\n", page.read_text(encoding="utf-8"))[1])


def pattern(data: dict, variable: str) -> str:
    """Return the first and the last mark that a line of `train` has given a variable: `≠ → =`, or one of them.

    Gradients: until the optimizer has used them, because it doesn't matter how they are set to zero.
    """
    marks = []
    for _, _, function, _, step, ranks, changed in data["rows"]:
        if step and variable == NAMES["gradients"]:
            break
        values = [values.get(variable, -1) for _, _, is_new, values, _ in ranks.values() if not is_new]
        texts = [data["texts"][value][0] for value in values if value >= 0]
        if function == "train" and variable in changed and texts and set(texts) != {"None"}:
            marks.append(changed[variable][-1])
    return " → ".join(dict.fromkeys([marks[0], marks[-1]]))


def photograph(page: Path) -> None:
    """Write a picture of the page where the model's gradients have become equal, beside the page."""
    rows = read_data(page)["rows"]
    flip = next(number for number, row in enumerate(rows, 1) if row[6].get(NAMES["gradients"]) == "≠→=")
    browser = [shutil.which("chromium") or "google-chrome", "--headless=new", "--no-sandbox", "--hide-scrollbars"]
    picture = page.with_suffix(".png")
    options = ["--window-size=1280,820", f"--screenshot={picture}", f"file://{page}#{flip}"]
    subprocess.run([*browser, *options], check=True, capture_output=True)
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)  # fewer bytes


def patterns() -> list[list[str]]:
    """Return the rows of the table."""
    rows = [["script", *NAMES]]
    for script, nproc in PATTERNS.items():
        module = script if script == "mnist_ddp" else f"variants.{script}"
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "replay.html")
            record(Run(f"-m {module} {DRY}", nproc), page)
            rows.append([f"`{script}`", *(pattern(read_data(page), name) for name in NAMES.values())])
    return [*rows, ["`mnist_horovod`, `mnist_xla`", "-", "-", "-"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PAGES, "patterns"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(names)}")
    parser.add_argument("--save", action="store_true", help="write into docs/replays/ and dev/results/")
    args = parser.parse_args()
    if not set(args.names) <= set(names):
        parser.error(f"choose from {' '.join(names)}")
    folder = ROOT / "docs/replays" if args.save else Path("replays").resolve()
    folder.mkdir(exist_ok=True)
    for name in args.names or names:
        if name == "patterns":
            text = "Three processes; `mesh` and `experts` four. The last two were not recorded."
            measured.report(name, "python -m dev.replays --save patterns", text, patterns(), args.save)
            continue
        page = folder / f"{name}.html"
        record(PAGES[name], page)
        add_links(page, name, PAGES[name])
        print(f"written: {page} ({page.stat().st_size / 1000:.0f} kB)", flush=True)
        if name == "by_hand":
            photograph(page)


if __name__ == "__main__":
    main()
