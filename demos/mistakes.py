"""The programs of docs/mistakes.md: each mistake and its correction, in two processes.

python -m demos.mistakes                     # list the mistakes
python -m demos.mistakes set_epoch wrong     # run a mistake; "right" runs its correction
"""

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

import distributed as dist

numbers = list(range(6))
answers = torch.tensor([1, 1, 1, 1, 0])  # of a model, for five test images; 1 is correct, so four of five are
images = list(range(1200))
weights = [9.0 if image % 10 == 0 else 1.0 for image in images]  # every tenth image is of a rare class
texts = torch.tensor([[0, 0, 0, 0, 1, 2], [2, 2, -100, -100, -100, -100]])  # words are 0, 1, 2; -100 is padding
text = torch.tensor([0, 1, 0, 1, 2, 0, 2, 0])  # one long text; each of two ranks has one half
loss = torch.tensor(0.5)
model = nn.Linear(2, 1)


class TwoHeads(nn.Module):
    """A model with two heads that uses only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


class Unigram(nn.Module):
    """A language model that only learns how frequent each word is."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.logits[:, None].expand(len(words), 3, words.shape[1])


class Bigram(nn.Module):
    """A language model that only learns which word follows which: words -> logits of the next word, [..., 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.logits[words]


def make_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Make a forward pass, a backward pass and an optimizer step on this rank's own batch; return this rank's loss."""
    inputs = torch.tensor([[1.0, dist.get_rank()]])
    loss = (model(inputs) - 1).square().mean()
    make_step(optimizer, loss)
    return loss.detach()


def zero_model() -> nn.Module:
    """Return a model whose weights start at 0, so that its losses are the same on all machines."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def print_difference(model: nn.Module) -> None:
    weights = torch.stack(dist.gather(nn.utils.parameters_to_vector(model.parameters())))
    difference = (weights.amax(0) - weights.amin(0)).max()
    dist.print_primary(f"largest difference between the ranks' weights: {difference:.2f}")


def route() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained router (expert 0 for tokens of even ranks, 1 for those of odd ranks), and its optimizer."""
    router = nn.Linear(2, 2, bias=False)
    nn.init.eye_(router.weight)
    router = dist.prepare_ddp_model(router)
    return router, torch.optim.SGD(router.parameters(), lr=0.05)


def my_tokens() -> torch.Tensor:
    """Return this rank's tokens, [4, 2]; those of even ranks differ from those of odd ranks."""
    return 2 * F.one_hot(torch.full((4,), dist.get_rank() % 2), 2).float()


def print_certainty(router: nn.Module) -> None:
    certainty = router(my_tokens()).softmax(1)[0, dist.get_rank() % 2]
    dist.print_primary(f"probability of the right expert: {certainty:.0%}")


def train(loader: DataLoader, target: float) -> torch.Tensor:
    """Train for an epoch on images; return the images of all ranks: [rank, image]."""
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = []
    for batch in loader:
        inputs = batch[:, None] / torch.tensor([1200.0, 2400.0])
        make_step(optimizer, (model(inputs) - target).square().mean())
        batches.append(batch)
    return torch.stack(dist.gather(torch.cat(batches)))


def train_epoch(loader: DataLoader) -> None:
    """Train for an epoch; print the size of the global batch, and how many different images it contains."""
    last = train(loader, target=0)[:, -loader.batch_size :]
    different = len(last.unique())
    dist.print_primary(f"{len(loader)} steps of {last.numel()} images, {different} of them different")


def my_text() -> Iterator[torch.Tensor]:
    """Return an iterator over this rank's text, 40 times."""
    loader = DataLoader(texts, batch_size=1, sampler=dist.data_sampler(texts, shuffle=False))
    return itertools.chain.from_iterable(itertools.repeat(loader, 40))


def print_frequency(model: nn.Module) -> None:
    frequency = dist.unwrap_model(model).logits.softmax(0)[2]
    dist.print_primary(f"the model has learnt: {frequency:.1%} of the words are word 2")


def train_bigram(words: torch.Tensor, targets: torch.Tensor) -> None:
    """Train on this rank's words; the loss is the mean over the words of all ranks."""
    model = dist.prepare_ddp_model(Bigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=2)
    count = dist.all_reduce(torch.tensor(len(words)))
    for _ in range(400):
        total = F.cross_entropy(model(words), targets, reduction="sum")
        make_step(optimizer, total * dist.get_world_size() / count)
    after_1 = model(torch.tensor(1)).softmax(0)
    dist.print_primary(f"the model has learnt: word 2 follows word 1 in {after_1[2]:.0%} of the cases")


