"""The command line that the instruments share.  No torch here: its import takes seconds."""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from ddp_by_diff import __version__


class Line(NamedTuple):
    """One of the lines that an instrument says."""

    label: str
    text: str


def started_as(tool: str) -> str:
    """The name by which the user has started this tool."""
    name = os.path.basename(sys.argv[0])
    return name if name == f"ddp-{tool}" else f"python -m ddp_by_diff.{tool}"


def new_parser(tool: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose last argument is the program: a file or, after -m, a module; and its flags."""
    parser = argparse.ArgumentParser(
        prog=started_as(tool),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"ddp-by-diff {__version__}")
    parser.add_argument("-m", dest="module", nargs="...", help="a module, and its flags")
    parser.add_argument("script", nargs="...", help="a program, and its flags")
    return parser


def add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add --timeout, which was --patience before version 1.0."""
    of_steps = "seconds to wait for a step (default: %(default)s)"
    parser.add_argument("--timeout", type=float, default=seconds, help=of_steps)
    hidden: dict = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--patience", dest="timeout", type=float, **hidden)


def read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags, and `command`: the program with its own flags, or [].

    What can't run is one line, with exit code 2.
    """
    args = parser.parse_args()
    args.command = ["-m", *args.module] if args.module else args.script
    if args.command and args.command[0] != "-m" and not os.path.isfile(args.command[0]):
        parser.error(f"there is no file {args.command[0]}")
    if "--nproc" in args.command and "RANK" not in os.environ:
        parser.error("put --nproc before the program")
    return args


def output_path(parser: argparse.ArgumentParser, file: str) -> str:
    """The file's absolute path, as a program may change its folder; or one line, exit code 2."""
    path = os.path.abspath(file)
    place = path if os.path.exists(path) else os.path.dirname(path)
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        parser.error(f"{path} can't be written: name a file, in a folder that is there")
    return path


def write_file(file: str, text: str) -> None:
    """Write the whole file, or raise OSError: then there is no file, or still the old one.

    A device or a pipe, such as /dev/stdout, is written directly.
    """
    path = Path(file)
    if file.startswith("/dev/") or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # a rename can't cross file systems
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def refuse(tool: str, problem: object) -> NoReturn:
    """One line, and exit code 2: what can't run."""
    print(f"{tool}: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def say(lines: Iterable[Line], indent: int = 10) -> None:
    """Print each text behind its label, as wide as the terminal."""
    width = max(40, shutil.get_terminal_size().columns - 1)
    # Paths stay whole, so that they can be copied.
    options: dict = {"break_long_words": False, "break_on_hyphens": False}
    for label, text in lines:
        whole = f"{label:{indent - 1}} {text}"
        try:
            print(
                textwrap.fill(whole, width, subsequent_indent=" " * indent, **options), flush=True
            )
        except BrokenPipeError:  # `| head` has read enough; what follows is still to be done
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(text: str, terminal: int = 2) -> None:
    """A line of progress, in place of the one before; nothing, if the descriptor is no terminal."""
    if os.isatty(terminal):
        os.write(terminal, f"\r{text}\033[K".encode())
