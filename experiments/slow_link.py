"""A slowed network on one machine, for experiments/timelines.py.  Linux only, as root, with iproute2.

Two ranks are processes in network namespaces of their own, with an Ethernet cable between them.  `tc ... tbf` lets only
so many Mbit/s leave each end.  Nothing of the machine's own network is touched.  The namespaces end with the processes.
"""

import ctypes
import os
import subprocess


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def enter_new_namespace() -> None:
    """From here on this process, and those that it starts, have a network of their own.  OSError if it may not."""
    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"needs root: {os.strerror(ctypes.get_errno())}")
    shell("ip link set lo up")


def make_cable() -> None:
    enter_new_namespace()
    shell("ip link add end0 type veth peer name end1")


def take_end(rank: int, owner: int, rate: float) -> None:
    """owner: the process that has made the cable.  `rate` Mbit/s may leave this rank."""
    enter_new_namespace()
    end = f"end{rank}"
    shell(f"nsenter --target {owner} --net ip link set {end} netns {os.getpid()}")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {end}")
    shell(f"ip link set {end} up")
    burst = round(rate * 125)  # a millisecond's bytes, which go unlimited; with much less it doesn't reach the rate
    shell(f"tc qdisc add dev {end} root tbf rate {rate}mbit burst {burst} latency 400ms")
    os.environ |= {"GLOO_SOCKET_IFNAME": end, "MASTER_ADDR": "10.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # launch's can't be reached from here: rank 0 serves one
