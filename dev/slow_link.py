"""A slowed network on one machine, for dev/timelines.py.  Linux only, as root, with iproute2.

Each of two ranks has its own network namespace, with a virtual Ethernet cable between them.  `tc ... tbf` limits the
Mbit/s that leave each end.  The machine's own network is not touched.  The namespaces end with the processes.
"""

import ctypes
import os
import subprocess


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def enter_new_namespace() -> None:
    """Give this process, and those that it starts later, their own network.  OSError without the right to do so."""
    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"needs root: {os.strerror(ctypes.get_errno())}")
    shell("ip link set lo up")


def make_cable() -> None:
    enter_new_namespace()
    shell("ip link add end0 type veth peer name end1")


def take_end(rank: int, owner: int, rate: float) -> None:
    """Connect this rank to the cable that the process `owner` has made; it can send `rate` Mbit/s."""
    enter_new_namespace()
    end = f"end{rank}"
    shell(f"nsenter --target {owner} --net ip link set {end} netns {os.getpid()}")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {end}")
    shell(f"ip link set {end} up")
    burst = round(rate * 125)  # the bytes of a millisecond are not limited; with much less tc doesn't reach the rate
    shell(f"tc qdisc add dev {end} root tbf rate {rate}mbit burst {burst} latency 400ms")
    os.environ |= {"GLOO_SOCKET_IFNAME": end, "MASTER_ADDR": "10.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # launch's can't be reached from here: rank 0 serves one
