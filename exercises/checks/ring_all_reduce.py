"""Check the sum, the messages (send and recv, to the next rank only), and how many numbers they have."""

import torch

import distributed as dist
from exercises.checks import common

HINT = """
Two rounds of n - 1 steps.  In the first, each rank sends a part, receives a part, and adds it to its own: in step s,
rank r sends part r - s and receives part r - s - 1 (all modulo n).  After it, rank r has the whole sum of part r + 1.
In the second round, the finished parts go round, and overwrite: in step s, rank r sends part r + 1 - s.
tensor.tensor_split(n) returns n views, some of them empty for a small tensor.  If all ranks call send first, all wait
for a recv, so start with isend, then recv, and then wait for what isend has returned.
"""
SIGNS = {  # where the ranks are
    r"\A(.*, in send\n?)+\Z": "all ranks are in send, and nobody receives: start with isend",
    r"\A(.*, in recv\n?)+\Z": "all ranks are in recv, and nobody sends: start with isend",
}
SIZES = (12, 10, 2)  # 2 is less than 3 processes


def tensor_of(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size), dtype=torch.float64)


def run(function, folder):
    answer = {}
    for size in SIZES:
        tensor = tensor_of(dist.get_rank(), size)
        with common.Messages() as messages:
            function(tensor)
        answer[f"{size} elements"] = tensor
        answer["messages"] = [*answer.get("messages", []), messages.sent]
    return answer


def judge(answers):
    messages = [answer.pop("messages") for answer in answers]
    n = len(answers)
    tensors = {f"{size} elements": [tensor_of(rank, size) for rank in range(n)] for size in SIZES}
    total = {part: sum(values) for part, values in tensors.items()}
    wrong = {
        "the tensor is unchanged, but the result must be written into it": ways(tensors, n, lambda parts, r: parts[r]),
        "each rank passes its sum on, so that some tensors are counted several times": passed_on(tensors, n),
        "only the first round: each rank has the whole sum of one part": around(tensors, n, steps=(n - 1, 0)),
        "the second round adds, but it must overwrite": around(tensors, n, adds=(True, True)),
        "either the first round overwrites, or the second one begins with part r, whose sum is not finished": around(
            tensors, n, begins=(0, 0)
        ),
        "the second round begins with part r - 1, whose sum is not finished": around(tensors, n, begins=(0, -1)),
        "either the first round has a step too few, or it adds nothing": around(tensors, n, steps=(n - 2, n - 1)),
        "the second round has a step too few": around(tensors, n, steps=(n - 1, n - 2)),
        "a mean where the sum was meant": ways(tensors, n, lambda parts, r: sum(parts) / n),
    }
    return common.compare(answers, [total] * n, wrong) or any_problem(messages, n)


def ways(tensors, n, function):
    return [{part: function(values, rank) for part, values in tensors.items()} for rank in range(n)]


def passed_on(tensors, n):
    for _ in range(n - 1):
        tensors = {part: [values[rank] + values[rank - 1] for rank in range(n)] for part, values in tensors.items()}
    return ways(tensors, n, lambda values, rank: values[rank])


def around(tensors, n, begins=(0, 1), adds=(True, False), steps=None):
    """Return all ranks' answers after two rounds: where rank r begins (r + begin), whether it adds, and the steps."""
    result = [{} for _ in range(n)]
    for name, values in tensors.items():
        pieces = [[piece.clone() for piece in value.tensor_split(n)] for value in values]
        for begin, is_sum, count in zip(begins, adds, steps or (n - 1, n - 1), strict=True):
            for step in range(count):
                go_round(pieces, begin - step, is_sum)
        for rank in range(n):
            result[rank][name] = torch.cat(pieces[rank])
    return result


def go_round(pieces, offset, is_sum):
    """Each rank r sends part r + offset to the next rank, which adds it to its own part, or overwrites that."""
    n = len(pieces)
    sent = [pieces[rank][(rank + offset) % n].clone() for rank in range(n)]
    for rank in range(n):
        before = (rank - 1) % n
        part = (before + offset) % n
        pieces[rank][part] = pieces[rank][part] + sent[before] if is_sum else sent[before]


def any_problem(messages, n):
    for rank, calls in enumerate(messages):
        for size, sent in zip(SIZES, calls, strict=True):
            other = {kind for kind, *_ in sent} - {"send", "recv", "recv_any_source"}
            if other and n > 1:
                return f"the sum is correct, but it uses {', '.join(sorted(other))}: use send and recv only"
            elsewhere = {to for kind, _, to in sent if kind == "send"} - {(rank + 1) % n}
            if elsewhere:
                return f"the sum is correct, but rank {rank} sends to rank {elsewhere.pop()}: not in a ring"
            numbers = sum(elements for kind, elements, _ in sent if kind == "send")
            most = 2 * (n - 1) * -(-size // n)  # parts of size / n, rounded up
            if numbers > most:
                text = f"the sum is correct, but rank {rank} sends {numbers} numbers for a tensor of {size}, {most} are"
                return f"{text} enough: it looks as if whole tensors go round, instead of parts"
    return ""