def print_overlap(train_set: Subset, test_set: Subset) -> None:
    """Train on train_set; print how many images of test_set were used in training by any rank."""
    trained = train(DataLoader(train_set, batch_size=10, sampler=dist.data_sampler(train_set)), target=1)
    mine = [test_set[index] for index in dist.data_sampler(test_set, pad=False)]
    tested = torch.cat(dist.gather(torch.tensor(mine)))
    count = torch.isin(tested, trained).sum()
    dist.print_primary(f"{count} of {len(tested)} test images were trained on")


def print_rare(sampler: Sampler | list[int]) -> None:
    """Train for an epoch; print how many of the images are rare."""
    trained = train(DataLoader(images, batch_size=10, sampler=sampler), target=1)
    share = (trained % 10 == 0).float().mean()
    dist.print_primary(f"{trained.numel()} images, {share:.0%} of them rare")


class Stream(IterableDataset):
    """A dataset that can only be read from its beginning, by the function `read`."""

    def __init__(self, read: Callable[[], Iterator[int]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[int]:
        return self.read()


def print_stream(read: Callable[[], Iterator[int]]) -> None:
    """Print the examples that all ranks together read, each with two DataLoader workers."""
    mine = torch.tensor(list(DataLoader(Stream(read), batch_size=None, num_workers=2)))
    dist.print_primary(f"examples of an epoch: {torch.cat(dist.gather(mine)).sort().values.tolist()}")


def no_ddp_wrong() -> None:
    model = zero_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(model, optimizer)  # on this rank's own batch, and the gradients are not averaged
    print_difference(model)


def no_ddp_right() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(model, optimizer)
    print_difference(model)


def after_wrapping_wrong() -> None:
    model = zero_model()
    model.weight.requires_grad_(False)
    ddp_model = dist.prepare_ddp_model(model)  # DDP registers the parameters that are trained: only the bias
    model.weight.requires_grad_(True)  # its gradients are not averaged
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(ddp_model, optimizer)
    print_difference(model)


def after_wrapping_right() -> None:
    model = zero_model()
    model.weight.requires_grad_(False)
    ddp_model = dist.prepare_ddp_model(model)
    model.weight.requires_grad_(True)
    ddp_model = dist.prepare_ddp_model(model)  # wrap the model again, after the change
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(ddp_model, optimizer)
    print_difference(model)


def no_sampler_wrong() -> None:
    torch.manual_seed(0)
    train_epoch(DataLoader(images, batch_size=10, shuffle=True))  # all images, in the same order on each rank


def no_sampler_right() -> None:
    torch.manual_seed(0)
    train_epoch(DataLoader(images, batch_size=10, sampler=dist.data_sampler(images)))


def set_epoch_wrong() -> None:
    sampler = dist.data_sampler(numbers)
    for epoch in range(3):
        dist.print_primary(f"epoch {epoch}: rank 0 trains on {list(sampler)}")


def set_epoch_right() -> None:
    sampler = dist.data_sampler(numbers)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        dist.print_primary(f"epoch {epoch}: rank 0 trains on {list(sampler)}")


def weighted_wrong() -> None:
    sampler = WeightedRandomSampler(weights, len(images))
    print_rare(DistributedSampler(sampler))  # uses only its length


def weighted_right() -> None:
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    indices = list(WeightedRandomSampler(weights, len(images), generator=generator))
    print_rare(indices[dist.get_rank() :: dist.get_world_size()])


def every_rank_wrong() -> None:
    print(f"epoch 1  loss {loss:.2f}")
    torch.save(model.state_dict(), "model.pt")  # two processes write the same file at the same time


def every_rank_right() -> None:
    dist.print_primary(f"epoch 1  loss {loss:.2f}")
    if dist.is_primary():
        torch.save(model.state_dict(), "model.pt")


def collective_wrong() -> None:
    if dist.is_primary():
        mean = dist.reduce(loss)  # rank 0 waits here for the others, which never call it
        print(f"loss {mean:.2f}")
    time.sleep(60)  # the others are in the next epoch


def collective_right() -> None:
    mean = dist.reduce(loss)  # all ranks call it
    dist.print_primary(f"loss {mean:.2f}")


def random_split_wrong() -> None:
    train, test = random_split(images, [1000, 200])  # each rank draws a different split
    print_overlap(train, test)


def random_split_right() -> None:
    train, test = random_split(images, [1000, 200], torch.Generator().manual_seed(0))
    print_overlap(train, test)


def padding_wrong() -> None:
    sampler = DistributedSampler(answers, shuffle=False)  # repeats an example, so that all ranks have the same number
    mine = answers[list(sampler)]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%} ({correct}/{count})")


def padding_right() -> None:
    sampler = dist.data_sampler(answers, shuffle=False, pad=False)  # each example exactly once
    mine = answers[list(sampler)]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%} ({correct}/{count})")


