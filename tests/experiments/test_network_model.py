"""network_model.py: the model in closed forms, and its flags."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from world import forker

import mnist_ddp
from experiments import network_model
from experiments.network_model import BACKWARD, BUCKET, MIB, MODELS, NETWORKS, Network

SLOW = Network("slow", bandwidth=1e6, latency=1e-3)
FREE = Network("free", bandwidth=math.inf, latency=0)


@pytest.mark.parametrize("network", [SLOW, SLOW._replace(tree=True)])
def test_one_gpu_sends_nothing(network):
    assert network_model.all_reduce_time(1e6, 1, network) == 0
    assert network_model.step_time(2.0, network_model.buckets(1e8), 1, network) == pytest.approx(2.0)
    assert not network_model.is_limit(1e-9, network_model.buckets(1e8), 1, network)


@pytest.mark.parametrize("gpus", [1, 2, 3, 1024])
def test_a_free_network_costs_nothing(gpus):
    assert network_model.step_time(2.0, network_model.buckets(1e8), gpus, FREE) == pytest.approx(2.0)


@pytest.mark.parametrize("gpus", [2, 3, 4, 1024])
def test_the_ring_by_its_messages(gpus):
    """N - 1 messages of a Nth to reduce, and as many to share the result; trees wait for their depth only."""
    messages = [1e6 / gpus / SLOW.bandwidth + SLOW.latency for _ in range(2 * (gpus - 1))]
    assert network_model.all_reduce_time(1e6, gpus, SLOW) == pytest.approx(sum(messages))
    tree = network_model.all_reduce_time(1e6, gpus, SLOW._replace(tree=True))
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
    assert network_model.buckets(gradient) == expected
    assert sum(expected) == gradient


def test_one_bucket_is_never_hidden():
    expected = 2.0 + network_model.all_reduce_time(1e6, 4, SLOW)
    assert network_model.step_time(2.0, [1e6], 4, SLOW) == pytest.approx(expected)


def test_all_but_the_last_bucket_can_be_hidden():
    sizes = [10_000.0] * 10
    each = network_model.all_reduce_time(sizes[0], 2, SLOW)
    assert network_model.step_time(100.0, sizes, 2, SLOW) == pytest.approx(100 + each)
    # and the network is busy from the first bucket on, if it is slow
    expected = 0.01 * (1 - BACKWARD + BACKWARD / 10) + 10 * each
    assert network_model.step_time(0.01, sizes, 2, SLOW) == pytest.approx(expected)


@pytest.mark.parametrize("gpus", [2, 8, 1024])
def test_the_crossing_point(gpus):
    compute, sizes = 0.5, network_model.buckets(1e8)
    needed = network_model.bandwidth_needed(compute, sum(sizes), gpus)
    for factor, limit in (0.99, True), (1.01, False):
        assert network_model.is_limit(compute, sizes, gpus, Network("", factor * needed, 0)) is limit
    assert network_model.all_reduce_time(sum(sizes), gpus, Network("", needed, 0)) == pytest.approx(BACKWARD * compute)


def test_each_bucket_has_its_latencies():
    for sizes in ([1e6], [1e6] * 10):
        waiting = 2 * (5 - 1) * len(sizes)  # seconds, if nothing but the latency takes time
        network = Network("", math.inf, 1.0)
        assert network_model.is_limit(waiting / BACKWARD * 0.99, sizes, 5, network)
        assert not network_model.is_limit(waiting / BACKWARD * 1.01, sizes, 5, network)


def test_limit_from_is_the_first_number_of_gpus():
    sizes, network = network_model.buckets(1e8), NETWORKS[2]
    first = network_model.limit_from(0.03, sizes, network, most=1024)
    assert 2 < first < 1024
    assert network_model.is_limit(0.03, sizes, first, network) and not network_model.is_limit(
        0.03, sizes, first - 1, network
    )
    assert network_model.limit_from(0.03, sizes, network, most=first) == first
    assert network_model.limit_from(0.03, sizes, network, most=first - 1) == 0
    assert network_model.limit_from(0.03, sizes, network, most=1024, strong=True) < first


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_more_gpus_never_faster_more_bandwidth_never_slower(model):
    compute = network_model.compute_time(model.flop * model.batch, network_model.PEAK, model.utilisation)
    sizes = network_model.buckets(4 * model.parameters)
    assert compute <= network_model.step_time(compute, sizes, 2, NETWORKS[0])
    for network in NETWORKS:
        times = [network_model.step_time(compute, sizes, gpus, network) for gpus in range(1, 40)]
        assert times == sorted(times)
        faster = network._replace(bandwidth=2 * network.bandwidth)
        assert network_model.step_time(compute, sizes, 8, faster) <= network_model.step_time(compute, sizes, 8, network)


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


class Count(TorchDispatchMode):
    """Of the operations that compute something: neither views nor bookkeeping."""

    NOTHING = ("detach", "t", "view", "_unsafe_view", "empty", "_record_function_enter_new", "_record_function_exit")
    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += function.overloadpacket.__name__ not in self.NOTHING
        return function(*args, **(kwargs or {}))


def test_a_step_of_the_convnet_is_about_thirty_operations():
    """docs/scaling.md: why eight GPUs are no faster."""
    model = mnist_ddp.ConvNet(1, 28)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)  # as on a GPU
    for _ in range(2):  # the second has the optimizer's state
        with Count() as count:
            F.cross_entropy(model(torch.zeros(25, 1, 28, 28)), torch.zeros(25, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 25 <= count.operations <= 40, count.operations


def test_eight_gpus_that_share_a_small_batch_are_no_faster_than_one():
    one = network_model.compute_time(MODELS["convnet"].flop * 200, network_model.PEAK, 0.2)
    assert one == network_model.compute_of_each(one, 8, True) == network_model.HOST
    large = 100 * network_model.HOST
    assert network_model.compute_of_each(large, 8, True) == large / 8
    assert network_model.compute_of_each(large, 8, False) == large


def efficiency(name, network, gpus, bucket=network_model.BUCKET):
    model = MODELS[name]
    compute = network_model.compute_time(model.flop * model.batch, network_model.PEAK, model.utilisation)
    sizes = network_model.buckets(4 * model.parameters, bucket)
    return compute / network_model.step_time(compute, sizes, gpus, network)


def test_what_the_page_says_of_the_tables():
    """docs/scaling.md: larger buckets, the ConvNet's latencies, the gigabytes of the transformer."""
    for network in NETWORKS[2:]:
        larger = [
            efficiency("resnet50", network, n, 100 * MIB) / efficiency("resnet50", network, n) for n in (256, 1024)
        ]
        assert larger[0] < 1 < larger[1]
    model = MODELS["convnet"]
    backward = network_model.BACKWARD * network_model.compute_time(
        model.flop * model.batch, network_model.PEAK, model.utilisation
    )
    assert 2 * 255 * min(network.latency for network in NETWORKS) > backward
    assert 2 * 7 / 8 * 4 * MODELS["1b"].parameters == 7e9
    two = efficiency("resnet50", NETWORKS[0], 2)
    assert 2 * two == pytest.approx(0.5, abs=0.05)  # "two GPUs together are half as fast as one"


def test_the_tables():
    done = forker().run("-m", "experiments.network_model", "--gpus", "2,16")
    assert done.code == 0 and not done.err
    assert [line.split(":")[0] for line in done.out.split("\n\n")[1:]] == [model.name for model in MODELS.values()]
    assert done.out.count("Ethernet") == 2 * len(MODELS) and "in 5 bucket(s)" in done.out


def test_your_own_model_and_network(capsys):
    """100 MB in one bucket of 1 MiB and one of the rest, 10 Gbit/s: by hand."""
    flags = "--gradient 100 --compute 1000 --bandwidth 10 --latency 1 --bucket 1000 --gpus 2"
    network_model.main(flags.split())
    sent = (100e6 - MIB) / (1.25e9 * network_model.PAYLOAD) + 2e-6
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
        "--model vgg",
    ],
)
def test_bad_flags_are_one_line(flags, capsys):
    with pytest.raises(SystemExit) as end:
        network_model.main(flags.split())
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("network_model.py: error: ") and flags.split()[0].lstrip("-") in error
