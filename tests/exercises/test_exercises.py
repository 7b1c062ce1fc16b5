"""exercises/: solutions pass; wrong solutions are refused, with the mistake's name; blanks, errors, hangs are lines."""

import pickle
import re
import shutil
import signal

import pytest
import torch
from world import ROOT, forker, refused, run

from exercises import check
from exercises.checks import NAMES

SOLUTIONS = ROOT / "exercises" / "solutions"
START = "START"  # stands for the first line of the function's body
SHARE = "[dist.get_rank() :: dist.get_world_size()]"
SUM_HERE = """for _ in range(dist.get_world_size() - 1):
        received = torch.empty_like(tensor)
        exchange({}, received)
        {}
        tensor += received
    return"""
SUM_AROUND = "mine = tensor.clone()\n    " + SUM_HERE.format("mine", "mine = received")
SECOND = "exchange(parts[(rank + 1 - step) % n], parts[(rank - step) % n])"
ADDED = """received = torch.empty_like(parts[({1}) % n])
        exchange(parts[({0}) % n], received)
        parts[({1}) % n].add_(received)"""
BACKWARDS = """sending = torch_dist.isend(tensor[:1].clone(), (dist.get_rank() - 1) % 3)
    torch_dist.recv(tensor[:1].clone(), (dist.get_rank() + 1) % 3)
    sending.wait()"""
AVERAGE = 'dist.all_reduce(p.grad, "mean")'
MICRO_MEAN = (" * len(y) / len(targets)", " / len(micro_batches)")
ALL_NO_SYNC = (" if number < len(micro_batches) else contextlib.nullcontext()", "")
HANG = """import signal, time
    while dist.is_primary() and os.path.exists(f"{path}.tmp"):
        signal.setitimer(signal.ITIMER_REAL, 0.01 if signal.alarm(0) else 0)  # the rest of the check's time passes by
        time.sleep(60)"""
SQUARES = "centred.square().sum(0)"
OWN_VARIANCE = "inputs.var(0, correction=0)"
TOLD = 'dist.reduce(told, "max")'
DIVIDED = "\n        output = output / denominator"
AVERAGED = """made = []
    for keys, values in parts:
        scores = q @ keys.mT * q.shape[-1] ** -0.5
        made.append((scores.softmax(1) @ values, scores.exp().sum(1, keepdim=True)))
    return sum(output for output, _ in made) / len(made), sum(total for _, total in made).log()
    maximum = q.new_full((len(q), 1), -torch.inf)"""
LARGEST = "torch.maximum(maximum, scores.amax(1, keepdim=True))"
UNDO = "result[chosen.argsort(stable=True)] = received"

