"""The right and the wrong ways to train with several processes, of which equivalence.py measures each.

Each way is a function of a few lines.  It trains the network of `Run` and returns the model (or an accuracy), which is
compared with that of a plain loop in one process.  The docstring says what happens; "wrong:" marks the mistake.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import BatchSampler

import distributed as dist
from variants import mnist_mesh, mnist_overlap, mnist_tensor_parallel

EXAMPLES, BATCH = 203, 48  # 203 = 4 * 48 + 11: an epoch's last batch is smaller, and can't be shared out equally
HIDDEN, LR = 16, 0.05
EVERY = 4  # steps of local SGD between two averages
MICRO_BATCHES = 4  # of a pipeline
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]  # inputs [N, 8], targets [N] int64


class Net(nn.Module):
    """Inputs [N, 8] -> logits [N, 4].  mask, [N, HIDDEN], multiplies the hidden layer: dropout."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, HIDDEN), norm(HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | float = 1.0) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))) * mask)


class Run:
    """What all ways share: data, initial weights, global batches.  `note` is for what a way has counted, as text."""

    def __init__(self, dtype: torch.dtype, steps: int) -> None:
        random = torch.Generator().manual_seed(0)
        inputs, noise = torch.randn(EXAMPLES, 8, generator=random), torch.randn(EXAMPLES, 4, generator=random)
        targets = (inputs @ torch.randn(8, 4, generator=random) + noise).argmax(1)
        self.device, self.dtype, self.steps, self.note = dist.get_device(), dtype, steps, ""
        self.inputs, self.targets = inputs.to(self.device, dtype), targets.to(self.device)
        self.seen = torch.zeros(EXAMPLES)  # how often this process has trained on each example
        self.mask = None

    def network(self, norm: type[nn.Module] = nn.Identity) -> nn.Module:
        torch.manual_seed(0)  # the same initial weights every time
        return Net(norm).to(self.device, self.dtype)

    def ddp_network(self, norm: type[nn.Module] = nn.Identity) -> nn.Module:
        return dist.prepare_ddp_model(self.network(norm))

    def deep_network(self, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
        """With a layer before the one whose channels are shared out; its layers can be those of several stages."""
        torch.manual_seed(0)
        hidden = [nn.Linear(HIDDEN, HIDDEN), norm(HIDDEN), nn.Tanh()]
        model = nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh(), *hidden, nn.Linear(HIDDEN, 4))
        return model.to(self.device, self.dtype)

    def batches(self, uneven: bool = False) -> Batches:
        """The global batches, for one process: a new order in each epoch.  uneven: with the last, smaller batch."""
        orders = (torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(n)) for n in itertools.count())
        batches = (batch for order in orders for batch in order.split(BATCH) if uneven or len(batch) == BATCH)
        return ((self.inputs[batch], self.targets[batch]) for batch in itertools.islice(batches, self.steps))

    def shares(self, uneven: bool = False, set_epoch: bool = True) -> Batches:
        """This process's shares of the same global batches, from a sampler, as in a training script."""
        sampler = dist.data_sampler(range(EXAMPLES), pad=False)
        loader = BatchSampler(sampler, BATCH // dist.get_world_size(), drop_last=not uneven)
        for step in range(self.steps):
            if step % len(loader) == 0:
                if set_epoch:
                    sampler.set_epoch(step // len(loader))
                epoch = iter(loader)
            share = next(epoch)
            self.seen[share] += 1
            yield self.inputs[share], self.targets[share]

    def draw_mask(self, rows: int) -> torch.Tensor:
        """[rows, HIDDEN]: 0 or 2 with probability 1/2, from torch's random numbers; the same in every precision."""
        self.mask = F.dropout(torch.ones(rows, HIDDEN, device=self.device), p=0.5)
        return self.mask.to(self.dtype)

    def dropout_loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs, self.draw_mask(len(inputs))), targets)


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets)


def sgd(model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, batches: Batches, loss: Callable = mean_loss, lr: float = LR) -> nn.Module:
    """The usual loop, for one process and for many."""
    optimizer = sgd(model, lr)
    for inputs, targets in batches:
        loss(model, inputs, targets).backward()
        update(optimizer)
    return model


# ------------------------------------------------------------------------- one process: what the ways are compared with


def one_process(run: Run) -> nn.Module:
    return train(run.network(), run.batches())


