"""What the ranks have recorded, also on disk, so that a rank that is killed leaves it behind.

The process that shows the recording may be killed, too: torchrun ends rank 0 as soon as another
rank has died.  So that process forks a keeper, which outlives it, and shows what the journals hold
if that process could not.  A handler of SIGTERM would not do: Python runs none while rank 0 waits
in a collective, and the program may have a handler of its own.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ddp_by_diff.instruments.rank import Notes
from ddp_by_diff.replay.values import Value

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Event(NamedTuple):
    """A line that begins, a function that returns, or something that is printed."""

    began: int  # ns: until then, the line before has run
    ended: int  # the variables were read in between
    kind: str  # "line", "return", "print"
    file: str = ""
    line: int = 0
    function: str = ""  # of a "print": the text
    depth: int = 0  # how many of the program's own functions are being run
    is_new: bool = False  # the first event in this call of the function
    changed: dict[str, Value | None] = {}  # noqa: RUF012  None: the variable is gone
    step: int = 0  # optimizer steps so far


class Recording(NamedTuple):
    """What one rank has recorded."""

    events: list[Event]
    until: int  # ns: when its last line was still running, or had ended
    gap: str = ""  # what is missing, and what to do about it
    inside: str = ""  # the function that its last line has called


def make_folder(is_launched: bool) -> str:
    """Return the folder of the journals.  All ranks of a launcher know its name; rank 0 creates it."""
    if not is_launched:
        return tempfile.mkdtemp(prefix="replay-")
    run = " ".join(os.environ.get(name, "") for name in VARIABLES)
    folder = os.path.join(tempfile.gettempdir(), f"replay-{os.getuid()}-{zlib.crc32(run.encode()):08x}")
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        os.mkdir(folder, 0o700)
    return folder


def open_journal(folder: str, rank: int) -> TextIO | None:
    """Return a new journal, or None if there is no folder, as on another machine than rank 0's."""
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid == os.getuid():  # nobody else has planted it
            return open(f"{folder}/{rank}", "w", buffering=1)
    return None


def read_journals(folder: str, known: set[int]) -> list[Notes]:
    """Return what the ranks that are not known have recorded until they were killed."""
    found = []
    for file in Path(folder).iterdir():
        if int(file.name) not in known:
            # The last line is empty, or not complete.
            events = [Event(*json.loads(line)) for line in file.read_text().split("\n")[:-1]]
            for event in events:
                for name, value in event.changed.items():
                    event.changed[name] = value and Value(*value)._replace(numbers=tuple(value[3]))
            found.append(Notes(int(file.name), "lost", Recording(events, time.time_ns())))
    return found


@contextlib.contextmanager
def kept(folder: str, show: Callable[[list[Notes]], Any]) -> Any:
    """A block in which the folder exists, unless show() has removed it.

    If the block raises, or this process is killed, before the recording was shown, show([]) is
    called: here, or by the keeper.
    """
    parent = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        try:
            keep(parent, folder, show)
        finally:
            os._exit(0)
    try:
        yield
    except BaseException:
        if os.path.isdir(folder):
            show([])
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.waitpid(keeper, 0)


def keep(parent: int, folder: str, show: Callable[[list[Notes]], Any]) -> None:
    """Wait until the parent has removed the folder, or has ended without that: then show the recording."""
    os.setsid()  # torchrun kills rank 0's session
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM's signal for each process of a job
    while os.path.isdir(folder) and os.getppid() == parent:
        time.sleep(0.05)
    if os.path.isdir(folder):
        show([])