# Words of the verdict, and pairs: a text of the stored solution, and what stands there instead.
WRONG = {
    "shard": [
        ("every rank has the whole dataset", SHARE, ""),
        ("no two numbers may differ by more", SHARE, "[-(-count // 3) * dist.get_rank() :][: -(-count // 3)]"),
        ("an order that differs between ranks", ", generator=torch.Generator().manual_seed(epoch)", ""),
        ("padding", "return order", "return order.repeat(2)[: -(-count // 3) * 3]"),
        ("count // world_size, which leave", "return order", "return order[: count // 3 * 3]"),
        ("it must depend on the epoch", "(epoch)", "(0)"),
        ("is not shuffled", "return order" + SHARE, "return ((torch.arange(count) + epoch) % count)" + SHARE),
        ("there is no example", "order[", "(order + 1)["),
        ("correct, but from a global generator: after torch.manual_seed", START, "torch.manual_seed(epoch)"),
    ],
    "ring_all_reduce": [
        ("the tensor is unchanged", START, "return"),
        ("each rank passes its sum on", START, SUM_HERE.format("tensor", "")),
        ("whole tensors go round", START, SUM_AROUND),
        ("only the first round", SECOND, "pass"),
        ("the second round adds", SECOND, ADDED.format("rank + 1 - step", "rank - step")),
        ("either the first round overwrites", ".add_(received)", ".copy_(received)"),
        ("the second round has a step too few", "(n - 1):  # the finished", "(n - 2):  # the finished"),
        ("use send and recv only", START, "return torch_dist.all_reduce(tensor)"),
        ("not in a ring", START, BACKWARDS),
    ],
    "global_mean": [
        ("each rank has the mean of its own numbers", START, "return numbers.mean()"),
        ("ranks with few numbers count too much", START, "return dist.reduce(numbers.mean())"),
        ("numbers is left out", START, "return torch.stack(dist.gather(numbers.mean())).nanmean()"),
        ("a sum where a mean was meant", "total / count", "total"),
        ("divided by this rank's count", "/ count", "/ len(numbers)"),
        ("this rank's count times the number of ranks", "/ count", "/ (len(numbers) * dist.get_world_size())"),
        ("it is computed in float32", "float64", "float32"),
    ],
    "gather_unequal": [
        ("the padding is still there", ": int(count)]", ":]"),
        ("rows that are zero are left out", ": int(count)]", "part.any(1)]"),
        ("this rank's own number of rows", ": int(count)]", ": len(rows)]"),
        ("each rank has its own rows only", START, "return rows"),
        ("own rows come first", "return", "for c in counts, parts: c.insert(0, c.pop(dist.get_rank()))\n    return"),
        ("int64 rows became torch.float64", "dtype=rows.dtype", "dtype=torch.float64"),
    ],
    "average_gradients": [
        ("each rank kept its own gradient", START, "return"),
        ("a sum where a mean was meant", ', "mean"', ""),
        ("the number of ranks twice", AVERAGE, AVERAGE + ".div_(dist.get_world_size())"),
        ("all ranks have rank 0's gradient", AVERAGE, "dist.sync_params(p.grad)"),
        ("only the first parameter's", AVERAGE, "return " + AVERAGE),
        ("the weights were averaged, not the gradients", "(p.grad", "(p.data"),
    ],
    "token_mean": [
        ("a mean of means", START, "return losses.mean()"),
        ("a sum where a mean was meant", START, "return losses.sum()"),
        ("multiply by the world size before", " * dist.get_world_size()", ""),
        ("by the world size instead of multiplied", "* dist", "/ dist"),
        ("this rank's own number of tokens", "/ count", "/ len(losses)"),
        ("no gradient flows through reduce", "losses.sum()", "dist.reduce(losses.sum())"),
        (
            "on a rank without tokens the result isn't connected",
            "return",
            "return torch.tensor(0.0) if not len(losses) else",
        ),
    ],
    "accumulate": [
        ("the parts' means are averaged, but the last part is smaller than the others", *MICRO_MEAN),
        ("each rank kept its own gradient, and the parts' means are averaged", *ALL_NO_SYNC, *MICRO_MEAN),
        ("a sum over the parts where a mean was meant", MICRO_MEAN[0], ""),
        ("chunk(6) of 10 examples returns only 5 parts", "number < len(micro_batches)", "number < parts"),
        ("gradient is left, and it is divided", "loss.backward()", "model.zero_grad(), loss.backward()"),
        ("4 all-reduces were made for 4 parts: 1 is enough", "no_sync() if", "contextlib.nullcontext() if"),
        ("10 of 10 examples are in one forward pass", START, "return F.mse_loss(model(inputs), targets).backward()"),
        ("two forward passes come before a backward", "loss =", "model(x)\n            loss ="),
    ],
    "global_batchnorm": [
        ("normalises by its own share", START, f"return (inputs - inputs.mean(0)) / ({OWN_VARIANCE} + eps).sqrt()"),
        ("the other ranks' part", "Total.apply(inputs", "dist.all_reduce(inputs", "Total.apply(c", "dist.all_reduce(c"),
        ("are constants for autograd", "inputs.sum(0)", "inputs.data.sum(0)", "centred.sq", "centred.data.sq"),
        ("the result isn't connected", START, "inputs = inputs.detach()"),
        ("around their own means", SQUARES, f"len(inputs) * {OWN_VARIANCE}"),
        ("the number of examples - 1", SQUARES, f"{SQUARES} * count / (count - 1)"),
        ("eps is outside of the root", "(variance + eps).sqrt()", "(variance.sqrt() + eps)"),
    ],
    "atomic_checkpoint": [
        ("rank 0 alone writes", "dist.is_primary()", "True", '.tmp"', '{dist.get_rank()}"'),
        # To wait a little is not enough: rank 0 is late, and this is what the check's own sleep is for.
        ("there is no file, when rank 1 returns", "dist.barrier()", "__import__('time').sleep(0.05)"),
        ("another file behind: last.pt.tmp", "os.replace", "__import__('shutil').copy"),
        ("neither the old state nor the new one", 'f"{path}.tmp"', "path", "os.replace(temporary, path)", "pass"),
        ("after a kill -9 the next save fails: FileExistsError", '"wb"', '"xb"'),
        ("after a kill -9 the next save hangs", START, HANG),
    ],
    "stop_together": [
        ("nobody stops", "signal.SIGTERM, note", "signal.SIGTERM, signal.SIG_IGN"),
        ("all stop one step late", "train_step(step)", f"late = {TOLD}; train_step(step)", f"if {TOLD}:", "if late:"),
        ("one to another rank is not", f"if {TOLD}", "if dist.gather(told)[0]"),
        ("the number of the last step", "step + 1", "step", "return steps", "return steps - 1"),
    ],
    "return_tokens": [
        ("by expert: undo the sort", UNDO, "result = received"),
        ("by expert, and the weights are left out", START, "weights = weights * 0 + 1", UNDO, "result = received"),
        ("the rows were sorted once more", UNDO, "result = received[chosen.argsort(stable=True)]"),
        ("the weights are left out", " * weights[:, None]", ""),
        ("each weight counts twice", "weights[:, None]", "weights[:, None] ** 2"),
        ("another token's", "= received", "= received * weights[:, None]", "result * weights[:, None]", "result"),
        ("which nobody has sent back", START, "return outputs"),
    ],
    "ring_attention": [
        ("both sums are never corrected", "(previous - maximum)", "(maximum - maximum)"),
        ("corrected, the output is not", "correction * output", "output"),
        ("corrected, the denominator is not", "correction * denominator", "denominator"),
        ("upside down", "(previous - maximum)", "(maximum - previous)"),
        ("of their own part", "(scores - maximum)", "(scores - scores.amax(1, keepdim=True))"),
        ("replaces a larger one before", LARGEST, "scores.amax(1, keepdim=True)"),
        ("exp overflows", LARGEST, "0 * maximum.nan_to_num()"),
        ("of the first part only", LARGEST, "torch.where(maximum.isinf(), scores.amax(1, keepdim=True), maximum)"),
        ("starts at 0, not at -inf", "-torch.inf", "0.0"),
        ("its own maximum", LARGEST, "scores.amax(1, keepdim=True)", "(previous - maximum)", "(maximum - maximum)"),
        ("of each part alone, averaged", "maximum = q.new_full((len(q), 1), -torch.inf)", AVERAGED),
        ("one maximum for all queries", "scores.amax(1, keepdim=True)", "scores.max()"),
        ("divide once, after", "+ weights @ values", f"+ weights @ values{DIVIDED}", " / denominator,", ","),
        ("not divided by the sum", "output / denominator", "output"),
        ("lacks the maximum", "maximum + denominator.log()", "denominator.log()"),
        ("q.shape[-1] ** -0.5", " * q.shape[-1] ** -0.5", ""),
        ("only this rank's own keys", "in parts", "in [next(parts)]"),
        ("memory has been overwritten", "in parts", "in list(parts)"),
    ],
}
RIGHT = [
    *[(name, "") for name in NAMES],
    ("shard", "", SHARE, ".tensor_split(dist.get_world_size())[dist.get_rank()]"),
    ("global_mean", "", START, "return torch.cat(dist.gather(numbers)).mean()"),
    ("token_mean", "", START, "return losses.sum() / dist.reduce(torch.tensor(len(losses)))"),
    ("average_gradients", "", AVERAGE, "dist.all_reduce(p.grad).div_(dist.get_world_size())"),
    ("atomic_checkpoint", "", "torch.save(state, file)", "torch.save(state, temporary)"),
    ("return_tokens", "", UNDO, "result = received[chosen.argsort(stable=True).argsort()]"),
]
CASES = [(name, *case) for name, cases in WRONG.items() for case in cases] + RIGHT