def one_process_uneven(run: Run) -> nn.Module:
    return train(run.network(), run.batches(uneven=True))


def one_process_batchnorm(run: Run) -> nn.Module:
    return train(run.network(nn.BatchNorm1d), run.batches())


def one_process_deep(run: Run) -> nn.Module:
    return train(run.deep_network(), run.batches())


def one_process_deep_without_norm(run: Run) -> nn.Module:
    return train(run.deep_network(nn.Identity), run.batches())


def one_process_micro_batches(run: Run) -> nn.Module:
    """BatchNorm sees a micro-batch, as in a pipeline."""
    model = run.deep_network()
    optimizer = sgd(model)
    for inputs, targets in run.batches():
        for part in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
            (mean_loss(model, *part) / MICRO_BATCHES).backward()
        update(optimizer)
    return model


def one_process_dropout(run: Run) -> nn.Module:
    model = run.network()
    torch.manual_seed(1)
    return train(model, run.batches(), run.dropout_loss)


@torch.no_grad()
def one_process_accuracy(run: Run) -> torch.Tensor:
    with torch.enable_grad():
        model = one_process(run)
    return (model(run.inputs).argmax(1) == run.targets).double().mean()


def one_process_many_models(run: Run) -> nn.Module:
    """Local SGD without processes: as many models in turns, averaged every EVERY steps.  Returns this rank's."""
    models = [run.network() for _ in range(dist.get_world_size())]
    optimizers = [sgd(model) for model in models]
    for step, (inputs, targets) in enumerate(run.batches(), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            share = slice(rank, None, len(models))  # as the sampler deals examples out
            mean_loss(model, inputs[share], targets[share]).backward()
            update(optimizer)
        if step % EVERY == 0:
            for params in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([param.detach() for param in params]).mean(0)
                for param in params:
                    param.detach().copy_(mean)
    return models[dist.get_rank()]


# ------------------------------------------------------------------------------------------------------ the right ways


def ddp(run: Run) -> nn.Module:
    """Equal shares; DDP averages their gradients."""
    return train(run.ddp_network(), run.shares())


def ddp_by_hand(run: Run) -> nn.Module:
    """An all-reduce for each gradient, instead of DDP."""
    model = run.network()
    dist.sync_params(model.parameters())  # all start from rank 0's weights
    optimizer = sgd(model)
    for inputs, targets in run.shares():
        mean_loss(model, inputs, targets).backward()
        for param in model.parameters():
            param.grad = dist.all_reduce(param.grad, "mean")
        update(optimizer)
    return model


def overlap_by_hand(run: Run) -> nn.Module:
    """As variants/mnist_overlap.py: the all-reduces run during backward; the step waits for them."""
    model = run.network()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(mnist_overlap.start_all_reduce)
    optimizer = sgd(model)
    for inputs, targets in run.shares():
        mean_loss(model, inputs, targets).backward()
        for param in model.parameters():
            param.work.wait()
        update(optimizer)
    return model


def zero_1(run: Run) -> nn.Module:
    """As variants/mnist_zero.py: a reduce-scatter of the gradients, a step of each rank's slice, an all-gather."""
    model = run.network()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    weights = F.pad(weights, (0, -len(weights) % dist.get_world_size()))
    gradients = torch.zeros_like(weights)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    nn.utils.vector_to_parameters(weights, model.parameters())
    nn.utils.vector_to_parameters(gradients, [param.grad for param in model.parameters()])
    slices = weights.chunk(dist.get_world_size())
    mine = slices[dist.get_rank()]
    mine.grad = torch.empty_like(mine)
    optimizer = torch.optim.SGD([mine], LR, momentum=0.9)
    reduce_scatter = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)
    for inputs, targets in run.shares():
        mean_loss(model, inputs, targets).backward()
        reduce_scatter(mine.grad, gradients.div_(dist.get_world_size()))
        optimizer.step()
        torch_dist.all_gather(list(slices), mine)
        gradients.zero_()
    return model


def train_locally(run: Run, every: int) -> nn.Module:
    """As variants/mnist_local_sgd.py: a model on each rank, and the average of their weights every few steps."""
    model = run.network()
    optimizer = sgd(model)
    for step, (inputs, targets) in enumerate(run.shares(), 1):
        mean_loss(model, inputs, targets).backward()
        update(optimizer)
        if step % every == 0:
            for param in model.parameters():
                dist.all_reduce(param, "mean")
    return model


