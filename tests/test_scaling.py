"""scaling.py: the model in closed forms, its flags; docs/slow_link.py: a prediction beside a measured step."""

import importlib
import math
import shutil
import subprocess
import sys

import pytest
from forked import ROOT, forker

import scaling
from scaling import BACKWARD, BUCKET, MIB, MODELS, NETWORKS, Network

SLOW = Network("slow", bandwidth=1e6, latency=1e-3)
FREE = Network("free", bandwidth=math.inf, latency=0)


@pytest.mark.parametrize("network", [SLOW, SLOW._replace(tree=True)])
def test_one_gpu_sends_nothing(network):
    assert scaling.all_reduce_time(1e6, 1, network) == 0
    assert scaling.step_time(2.0, scaling.buckets(1e8), 1, network) == pytest.approx(2.0)
    assert not scaling.is_limit(1e-9, scaling.buckets(1e8), 1, network)


@pytest.mark.parametrize("gpus", [1, 2, 3, 1024])
def test_a_free_network_costs_nothing(gpus):
    assert scaling.step_time(2.0, scaling.buckets(1e8), gpus, FREE) == pytest.approx(2.0)


@pytest.mark.parametrize("gpus", [2, 3, 4, 1024])
def test_the_ring_by_its_messages(gpus):
    """N - 1 messages of a Nth to reduce, and as many to share the result; trees wait for their depth only."""
    messages = [1e6 / gpus / SLOW.bandwidth + SLOW.latency for _ in range(2 * (gpus - 1))]
    assert scaling.all_reduce_time(1e6, gpus, SLOW) == pytest.approx(sum(messages))
    tree = scaling.all_reduce_time(1e6, gpus, SLOW._replace(tree=True))
    saved = 2 * (gpus - 1) - 2 * math.ceil(math.log2(gpus))
    assert sum(messages) - tree == pytest.approx(saved * SLOW.latency)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (1000.0, [1000.0]),
        (1.0 * MIB, [MIB]),
        (26.0 * MIB, [MIB, BUCKET]),
        (30.0 * MIB, [MIB, BUCKET, 4 * MIB]),
        (4e9, [MIB, *[BUCKET] * 152, 4e9 - MIB - 152 * BUCKET]),
    ],
)
def test_buckets_add_up(gradient, expected):
    assert scaling.buckets(gradient) == expected
    assert sum(expected) == gradient


def test_one_bucket_is_never_hidden():
    expected = 2.0 + scaling.all_reduce_time(1e6, 4, SLOW)
    assert scaling.step_time(2.0, [1e6], 4, SLOW) == pytest.approx(expected)


def test_all_but_the_last_bucket_can_be_hidden():
    sizes = [10_000.0] * 10
    each = scaling.all_reduce_time(sizes[0], 2, SLOW)
    assert scaling.step_time(100.0, sizes, 2, SLOW) == pytest.approx(100 + each)
    # and the network is busy from the first bucket on, if it is slow
    expected = 0.01 * (1 - BACKWARD + BACKWARD / 10) + 10 * each
    assert scaling.step_time(0.01, sizes, 2, SLOW) == pytest.approx(expected)


@pytest.mark.parametrize("gpus", [2, 8, 1024])
def test_the_crossing_point(gpus):
    compute, sizes = 0.5, scaling.buckets(1e8)
    needed = scaling.bandwidth_needed(compute, sum(sizes), gpus)
    for factor, limit in (0.99, True), (1.01, False):
        assert scaling.is_limit(compute, sizes, gpus, Network("", factor * needed, 0)) is limit
    assert scaling.all_reduce_time(sum(sizes), gpus, Network("", needed, 0)) == pytest.approx(BACKWARD * compute)


def test_each_bucket_has_its_latencies():
    for sizes in ([1e6], [1e6] * 10):
        waiting = 2 * (5 - 1) * len(sizes)  # seconds, if nothing but the latency takes time
        network = Network("", math.inf, 1.0)
        assert scaling.is_limit(waiting / BACKWARD * 0.99, sizes, 5, network)
        assert not scaling.is_limit(waiting / BACKWARD * 1.01, sizes, 5, network)


def test_limit_from_is_the_first_number_of_gpus():
    sizes, network = scaling.buckets(1e8), NETWORKS[2]
    first = scaling.limit_from(0.03, sizes, network, most=1024)
    assert 2 < first < 1024
    assert scaling.is_limit(0.03, sizes, first, network) and not scaling.is_limit(0.03, sizes, first - 1, network)
    assert scaling.limit_from(0.03, sizes, network, most=first) == first
    assert scaling.limit_from(0.03, sizes, network, most=first - 1) == 0
    assert scaling.limit_from(0.03, sizes, network, most=1024, strong=True) < first


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_more_gpus_never_faster_more_bandwidth_never_slower(model):
    compute = scaling.compute_time(model.flop * model.batch, scaling.PEAK, model.utilisation)
    sizes = scaling.buckets(4 * model.parameters)
    assert compute <= scaling.step_time(compute, sizes, 2, NETWORKS[0])
    for network in NETWORKS:
        times = [scaling.step_time(compute, sizes, gpus, network) for gpus in range(1, 40)]
        assert times == sorted(times)
        faster = network._replace(bandwidth=2 * network.bandwidth)
        assert scaling.step_time(compute, sizes, 8, faster) <= scaling.step_time(compute, sizes, 8, network)