def mean_of_means_wrong() -> None:
    mine = answers[dist.get_rank() :: 2]  # three answers on rank 0, two on rank 1
    accuracy = dist.reduce(mine.float().mean())
    dist.print_primary(f"accuracy {accuracy:.1%}")


def mean_of_means_right() -> None:
    mine = answers[dist.get_rank() :: 2]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%}")


def token_mean_wrong() -> None:
    model = dist.prepare_ddp_model(Unigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=2)
    for words in my_text():  # six words on rank 0, two on rank 1
        loss = F.cross_entropy(model(words), words)  # the mean over this rank's words
        make_step(optimizer, loss)
    print_frequency(model)


def token_mean_right() -> None:
    model = dist.prepare_ddp_model(Unigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=2)
    for words in my_text():
        total = F.cross_entropy(model(words), words, reduction="sum")
        count = dist.all_reduce((words != -100).sum())  # the number of words on all ranks
        loss = total * dist.get_world_size() / count  # DDP divides by the world size
        make_step(optimizer, loss)
    print_frequency(model)


def border_wrong() -> None:
    mine = text.tensor_split(dist.get_world_size())[dist.get_rank()]
    train_bigram(mine[:-1], mine[1:])  # what follows this rank's last word is on the next rank


def border_right() -> None:
    words, targets = text[:-1], text[1:]  # first make the targets,
    ranks, rank = dist.get_world_size(), dist.get_rank()
    train_bigram(words.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank])  # then divide


def balance_wrong() -> None:
    router, optimizer = route()
    for _ in range(40):
        probabilities = router(my_tokens()).softmax(1)
        chosen = probabilities.argmax(1).bincount(minlength=2)  # by this rank's tokens only
        loss = 2 * (chosen / chosen.sum() * probabilities.mean(0)).sum()
        make_step(optimizer, loss)
    print_certainty(router)


def balance_right() -> None:
    router, optimizer = route()
    for _ in range(40):
        probabilities = router(my_tokens()).softmax(1)
        chosen = dist.all_reduce(probabilities.argmax(1).bincount(minlength=2))  # by all ranks' tokens
        loss = 2 * (chosen / chosen.sum() * probabilities.mean(0)).sum()  # DDP averages the probabilities
        make_step(optimizer, loss)
    print_certainty(router)


def batch_size_wrong() -> None:
    loader = DataLoader(images, batch_size=200, sampler=dist.data_sampler(images))
    dist.print_primary(f"{len(loader)} steps of {dist.get_world_size() * loader.batch_size} images")