def local_sgd_each_step(run: Run) -> nn.Module:
    """The average after each step. SGD, with momentum too, is linear: the mean of its steps is the step of the mean."""
    return train_locally(run, 1)


def local_sgd(run: Run) -> nn.Module:
    """The average every 4 steps: as one process that trains all models in turns."""
    return train_locally(run, EVERY)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager:
    """DDP's no_sync; nothing with one process, where the model is not DDP's."""
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def accumulation(run: Run) -> nn.Module:
    """Each share in two parts; gradients are exchanged once, in the second."""
    model = run.ddp_network()
    optimizer = sgd(model)
    for inputs, targets in run.shares():
        first, last = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        with no_sync(model):  # around forward and backward
            (mean_loss(model, *first) / 2).backward()
        (mean_loss(model, *last) / 2).backward()
        update(optimizer)
    return model


def fsdp(run: Run) -> nn.Module:
    """Each process keeps its part of every weight (`fully_shard`)."""
    if torch.__version__ < (2, 9):
        raise NotImplementedError("needs torch 2.9")
    mesh = torch_dist.init_device_mesh(run.device.type, (dist.get_world_size(),))
    return train(torch_fsdp.fully_shard(run.network(), mesh=mesh), run.shares())


def share_channels(model: nn.Sequential, rank: int, world_size: int) -> None:
    """As variants/mnist_tensor_parallel.py: keep this rank's share of the hidden layer's channels."""
    hidden, last = model[2], model[5]
    mine = torch.arange(HIDDEN).tensor_split(world_size)[rank]
    hidden.weight, hidden.bias = nn.Parameter(hidden.weight[mine]), nn.Parameter(hidden.bias[mine])
    model[3] = type(model[3])(len(mine)).to(hidden.weight)
    last.weight = nn.Parameter(last.weight[:, mine])
    last.bias = last.bias if rank == 0 else None  # added once


@torch.no_grad()
def put_together(model: nn.Sequential, whole: nn.Sequential, shares: int) -> nn.Sequential:
    """Copy the weights of the first ranks' shares to `whole`, and those that are not shared out from this rank."""
    whole[0].load_state_dict(model[0].state_dict())
    for param, mine in zip(whole[2:4].parameters(), model[2:4].parameters(), strict=True):  # a row for each channel
        param.copy_(torch.cat(dist.gather(mine)[:shares]))
    whole[5].weight.copy_(torch.cat(dist.gather(model[5].weight.T)[:shares]).T)  # a column for each
    if dist.get_rank() == 0:
        whole[5].bias.copy_(model[5].bias)
    dist.sync_params([whole[5].bias])
    return whole


def tensor_parallel(run: Run) -> nn.Module:
    """All ranks see the whole batch; each computes its share of a layer's channels."""
    model, world_size = run.deep_network(), dist.get_world_size()
    share_channels(model, dist.get_rank(), world_size)
    model[2].register_full_backward_hook(mnist_tensor_parallel.sum_input_gradients)
    model[5].register_forward_hook(mnist_tensor_parallel.sum_outputs)
    return put_together(train(model, run.batches()), run.deep_network(), world_size)


def mesh(run: Run) -> nn.Module:
    """As variants/mnist_mesh.py: the two ranks of a row share a layer's channels; DDP averages over the rows."""
    model, world_size = run.deep_network(nn.Identity), dist.get_world_size()
    columns = 1 if world_size % 2 else 2
    rows = world_size // columns
    grid = torch_dist.init_device_mesh(run.device.type, (rows, columns), mesh_dim_names=("data", "tensor"))
    row, column = grid.get_coordinate()
    share_channels(model, column, columns)
    model[2].group = model[5].group = grid.get_group("tensor")
    model[2].register_full_backward_hook(mnist_mesh.sum_input_gradients)
    model[5].register_forward_hook(mnist_mesh.sum_outputs)
    shares = ((inputs[row::rows], targets[row::rows]) for inputs, targets in run.batches())
    train(dist.prepare_ddp_model(model, process_group=grid.get_group("data")), shares)
    return put_together(model, run.deep_network(nn.Identity), columns)