def test_the_convnet_is_the_one_of_the_scripts():
    import mnist_single

    model = mnist_single.ConvNet(1, 28)
    assert MODELS["convnet"].parameters == sum(parameter.numel() for parameter in model.parameters())
    multiply_adds = 28**2 * 16 * 25 + 14**2 * 32 * 16 * 25 + 10 * 32 * 7**2
    assert MODELS["convnet"].flop == pytest.approx(6 * multiply_adds, rel=0.01)


def test_resnet50_has_torchvisions_parameters():
    import torch
    from torchvision.models import resnet50

    with torch.device("meta"):
        assert MODELS["resnet50"].parameters == sum(parameter.numel() for parameter in resnet50().parameters())


def test_the_tables():
    done = forker().run("scaling.py", "--gpus", "2,16")
    assert done.code == 0 and not done.err
    assert [line.split(":")[0] for line in done.out.split("\n\n")[1:]] == [model.name for model in MODELS.values()]
    assert done.out.count("Ethernet") == 2 * len(MODELS) and "in 5 bucket(s)" in done.out


def test_your_own_model_and_network(capsys):
    """100 MB in one bucket of 1 MiB and one of the rest, 10 Gbit/s: by hand."""
    flags = "--gradient 100 --compute 1000 --bandwidth 10 --latency 1 --bucket 1000 --gpus 2"
    scaling.main(flags.split())
    sent = (100e6 - MIB) / (1.25e9 * scaling.PAYLOAD) + 2e-6
    assert f" {1 / (1 + sent):.0%} " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        "--gpus 1",
        "--gpus 2,x",
        "--gpus 2,,4",
        "--gpus 1000000",
        "--compute 0 --model 1b",
        "--compute nan --model 1b",
        "--compute 10",
        "--gradient 10",
        "--gradient 10 --compute 1 --model 1b",
        "--gradient -1 --compute 1",
        "--bandwidth inf",
        "--bandwidth 0",
        "--latency -1",
        "--bucket 0",
        "--utilisation 1.5",
        "--model vgg",
    ],
)
def test_bad_flags_are_one_line(flags, capsys):
    with pytest.raises(SystemExit) as end:
        scaling.main(flags.split())
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("scaling.py: error: ") and flags.split()[0].lstrip("-") in error


# ------------------------------------------------------------------------------------------------- what was measured


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    return importlib.import_module("studies")


@pytest.mark.parametrize("study", ["batch-size", "scaling", "limit", "slow-link"])
def test_the_tables_are_those_of_the_points(study, studies, tmp_path, monkeypatch):
    """The points are in results/*.csv; nobody has edited the tables."""
    points = sys.modules["points"]
    name = study.replace("-", "_")
    measured = points.read(name)
    assert measured, f"results/{name}.csv is missing"
    monkeypatch.setattr(points, "RESULTS", tmp_path)
    studies.STUDIES[study][1](measured)
    for table in tmp_path.glob("*.md"):
        shown = (ROOT / "results" / table.name).read_text(encoding="utf-8")
        assert shown == table.read_text(encoding="utf-8"), "run  python docs/studies.py draw"


def test_a_point_is_measured_once(studies, tmp_path, monkeypatch, capsys):
    points = sys.modules["points"]
    monkeypatch.setattr(points, "RESULTS", tmp_path)
    wanted = [{"n": n, "kind": "a,b"} for n in range(3)]
    for point in points.missing("x", wanted):
        if point["n"] == 2:
            break  # stopped here
        points.add("x", point | {"result": 10 * point["n"]})
    assert [row["result"] for row in points.read("x")] == ["0", "10"]
    assert list(points.missing("x", wanted)) == wanted[2:]
    assert "x: 3 of 3: 2, a,b" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_over_a_slow_link(ranks, studies):
    """7.4 MB over 50 Mbit/s take more than a second: so slow a link is the limit on a busy machine, too."""
    slow_link = sys.modules["slow_link"]
    if slow_link.problem():
        pytest.skip(slow_link.problem())
    (row,) = slow_link.measure("mlp", ranks, [50], seconds=1, repeats=1)
    assert row["measured"] == pytest.approx(row["predicted"], rel=0.2), row
    assert row["measured"] > 2 * row["unslowed"]


def test_slow_link_refuses_what_it_cannot_do(tmp_path):
    for flags in ["--ranks", "1"], ["--rates", "0"], ["--seconds", "nan"], ["--model", "none"]:
        done = forker().run("docs/slow_link.py", *flags, path=[ROOT])
        assert done.code == 2 and flags[0] in done.err.splitlines()[-1]
    done = forker().run("docs/slow_link.py", path=[ROOT], PATH=str(tmp_path))
    assert done.code == 2 and "apt-get install iproute2" in done.err.splitlines()[-1]


@pytest.mark.skipif(not shutil.which("ip"), reason="needs ip (iproute2)")
def test_no_interface_of_this_machine_was_changed():
    """After whatever has run before: the links live and end in namespaces of their own."""
    names = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
    assert "port0" not in names and "bridge" not in names.split()
