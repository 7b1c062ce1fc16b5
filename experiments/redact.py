"""Takes out of a text what tells whose machine printed it, or where it stands.

It knows this machine's names, and the form that addresses, serial numbers and paths have.  It takes out rather too much
than too little: a version number of four parts looks like an address.
"""

import contextlib
import getpass
import ipaddress
import os
import platform
import re
import site
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

from experiments.measured import ROOT

# Names that many machines and users have: they tell nothing, and are words of the report.
COMMON = {"", "admin", "gpu", "linux", "local", "localhost", "nvidia", "root", "test", "torch", "ubuntu", "user"}
SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD")  # in the name of an environment variable
KEPT = r"(?!/(?:dev|proc)/|/etc/hosts\b)"  # paths that are the same everywhere
REST = r"[^\s'\"`|<>()\[\]]*"  # of a path or an address on the web
PUBLIC = r"(?:github\.com/pytorch|(?:docs\.)?pytorch\.org|docs\.pytest\.org)(?=/)"

FORMS = [  # (a pattern, what stands for it), in this order
    (r"\x1b\[[0-9;]*m", ""),  # a colour
    (rf"\b\w+://(?!{PUBLIC}){REST}", "URL"),
    (r"[\w.+-]+@[\w-]+\.[\w.-]+(?::\S+)?", "ADDRESS"),  # of mail, or of a repository
    (r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
    (r"\b(?:GPU|MIG)-[0-9a-f]{4,}\b", "UUID"),  # its beginning is enough for CUDA_VISIBLE_DEVICES
    (r"\b(?:[0-9a-f]{2}[:-]){5,}[0-9a-f]{2}\b", "ADDRESS"),  # of a network card
    (r"\b(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS"),
    (rf"\b[a-z]:\\\w{REST}|\\\\\w+\\{REST}", "PATH"),  # of Windows
    (rf"(?<![\w/])(?:\.\./)+{REST}", "PATH"),
    (rf"(?:(?<![\w.%~/:-])|(?<=-[IL])|\b[\w.-]+:(?=/\w))(?:~\w*)?{KEPT}/+(?=\w){REST}", "PATH"),
]


def without_names(text: str) -> str:
    """The text without names, addresses, serial numbers, paths outside of this project, and secrets."""
    for pattern, word in _names():
        text = _replace(pattern, word, text)
    text = re.sub(r"(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}", _ipv6, text, flags=re.IGNORECASE)
    for pattern, word in FORMS:
        text = _replace(f"(?i:{pattern})", word, text)
    return text


def _replace(pattern: str, word: str, text: str) -> str:
    """Leaves the comma or full stop that follows a path."""
    return re.sub(pattern, lambda m: word + m[0][len(m[0].rstrip(",.:;")) :], text)


def _names() -> list[tuple[str, str]]:
    """(a pattern of a name of this machine or its user, what stands for it), the longest name first."""
    found = {str(ROOT): (r"(?![\w-]|\.\w)", ".")}
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()):
        found[folder] = (r"(?![\w-]|\.\w)", os.path.basename(folder))  # python3.12, site-packages
    for folder in (str(Path.home()), tempfile.gettempdir(), sys.prefix):  # a name in it may have spaces
        found.setdefault(folder, (REST, "PATH"))
    found[platform.release()] = ("", ".".join(platform.release().split(".")[:2]))  # of a kernel that one can build
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 5:
            found[value] = ("", "SECRET")
    patterns = {re.escape(name): rest for name, rest in found.items() if name.strip("/.")}
    host, domain = socket.gethostname(), socket.getfqdn().partition(".")[2]
    if "." in domain:
        patterns[rf"[\w.-]+\.{re.escape(domain)}"] = ("", "HOST")
    with contextlib.suppress(Exception):  # a user without a name
        patterns |= _whole(getpass.getuser(), "USER")
    for name in (host, host.partition(".")[0]):
        patterns |= _whole(name, "HOST")
    return sorted(((name + rest, word) for name, (rest, word) in patterns.items()), key=lambda pair: -len(pair[0]))


def _whole(name: str, word: str) -> dict[str, tuple[str, str]]:
    """A name that is no part of a word.  Machines of a cluster differ in a number: node-17, node-[18-19]."""
    if name.lower() in COMMON:
        return {}
    name = re.escape(name)
    if word == "HOST":
        name = re.sub(r"\d+", r"(?:\\d+|\\[[\\d,-]+\\])", name)
    return {rf"(?<![^\W_]){name}": (r"(?![^\W_])", word)}


def _ipv6(m: re.Match) -> str:
    """An address, but not `::` in the name of a test, ::1, or a time of day."""
    try:
        address = ipaddress.IPv6Address(m[0])
    except ValueError:
        return m[0]
    return m[0] if address.is_loopback or len(re.findall(r"\w+", m[0])) < 3 else "ADDRESS"