def changed(folder, name, *pairs):
    """A file with the stored solution, in which each pair's first text is replaced by the second."""
    source = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    head = re.search(rf"def {name}\(.*\n", source)[0]
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old == START or old in source, old
        source = source.replace(head, f"{head}    {new}\n") if old == START else source.replace(old, new)
    file = folder / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    return file


def _answer(name, file, folder):
    handler = signal.getsignal(signal.SIGTERM)
    answer = check.answer(name, file, folder)
    signal.signal(signal.SIGTERM, handler)
    return pickle.dumps(answer)


def verdict(n, name, file, folder):
    """What the check says of n processes: "" if all is right."""
    folder.mkdir()
    answers = [pickle.loads(answer) for answer in run(_answer, n, name, file, folder)]
    return check.judge(name, file, answers, folder)


# They need a group of torch's, or use pytest's SIGTERM.
ALWAYS_SEVERAL = ("ring_all_reduce", "gather_unequal", "stop_together", "return_tokens")


@pytest.mark.parametrize(("name", "words", "pairs"), [(n, w, pairs) for n, w, *pairs in CASES])
def test_a_wrong_solution_is_named_and_a_right_one_passes(tmp_path, name, words, pairs):
    file = changed(tmp_path, name, *pairs)
    texts = [verdict(3, name, file, tmp_path / "three")]
    if name not in ALWAYS_SEVERAL:
        texts.append(verdict(1, name, file, tmp_path / "one"))
        assert "rank" not in texts[1].partition("Likely mistake")[2], "with one process no rank is wrong"
    assert any(words in text for text in texts) and bool(words) == any(texts), texts