def pipeline(run: Run) -> nn.Module:
    """Some of the layers on each process; micro-batches go from one to the next."""
    rank, stages, model = dist.get_rank(), dist.get_world_size(), run.deep_network()
    if torch.__version__ < (2, 8):
        raise NotImplementedError("needs torch 2.8")
    if stages > len(model):
        raise NotImplementedError(f"has {len(model)} layers")
    shares = torch.arange(len(model)).tensor_split(stages)
    parts = [model[share[0] : share[-1] + 1] for share in shares]
    stage = pipelining.PipelineStage(parts[rank], rank, stages, run.device)
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES, F.cross_entropy)
    optimizer = sgd(model)  # without a gradient it leaves the other stages' weights alone
    for inputs, targets in run.batches():
        first_inputs = [inputs] if rank == 0 else []
        schedule.step(*first_inputs, target=targets)
        update(optimizer)
    for number, part in enumerate(parts):
        for param in part.parameters():
            torch_dist.broadcast(param.data, number)
    return model


def uneven_weighted(run: Run) -> nn.Module:
    """Uneven shares: each process's sum of losses, divided by the number of examples of all processes."""

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = dist.all_reduce(torch.tensor(len(targets))).item()
        share = F.cross_entropy(model(inputs), targets, reduction="sum") / total
        return share * dist.get_world_size()  # because DDP divides by it

    return train(run.ddp_network(), run.shares(uneven=True), loss)


class Total(torch.autograd.Function):
    """The sum over all ranks, for autograd: each rank's input has a part in all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return dist.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return dist.all_reduce(gradient.clone())  # autograd may still need it


class GlobalBatchNorm(nn.BatchNorm1d):
    """What torch's SyncBatchNorm computes on GPUs, in training, here for shares of the same size."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs) * dist.get_world_size()
        centred = inputs - Total.apply(inputs.sum(0)) / count
        variance = Total.apply(centred.square().sum(0)) / count
        return centred / (variance + self.eps).sqrt() * self.weight + self.bias


def batchnorm_global(run: Run) -> nn.Module:
    """Mean and variance of the global batch."""
    return train(run.ddp_network(GlobalBatchNorm), run.shares())


def dropout_by_example(run: Run) -> nn.Module:
    """All ranks draw the masks of the global batch; each uses those of its own examples."""

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        masks = run.draw_mask(BATCH)[dist.get_rank() :: dist.get_world_size()]  # as the sampler deals examples out
        return F.cross_entropy(model(inputs, masks), targets)

    model = run.ddp_network()
    torch.manual_seed(1)  # the same on all ranks
    return train(model, run.shares(), loss)


@torch.no_grad()
def evaluate(run: Run, pad: bool) -> torch.Tensor:
    """The accuracy of DDP's model on all examples; each process evaluates its share."""
    with torch.enable_grad():
        model = ddp(run)
    share = list(dist.data_sampler(range(EXAMPLES), shuffle=False, pad=pad))
    right = (model(run.inputs[share]).argmax(1) == run.targets[share]).sum().item()
    correct, count = dist.all_reduce(torch.tensor([right, len(share)], dtype=torch.float64))
    run.note = f"{count:.0f} of {EXAMPLES} examples counted"
    return correct / count


def evaluation(run: Run) -> torch.Tensor:
    """Each example is counted once (`pad=False`)."""
    return evaluate(run, pad=False)


# ------------------------------------------------------------------------------------------------------ the wrong ways


def no_set_epoch(run: Run) -> nn.Module:
    """Every epoch has the same batches, and leaves out the same examples."""
    model = train(run.ddp_network(), run.shares(set_epoch=False))  # wrong: no sampler.set_epoch(epoch)
    run.note = f"{(dist.all_reduce(run.seen) == 0).sum()} of {EXAMPLES} examples never seen"
    return model


def uneven_mean_of_means(run: Run) -> nn.Module:
    """In an uneven last batch, examples of a smaller share weigh more."""
    return train(run.ddp_network(), run.shares(uneven=True))  # wrong: averages the means of 6 and of 5 examples


def batchnorm_of_each_share(run: Run) -> nn.Module:
    """DDP's default: each process normalises by the mean and variance of its own share."""
    return train(run.ddp_network(nn.BatchNorm1d), run.shares())  # wrong: BatchNorm sees its share only


def lr_times_processes(run: Run) -> nn.Module:
    """The same global batch has the same average gradient: there is nothing to scale."""
    return train(run.ddp_network(), run.shares(), lr=LR * dist.get_world_size())  # wrong: LR


