"""The sampler, and DDP models: N processes compute what one process computes, and what torch's own classes compute."""

import copy
import itertools
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler
from world import error_of, on_ranks, run_in_a_group_of_one

import distributed as dist


def samplers(monkeypatch, n, size, **options):
    """Those of n ranks, each on a machine of its own: a sampler asks for its place when it is made."""
    made = []
    for rank in range(n):
        for name, value in ("RANK", rank), ("WORLD_SIZE", n), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1):
            monkeypatch.setenv(name, str(value))
        made.append(dist.data_sampler(range(size), **options))
    return made


def draw(sampler, epoch=0, skip=0):
    sampler.set_epoch(epoch, skip=skip)
    mine = list(sampler)
    assert len(sampler) == len(mine) and all(type(index) is int for index in mine)
    return mine


AWKWARD = [(n, size) for n in range(1, 8) for size in sorted({n, n + 1, 2 * n - 1, 13, 100, 101})]


def test_without_padding_every_example_comes_exactly_once(monkeypatch):
    for n, size in AWKWARD:
        for shuffle in True, False:
            shares = [draw(s, 3) for s in samplers(monkeypatch, n, size, shuffle=shuffle, pad=False)]
            assert sorted(itertools.chain(*shares)) == list(range(size)), (n, size)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1 and min(map(len, shares)) >= 1
        assert shares == [list(range(rank, size, n)) for rank in range(n)]


def test_with_padding_it_is_torchs_distributed_sampler(monkeypatch):
    for (n, size), shuffle, drop_last in itertools.product([*AWKWARD, (5, 2), (7, 3)], (True, False), (True, False)):
        if drop_last and size < n:
            continue
        options = {"shuffle": shuffle, "seed": n, "drop_last": drop_last}
        ours = samplers(monkeypatch, n, size, **options)
        for epoch in 0, 2:
            for rank, sampler in enumerate(ours):
                share = draw(sampler, epoch)
                theirs = DistributedSampler(range(size), n, rank, **options)
                theirs.set_epoch(epoch)
                assert share == list(theirs) and len(share) == len(theirs), (n, size, options)


def test_the_order_depends_on_seed_and_epoch_alone_and_goes_on_in_the_middle(monkeypatch):
    order = torch.randperm(420, generator=torch.Generator().manual_seed(3 + 2)).tolist()  # torch's, of seed + epoch
    for n, pad in itertools.product(range(1, 8), (True, False)):
        ours = samplers(monkeypatch, n, 420, seed=3, pad=pad)
        shares = [draw(sampler, 2) for sampler in ours]
        assert list(itertools.chain(*zip(*shares, strict=True))) == order  # so are global batches, for any n
        for skip in 0, 1, 420 // n - 1, 420 // n, 420 // n + 5:
            assert [draw(sampler, 2, skip) for sampler in ours] == [share[skip:] for share in shares]
        with pytest.raises(ValueError, match="skip is -3: give a number of examples, 0 or more"):
            ours[0].set_epoch(2, skip=-3)
        assert [draw(sampler, 2) for sampler in ours] == shares  # the next epoch begins at its beginning
        assert draw(ours[0], 3) != shares[0]
    for sampler in samplers(monkeypatch, 3, 13, pad=False):  # unequal shares
        assert draw(sampler, 1, 2) == draw(sampler, 1)[2:]


def test_what_a_sampler_refuses(monkeypatch):
    for n, size in (2, 1), (7, 6), (3, 0):
        for options in {"pad": False}, {"drop_last": True}:
            with pytest.raises(ValueError, match=f"^{size} examples for {n} processes: each needs at least one"):
                samplers(monkeypatch, n, size, **options)
    with pytest.raises(ValueError, match="pad=False keeps every example, drop_last=True leaves some out: choose one"):
        samplers(monkeypatch, 3, 10, pad=False, drop_last=True)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    for wrong in RandomSampler(range(4)), WeightedRandomSampler([1.0, 2.0], 2), Stream():
        with pytest.raises(TypeError, match=f"needs a dataset, not a {type(wrong).__name__}: give each rank x") as end:
            dist.data_sampler(wrong)
    advice = re.search(r"x\[.*]", str(end.value))[0]  # followed by three ranks: equal shares, and nothing twice
    shares = [eval(advice, {"x": list(range(11)), "world_size": 3, "rank": rank}) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3] and len(set(sum(shares, []))) == 9