MARKS = """import pathlib, time
    here, rank = pathlib.Path("{}"), dist.get_rank()
    call = len([*here.glob(f"{{rank}}.*")])
    if call and any(not (here / f"{{other}}.{{call - 1}}").exists() for other in range(3)):
        return []
    time.sleep(0.1 if (call, rank) == (0, 0) else 0)
    (here / f"{{rank}}.{{call}}").touch()"""


def test_no_rank_makes_its_next_call_before_all_have_returned(tmp_path):
    """Else a rank that has left out a collective would join the others in it, by that of its next call."""
    (tmp_path / "marks").mkdir()
    file = changed(tmp_path, "shard", START, MARKS.format(tmp_path / "marks"))
    assert verdict(3, "shard", file, tmp_path / "three") == ""


def _wraps_in_ddp():
    with pytest.raises(RuntimeError, match="^DDP averages during backward, which has ended here"):
        check.module_of("average_gradients").run(torch.nn.parallel.DistributedDataParallel, "")


def test_ddp_is_no_answer_to_averaging_by_hand():
    run(_wraps_in_ddp, 2)


def summary_of(done):
    """The exercises of each line of the summary, which stands after an empty line."""
    lines = re.findall(r"^(\w+(?: \w+)?) +(\d+) of 12(?:  (.*))?$", done.out.rpartition("\n\n")[2], re.MULTILINE)
    groups = {title: names.split(", ") if names else [] for title, _, names in lines}
    assert [int(count) for _, count, _ in lines] == [len(names) for names in groups.values()] and len(groups) == 3
    return {title: names for title, names in groups.items() if names}


def test_the_summary_says_what_is_solved(tmp_path):
    """In a copy two exercises are solved, two are not right, and all others are the stored blanks."""
    solved, wrong = ["shard", "global_mean"], ["average_gradients", "token_mean"]
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises/checks").symlink_to(ROOT / "exercises/checks")
    for file in "__init__.py", "check.py":
        shutil.copy(ROOT / "exercises" / file, tmp_path / "exercises")
    blank = [name for name in NAMES if name not in solved + wrong]
    for name in NAMES:
        shutil.copy((ROOT / "exercises" if name in blank else SOLUTIONS) / f"{name}.py", tmp_path / "exercises")
    changed(tmp_path / "exercises", wrong[0], AVERAGE, "pass")  # WRONG
    changed(tmp_path / "exercises", wrong[1], START, "losses.none()")  # an ERROR
    done = forker().run("-m", "exercises.check", "all", cwd=tmp_path, path=[ROOT])
    assert (done.code, done.err) == (1, ""), done
    assert all(f"not implemented yet: write {name}() in exercises/{name}.py" in done.out for name in blank)
    assert summary_of(done) == {"solved": solved, "incorrect": wrong, "blank": blank}, done.out
    shutil.copy(SOLUTIONS / "return_tokens.py", tmp_path / "exercises")
    done = forker().run("-m", "exercises.check", "return_tokens", cwd=tmp_path, path=[ROOT])
    assert done.out.endswith("\npassed; 3 of 12 solved; next: ring_attention\n"), done
    changed(tmp_path / "exercises", "shard", START, "count += 0")  # solved before, and changed since
    done = forker().run("-m", "exercises.check", "return_tokens", cwd=tmp_path, path=[ROOT])
    assert done.out.endswith("\npassed; 2 of 12 solved; next: ring_attention\n"), done


