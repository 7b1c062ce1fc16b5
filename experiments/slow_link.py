"""A slowed network on one machine, for experiments/timelines.py.  Linux only, as root, with iproute2.

Each rank is a process in a network namespace of its own, with one Ethernet link to a bridge.  `tc ... tbf` lets only so
many Mbit/s leave each link.  Nothing of the machine's own network is touched.  The namespaces end with the processes.
"""

import ctypes
import os
import subprocess

LINK = "eth"  # the name of a rank's end of its link


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def enter_new_namespace() -> None:
    """From here on this process, and those that it starts, have a network of their own.  OSError if it may not."""
    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"needs root: {os.strerror(ctypes.get_errno())}")
    shell("ip link set lo up")


def make_bridge() -> None:
    """In a network of this process's own; the links of the ranks meet there."""
    enter_new_namespace()
    shell("ip link add bridge type bridge")
    shell("ip link set bridge up")


def link_to_bridge(rank: int, bridge: int) -> None:
    """bridge: the process in whose namespace the bridge is."""
    port = f"port{os.getpid()}"  # the kernel may need a moment to remove the links of ranks that have ended
    enter_new_namespace()
    shell(f"ip link add {LINK} type veth peer name {port} netns {bridge}")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {LINK}")
    shell(f"ip link set {LINK} up")
    shell(f"nsenter --target {bridge} --net ip link set {port} master bridge up")
    os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "MASTER_ADDR": "10.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # launch's can't be reached from here: rank 0 serves one


def set_rate(rate: float) -> None:
    """Let only `rate` Mbit/s leave this rank's link; 0: no limit.  The burst, a millisecond's bytes, goes unlimited."""
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], stderr=subprocess.DEVNULL)
    if rate:
        burst = max(3000, round(rate * 1e6 / 8 * 1e-3))  # bytes; with much less it doesn't reach its rate
        shell(f"tc qdisc add dev {LINK} root tbf rate {round(rate * 1000)}kbit burst {burst} latency 400ms")
