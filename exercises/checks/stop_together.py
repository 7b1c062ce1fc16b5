"""Send real SIGTERMs, each to one rank in one step, and count the steps of all ranks."""

import os
import signal

import torch

import distributed as dist
from exercises.checks import common

HINT = """
The function for SIGTERM only sets a flag.  After each step the ranks agree: the maximum of all flags, by dist.reduce
or dist.all_reduce, is the same on all ranks.  A rank must not decide by its own flag.
"""
SIGNS = {  # where the ranks are, or the error
    r"checks/common\.py:": "a rank has stopped alone, and another waits for it: all must decide by the same number",
    r"killed by SIGTERM": "no function is set for SIGTERM: call signal.signal(signal.SIGTERM, function)",
    r"sys\.exit\(.*was called": "the process ends itself; the function for SIGTERM should only set a flag",
}
STEPS = 6
NEVER = -1
WAITS_ITSELF = True  # after each call


def cases(n):
    """Return the cases: (which rank gets SIGTERM, in which step)."""
    return [(0, NEVER), (n - 1, 2), (0, 0), (n // 2, STEPS - 1), (0, NEVER)]


def name_of(number, rank, step):
    return f"{number}. " + ("no signal" if step == NEVER else f"SIGTERM to rank {rank} in step {step}")


def run(function, folder):
    answer = {}
    for number, (told, when) in enumerate(cases(dist.get_world_size()), 1):
        made = []

        def train_step(step):
            if step == when and dist.get_rank() == told:  # noqa: B023  this step's
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(torch.ones(7))  # a collective, as in a training step
            made.append(step)  # noqa: B023

        returned = function(STEPS, train_step)
        name = name_of(number, told, when)
        answer[f"steps made, {name}"] = torch.tensor(len(made) if made == list(range(len(made))) else NEVER)
        answer[f"number of steps returned, {name}"] = common.as_answer(returned)
        common.wait_for_the_others(folder, f"case{number}")  # a rank that has stopped alone must not continue
    return answer


def steps_of(n, made):
    """Return all ranks' answers if they make `made(told, when)` steps."""
    answer = {}
    for number, (told, when) in enumerate(cases(n), 1):
        steps = torch.tensor(STEPS if when == NEVER else min(made(told, when), STEPS))
        answer[f"steps made, {name_of(number, told, when)}"] = steps
        answer[f"number of steps returned, {name_of(number, told, when)}"] = steps
    return [answer] * n


def judge(answers):
    n = len(answers)
    wrong = {
        "nobody stops": steps_of(n, lambda told, when: STEPS),
        "all stop one step late": steps_of(n, lambda told, when: when + 2),
        "a signal to rank 0 is noticed, one to another rank is not": steps_of(
            n, lambda told, when: STEPS if told else when + 1
        ),
        "the number of the last step instead of the number of steps": [
            {part: value - 1 if "returned" in part else value for part, value in answer.items()}
            for answer in steps_of(n, lambda told, when: when + 1)
        ],
    }
    return common.compare(answers, steps_of(n, lambda told, when: when + 1), wrong)