def test_not_distributed_every_rank_has_the_whole_data_set(monkeypatch):
    alone = dist.data_sampler(range(7))
    assert isinstance(alone, DistributedSampler) and sorted(draw(alone)) == list(range(7))
    for sampler in samplers(monkeypatch, 9, 7, distributed=False):
        assert draw(sampler) == draw(alone)


@pytest.mark.parametrize("workers", [0, 1])
@on_ranks(3)
def test_a_forgotten_set_epoch_is_one_warning_on_rank_0(workers):
    sampler = dist.data_sampler(range(50))
    loader = DataLoader(range(50), 5, sampler=sampler, num_workers=workers)
    for epoch in range(5):
        if epoch == 3:
            sampler.set_epoch(4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                pass
        said = [w for w in caught if "call sampler.set_epoch(epoch) before each epoch" in str(w.message)]
        assert len(said) == (epoch in (1, 4) and dist.is_primary())
    peeked = dist.data_sampler(range(50))
    in_order = dist.data_sampler(range(50), shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(in_order) == list(in_order)  # no order to forget
        assert next(iter(peeked)) == next(iter(peeked))  # a look is no epoch


def batchnorm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model):
    """Three steps, with other data on each rank; returns the losses and the weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def equal(tensors, others):
    return all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


@on_ranks(1, 3)
def test_the_model_is_torchs_ddp_or_itself():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = batchnorm()
    before = copy.deepcopy(net.state_dict())
    model = dist.prepare_ddp_model(net, device_ids=[rank])  # as those write it who have GPUs
    assert (model is net) if n == 1 else (type(model) is DistributedDataParallel and model.module is net)
    assert dist.unwrap_model(model) is net
    assert all(equal(dist.gather(weight), [weight] * n) for weight in net.state_dict().values())
    assert rank or equal(net.state_dict().values(), before.values())  # rank 0's
    assert all(param.device == dist.get_device() for param in net.parameters())
    assert n == 1 or error_of(dist.prepare_ddp_model, net, no_such_option=1).startswith("TypeError: ")
    assert n == 1 or "SyncBatchNorm" in error_of(dist.prepare_ddp_model, net, sync_bn=True)  # torch: on GPUs only


@on_ranks(1, 3)
def test_buffers_can_be_sent_once_per_evaluation():
    """sync_buffers=False: the same training of a model with BatchNorm, and each rank keeps its own averages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ends = []
    for sync_buffers in True, False:
        torch.manual_seed(0)
        net = batchnorm()
        net[1].running_mean.fill_(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of an option's old name
            model = dist.prepare_ddp_model(net, sync_buffers=sync_buffers)
        assert not net[1].running_mean.any()  # all start with rank 0's
        *_, batches = net.buffers()
        batches.fill_(10 * rank)
        losses_and_weights = train(model)
        assert batches.item() == 3 + (0 if sync_buffers else 10 * rank)
        if not sync_buffers:
            assert len({tuple(part.tolist()) for part in dist.gather(net[1].running_mean)}) == n
            dist.sync_params(model.buffers())
        else:
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 4))  # sends them
        assert batches.item() == 3
        ends.append([*losses_and_weights, *net.buffers()])
        assert all(equal(dist.gather(buffer), [buffer] * n) for buffer in net.buffers())
    assert equal(*ends)


def unwrapped():
    net = nn.Linear(1, 1)
    model = DistributedDataParallel(net)
    compiled = torch.compile(net, backend="eager")
    wrapped = [net, nn.DataParallel(net), model, compiled]
    wrapped += [DistributedDataParallel(compiled), torch.compile(model, backend="eager"), nn.DataParallel(compiled)]
    assert all(dist.unwrap_model(outer) is net for outer in wrapped)
    endless = mock.MagicMock()  # has every attribute, and each has every attribute
    assert dist.unwrap_model(endless) is endless


def test_unwrap_model_finds_the_model_in_any_wrapper():
    run_in_a_group_of_one(unwrapped)
