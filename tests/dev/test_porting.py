"""Rows of the table in docs/porting.md: with its lines, three ranks compute what one process computes."""

import copy

import pytest
import torch
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.utils.data import DataLoader, Subset
from world import error_of, on_ranks

import distributed as dist

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def share(rows):
    return rows[dist.get_rank() :: dist.get_world_size()]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, inputs):
        return self.used(inputs)


@on_ranks(3)
def test_a_parameter_that_is_never_used():
    for is_frozen in False, True:
        net = Unused()
        net.unused.requires_grad_(not is_frozen)
        model = dist.prepare_ddp_model(net)
        model(share(INPUTS)).sum().backward()
        second = error_of(model, share(INPUTS))
        assert isinstance(second, torch.Tensor) == is_frozen, second
        assert is_frozen or "Expected to have finished reduction in the prior iteration" in second


@on_ranks(3)
def test_a_ratio_of_sums():
    """Dice's loss; with each rank's own ratio the gradient is another one."""
    torch.manual_seed(0)
    net, truth = nn.Linear(4, 3).double(), (INPUTS[:, :3] > 0.8).double()

    def loss_of(outputs, truth, total):
        sums = total(torch.stack([(outputs.sigmoid() * truth).sum(), outputs.sigmoid().sum() + truth.sum()]))
        return 1 - 2 * sums[0] / sums[1]

    loss_of(net(INPUTS), truth, lambda sums: sums).backward()
    for total, is_right in (differentiable.all_reduce, True), (lambda sums: sums, False):
        model = dist.prepare_ddp_model(copy.deepcopy(net))
        model.zero_grad()
        loss_of(model(share(INPUTS)), share(truth), total).backward()
        found = dist.unwrap_model(model).weight.grad
        assert torch.allclose(found, net.weight.grad, rtol=1e-9, atol=0) == is_right


@on_ranks(3)
def test_what_the_loop_draws():
    """Negatives: the ranks' generators differ, but a generator of its own gives all ranks one process's numbers."""
    torch.manual_seed(dist.get_rank())
    own, whole = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(2):
        expected = torch.randint(1000, (12,), generator=whole)
        torch.rand(dist.get_rank())  # other draws between
        mine = share(torch.randint(1000, (12,), generator=own))
        assert torch.stack(dist.gather(mine), 1).flatten().tolist() == expected.tolist()


@on_ranks(3)
def test_an_evaluation_without_the_last_batch():
    expected = [row for batch in DataLoader(range(23), 6, drop_last=True) for row in batch.tolist()]
    test_set = Subset(range(23), range(23 // 6 * 6))
    loader = DataLoader(test_set, 6, sampler=dist.data_sampler(test_set, shuffle=False, pad=False))
    assert sorted(torch.cat(dist.gather(torch.cat(list(loader)))).tolist()) == expected


@on_ranks(3)
def test_rows_that_stay_together():
    """The mean reciprocal rank of queries with 2 to 6 documents, of which the first is the right one."""
    scores = INPUTS.flatten()[:20].float()
    groups = list(scores.split([2, 3, 6, 5, 4]))

    def reciprocal(group):
        return 1 / (1 + (group > group[0]).sum())

    sums = torch.tensor([sum(map(reciprocal, share(groups))), len(share(groups))])
    total, count = dist.all_reduce(sums).tolist()
    assert total / count == pytest.approx(sum(map(reciprocal, groups)).item() / 5)