def loss_divided_twice(run: Run) -> nn.Module:
    """DDP divides by the number of processes. Doing it again is a smaller learning rate."""

    def loss(*batch: Any) -> torch.Tensor:
        return mean_loss(*batch) / dist.get_world_size()  # wrong: DDP does that

    return train(run.ddp_network(), run.shares(), loss)


def no_sync_last_forward(run: Run) -> nn.Module:
    """The forward pass decides: no gradient is ever exchanged, and each rank trains a model of its own."""
    model = run.ddp_network()
    optimizer = sgd(model)
    for inputs, targets in run.shares():
        first, last = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        with no_sync(model):
            (mean_loss(model, *first) / 2).backward()
            loss = mean_loss(model, *last) / 2  # wrong: the last forward is inside, its backward outside
        loss.backward()
        update(optimizer)
    return model


def no_sync_backward_only(run: Run) -> nn.Module:
    """No error, but of no use: each part exchanges its gradients."""
    model, exchanged = run.ddp_network(), []

    def count(state: Any, bucket: torch_dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    if dist.get_world_size() > 1:
        model.register_comm_hook(None, count)
    optimizer = sgd(model)
    for inputs, targets in run.shares():
        first, last = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        loss = mean_loss(model, *first) / 2  # wrong: the forward is outside
        with no_sync(model):
            loss.backward()
        (mean_loss(model, *last) / 2).backward()
        update(optimizer)
    run.note = f"{len(exchanged)} all-reduces in {run.steps} steps"
    return model


def train_with_dropout(run: Run, seed: int) -> nn.Module:
    """Each rank draws the masks of its own examples; the seed is set after the model is made."""
    model = run.ddp_network()
    torch.manual_seed(seed)
    train(model, run.shares(), run.dropout_loss)
    masks = torch.cat(dist.gather(run.mask)).unique(dim=0)
    run.note = f"{len(masks)} different masks for {BATCH} examples"
    return model


def dropout_one_seed(run: Run) -> nn.Module:
    """All ranks draw the same masks: there are fewer different ones to average over."""
    return train_with_dropout(run, seed=1)  # wrong: the same on all ranks


def dropout_seed_per_rank(run: Run) -> nn.Module:
    """No error: other masks than those of one process, but as many."""
    return train_with_dropout(run, seed=1 + dist.get_rank())


def evaluation_padded(run: Run) -> torch.Tensor:
    """torch's DistributedSampler repeats examples until all shares are equal, and they are counted again."""
    return evaluate(run, pad=True)  # wrong: torch's default


# -------------------------------------------------------------------------------------------------------- all of them


class Way(NamedTuple):
    function: Callable[[Run], nn.Module | torch.Tensor]  # the model after all steps, or an accuracy
    must_be_equal: bool
    against: Callable[[Run], nn.Module | torch.Tensor] = one_process
    limit: float = 1  # times the usual one

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def sentence(self) -> str:
        return " ".join(self.function.__doc__.split())


WAYS = [
    Way(ddp, True),
    Way(ddp_by_hand, True),
    Way(overlap_by_hand, True),
    Way(zero_1, True),
    # The weights themselves are averaged, so each step rounds them once more, and they are larger than the gradients.
    Way(local_sgd_each_step, True, limit=10),
    Way(local_sgd, True, one_process_many_models, limit=10),
    Way(accumulation, True),
    Way(fsdp, True),
    Way(tensor_parallel, True, one_process_deep),
    Way(mesh, True, one_process_deep_without_norm),
    Way(pipeline, True, one_process_micro_batches),
    Way(uneven_weighted, True, one_process_uneven),
    Way(batchnorm_global, True, one_process_batchnorm),
    Way(dropout_by_example, True, one_process_dropout),
    Way(evaluation, True, one_process_accuracy),
    Way(uneven_mean_of_means, False, one_process_uneven),
    Way(batchnorm_of_each_share, False, one_process_batchnorm),
    Way(lr_times_processes, False),
    Way(loss_divided_twice, False),
    Way(no_set_epoch, False),
    Way(no_sync_last_forward, False),
    Way(no_sync_backward_only, False),
    Way(dropout_one_seed, False, one_process_dropout),
    Way(dropout_seed_per_rank, False, one_process_dropout),
    Way(evaluation_padded, False, one_process_accuracy),
]