def batch_size_right() -> None:
    loader = DataLoader(images, batch_size=200 // dist.get_world_size(), sampler=dist.data_sampler(images))
    dist.print_primary(f"{len(loader)} steps of {dist.get_world_size() * loader.batch_size} images")


def unused_wrong() -> None:
    model = dist.prepare_ddp_model(TwoHeads())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def unused_right() -> None:
    model = TwoHeads()
    model.unused.requires_grad_(False)
    model = dist.prepare_ddp_model(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    dist.print_primary("two steps, no error")


def early_stop_wrong() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for step in range(40):
        loss = train_step(model, optimizer)  # of this rank only
        scheduler.step(loss)
        if optimizer.param_groups[0]["lr"] < 1e-3:
            dist.print_primary(f"all ranks stop at step {step}")
            break
    dist.barrier()  # the other rank is still training


def early_stop_right() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for step in range(40):
        loss = dist.reduce(train_step(model, optimizer))  # the mean over all ranks, so it is the same on each
        scheduler.step(loss)
        if optimizer.param_groups[0]["lr"] < 1e-3:
            dist.print_primary(f"all ranks stop at step {step}")
            break
    dist.barrier()


def iterable_wrong() -> Iterator[int]:
    return iter(numbers)


def iterable_right() -> Iterator[int]:
    worker = get_worker_info()  # this process is a DataLoader worker of its rank
    first = dist.get_rank() * worker.num_workers + worker.id
    return itertools.islice(numbers, first, None, dist.get_world_size() * worker.num_workers)


def rank_0_works_wrong() -> None:
    if dist.is_primary():
        time.sleep(6)  # for example, it downloads or evaluates
    dist.barrier()  # the others wait here, but a collective waits at most for DIST_TIMEOUT
    dist.print_primary("all ranks continue")


def rank_0_works_right() -> None:
    patient = torch_dist.new_group(backend="gloo", timeout=timedelta(hours=1))  # all ranks call it, once
    if dist.is_primary():
        time.sleep(6)
    torch_dist.barrier(patient)
    dist.print_primary("all ranks continue")


class Mistake(NamedTuple):
    """What is wrong and what follows from it, in a line; the program with the mistake; the corrected program."""

    line: str
    wrong: Callable
    right: Callable


MISTAKES = {
    "no_ddp": Mistake(
        "the model is not wrapped in DDP, so each rank trains its own model",
        no_ddp_wrong,
        no_ddp_right,
    ),
    "after_wrapping": Mistake(
        "a layer is unfrozen after the model was wrapped in DDP, so its gradients are not averaged",
        after_wrapping_wrong,
        after_wrapping_right,
    ),
    "no_sampler": Mistake(
        "the DataLoader has no sampler, so every rank trains on every example",
        no_sampler_wrong,
        no_sampler_right,
    ),
    "set_epoch": Mistake(
        "set_epoch is not called, so the order is the same in every epoch",
        set_epoch_wrong,
        set_epoch_right,
    ),
    "weighted": Mistake(
        "a DistributedSampler wraps a WeightedRandomSampler, so the weights have no effect",
        weighted_wrong,
        weighted_right,
    ),
    "every_rank": Mistake(
        "every rank prints and saves, so each line is repeated, and two processes write one file",
        every_rank_wrong,
        every_rank_right,
    ),
    "collective": Mistake(
        "a collective is inside `if is_primary()`, so rank 0 waits for ranks that never call it",
        collective_wrong,
        collective_right,
    ),
    "random_split": Mistake(
        "random_split has no seed, so ranks train on each other's test examples",
        random_split_wrong,
        random_split_right,
    ),
    "padding": Mistake(
        "the evaluation pads the data, so an example is counted twice",
        padding_wrong,
        padding_right,
    ),
    "mean_of_means": Mistake(
        "the ranks' accuracies are averaged, so each example counts more on a rank with fewer examples",
        mean_of_means_wrong,
        mean_of_means_right,
    ),
    "token_mean": Mistake(
        "the ranks' losses are averaged, so each token counts more on a rank with fewer tokens",
        token_mean_wrong,
        token_mean_right,
    ),
    "border": Mistake(
        "a text is split before its targets are made, so no rank learns what follows across a border",
        border_wrong,
        border_right,
    ),
    "balance": Mistake(
        "the balance loss counts only one rank's tokens, so the router forgets which expert is right",
        balance_wrong,
        balance_right,
    ),
    "batch_size": Mistake(
        "the batch size is per process, so the global batch is twice as large",
        batch_size_wrong,
        batch_size_right,
    ),
    "unused": Mistake(
        "a parameter gets no gradient, so the second step ends in an error",
        unused_wrong,
        unused_right,
    ),
    "early_stop": Mistake(
        "one rank stops early, so the other waits for it until the timeout",
        early_stop_wrong,
        early_stop_right,
    ),
    "iterable": Mistake(
        "an IterableDataset is not divided, so each DataLoader worker reads the whole stream",
        functools.partial(print_stream, iterable_wrong),
        functools.partial(print_stream, iterable_right),
    ),
    "rank_0_works": Mistake(
        "rank 0 works for a long time, so the other waits for it until the timeout",
        rank_0_works_wrong,
        rank_0_works_right,
    ),
}


def worker(local_rank: int, world_size: int, function: Callable, folder: str) -> None:
    os.chdir(folder)  # which is removed with what is saved in it
    dist.init_process_group(backend="gloo")
    torch.manual_seed(dist.get_rank())  # different random numbers on each rank, but the same in each run
    function()
    dist.cleanup()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=[*MISTAKES], metavar="NAME", help="a mistake; default: list them")
    parser.add_argument("way", nargs="?", choices=["wrong", "right"], metavar="WAY", help="wrong, or right (corrected)")
    args = parser.parse_args()
    if args.name and not args.way:
        parser.error(f"wrong or right is missing: type python -m demos.mistakes {args.name} wrong")
    return args


def list_mistakes() -> None:
    for name, mistake in MISTAKES.items():
        print(f"{name:<15} {mistake.line}")
    print("\nTo run one: python -m demos.mistakes no_ddp wrong")
    print("For collective, early_stop and rank_0_works, put DIST_TIMEOUT=3 in front, so the timeout is 3 s, not 600 s.")


def main() -> None:
    args = parse_args()
    if not args.name:
        return list_mistakes()
    with tempfile.TemporaryDirectory() as folder:
        dist.launch(worker, getattr(MISTAKES[args.name], args.way), folder, nproc=2)


if __name__ == "__main__":
    main()