def test_a_solution_passes_and_a_hint_is_given():
    done = forker().run("-m", "exercises.check", "1", "--solution")
    equal = "  1 process    equal\n  2 processes  equal\n  3 processes  equal\n"
    assert done == (0, f"shard (exercises/solutions/shard.py)\n{equal}passed; next: ring_all_reduce\n", "")
    done = forker().run("-m", "exercises.check", "shard", "--hint")
    assert done == (0, f"shard:{check.module_of('shard').HINT}\n", "")


def test_a_launcher_is_one_line():
    place = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    refused("exercises/check.py", "type python -m exercises.check", flags=["shard"], **place)


def examined(tmp_path, *new, n=3):
    """What examine(...) of a changed global_mean returns, in a program of its own: it uses SIGALRM, as pytest does."""
    file = changed(tmp_path, "global_mean", *new)
    program = tmp_path / "program.py"
    program.write_text(f"""
import pathlib, sys
from exercises import check
print(*check.examine("global_mean", pathlib.Path("{file}"), {n}, limit=90))
""")
    done = forker().run(program, path=[ROOT])
    assert done.code == 0, done.err
    return re.sub(r"\.py:\d+,", ".py,", done.out.replace(f"{tmp_path}/", ""))


def test_a_hang_is_an_answer_with_the_place_of_each_rank(tmp_path):
    """The last rank waits until all are in the function, and tells the check that its time is over."""
    body = f"""import os, pathlib, signal, time
    here = pathlib.Path("{tmp_path}", "here")
    here.mkdir(exist_ok=True)
    here.joinpath(str(dist.get_rank())).touch()
    while len(os.listdir(here)) < 3 and dist.get_rank() == 2:
        pass
    if dist.get_rank() == 2:
        os.kill(os.getppid(), signal.SIGALRM)
        time.sleep(3600)"""
    text = examined(tmp_path, START, body)
    assert text.startswith("HANGS after 90 s (on a busy machine, try again); where each rank is:\n")
    assert re.findall(r"rank (\d): global_mean.py, global_mean", text) == ["0", "1", "2"]


WAITS = "exercises/checks/common.py:112, wait_for_the_others"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ring_all_reduce", "rank 0: a.py:1, f, in send\nrank 1: a.py:1, f, in send", "nobody receives"),
        ("ring_all_reduce", "rank 0: a.py:1, f, in send\nrank 1: a.py:2, f, in recv", ""),
        ("stop_together", "rank 0: a.py:1, f, in reduce\nrank 1: exercises/checks/common.py:112, <genexpr>", "alone"),
        ("stop_together", "rank 0 of 1 failed first: killed by SIGTERM", "no function is set"),
        ("gather_unequal", "rank 0 of 2 failed first: killed by SIGABRT (by C or C++ code)", "needs the same shape"),
        ("shard", f"rank 0: a.py:1, f, in send\nrank 1: {WAITS}\n rank 2: {WAITS}", "rank 1 and rank 2 returned, and"),
        ("shard", f"rank 0: {WAITS}\nrank 1: {WAITS}", ""),
        ("return_tokens", "RuntimeError: Split sizes doesn't match total dim 0 size", "are swapped"),
        ("return_tokens", "Tensor's dim 0 does not divide equally across group size", "the counts are left out"),
        ("shard", "rank 0: a.py:1, f, in send\nrank 1: a.py:1, f, in send", ""),
    ],
)
def test_a_mistake_is_named_by_where_the_ranks_stand_or_their_error(name, text, words):
    assert words in check.named(name, text) and bool(words) == bool(check.named(name, text))


def test_an_error_is_a_few_lines(tmp_path):
    text = examined(tmp_path, START, "if dist.get_rank() == 1:\n        {}['shards']")
    assert text.startswith("ERROR rank 1 of 3 failed first:")
    assert "\n    global_mean.py, in global_mean:  {}['shards']\n    KeyError: 'shards'\n" in text
    assert len(text.splitlines()) <= 4
    assert "SyntaxError: '(' was never closed" in examined(tmp_path, "return", "return (", n=1)
