"""The result files, dev/results/NAME.md: a line that says how it was measured, and a table.

A file is written only with --save.  dev/build.py copies it to the page with the marker `result: NAME`.
"""

import datetime
import os
import platform
import re
from pathlib import Path

import torch

from dev.programs import ROOT


def machine() -> str:
    described = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", described.read_text()) if described.exists() else None
    return f"{os.cpu_count()} cores of {model[1].strip() if model else platform.processor()}"


def report(name: str, command: str, runs: str, rows: list[list[str]], save: bool) -> None:
    """Print the table below the line that says how it was measured; if `save`, write both to the result file."""
    place = f"{machine()}, {platform.system()} {platform.machine()}, torch {torch.__version__}"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + len(rows[0]) * "---|")
    text = "\n".join([f"`{command}`: {place}, {datetime.date.today()}. {runs}", "", *lines, ""])
    print(f"\n{text}", flush=True)
    if save:
        (ROOT / f"dev/results/{name}.md").write_text(text, encoding="utf-8")
