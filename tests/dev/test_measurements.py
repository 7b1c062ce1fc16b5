"""What docs/results.md, docs/scaling.md, docs/timeline.md and variants/README.md say of the recordings of dev/."""

import contextlib
import copy
import io
import re

import pytest
import torch
from world import FEW_DIGITS, ROOT, forker

from dev.networks import Checkpointed, Wide
from mnist_ddp import ConvNet


def test_checkpointing_computes_the_same_gradients():
    """As recorded, and in the lines of the page.  The BatchNorm of the first segment sees each batch twice."""
    page = (ROOT / "variants/README.md").read_text(encoding="utf-8")
    lines = re.search(r"```python\n(from torch.utils.checkpoint .*?)```", page, re.DOTALL)[1]
    images = torch.rand(4, 1, 28, 28)
    plain, recorded = ConvNet(1, 28), Checkpointed(1, 28)
    recorded.load_state_dict(plain.state_dict())
    names = {"model": copy.deepcopy(plain), "inputs": images}
    exec(lines, names)
    for model, outputs in (plain, plain(images)), (recorded, recorded(images)), (names["model"], names["outputs"]):
        outputs.square().sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        seen = [int(layer.num_batches_tracked) for layer in (model[1], model[5])]
        assert seen == ([1, 1] if model is plain else [2, 1])


SCALING = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")


def plan(**numbers):
    """What docs/scaling.md computes; with numbers of one's own in place of the page's."""
    code = re.search(r"```python\n(.*?)```", SCALING, re.DOTALL)[1]
    names, printed = {}, io.StringIO()
    first, rest = code.split("\n", 1)
    with contextlib.redirect_stdout(printed):
        exec(first, names)
        names |= numbers
        exec(rest, names)
    return names, printed.getvalue()


def test_what_is_planned_is_what_was_recorded():
    """Four ranks, Adam; dev/results/adam.md is the recording."""
    assert plan()[1] == re.search(r"```text\n(.*?)```", SCALING, re.DOTALL)[1]
    kept = plan(parameters=sum(p.numel() for p in Wide(1, 28).parameters()), ranks=4)[0]["kept"]
    table = (ROOT / "dev/results/adam.md").read_text(encoding="utf-8")
    recorded = {}
    for line in re.findall(r"^\| `(.+)", table, re.MULTILINE):
        name, count, _, _, *sizes = line.replace("`", "").replace(",", "").replace(" ", "").split("|")
        recorded[name, count] = [1000 * float(size) for size in sizes[:4]]  # weights, state, gradients, buffers
    assert kept["one process"] == pytest.approx(sum(recorded["mnist_ddp", "1"]), rel=1e-3)
    assert kept["DDP"] == pytest.approx(sum(recorded["mnist_ddp", "4"]), rel=1e-3)
    assert kept["ZeRO-1"] == pytest.approx(sum(recorded["mnist_zero", "4"][:3]), rel=1e-3)  # the buffer is Gloo's
    weights, state, *_ = recorded["mnist_fsdp", "4"]
    assert kept["FSDP"] == pytest.approx(weights + state + weights, rel=1e-3)  # as large are the gradients


def test_the_least_times_of_a_message():
    """Gradients of 116 kB: the MNIST scripts'; the links' speeds stand in the table."""
    parameters = sum(p.numel() for p in ConvNet(1, 28).parameters())
    assert f"{parameters:,} parameters of 4 bytes" in SCALING and round(4 * parameters, -3) == 116_000
    rows = re.findall(r"([\d.]+) GB/s\S* \| ([\d.]+) µs \| ([\d.]+) s \|", SCALING)
    assert len(rows) == 3
    for link, small, large in rows:
        link = 1e9 * float(link)
        assert float(small) == pytest.approx(
            1e6 * plan(parameters=parameters, ranks=2, link=link)[0]["seconds"], rel=0.02
        )
        assert float(large) == pytest.approx(plan(parameters=1e9, ranks=8, link=link)[0]["seconds"], rel=0.03)
    assert plan(parameters=parameters, ranks=2, link=20e6 / 8)[0]["seconds"] == pytest.approx(0.046, rel=0.02)


@pytest.mark.slow
def test_the_causes_of_a_slow_step_are_named(tmp_path):
    done = forker().run("-m", "dev.timelines", "slow_loading", "slow_rank", cwd=tmp_path, path=[ROOT])
    assert done.code == 0, done.err
    loading, rank = ((tmp_path / f"timelines/slow_{name}.svg").read_text() for name in ("loading", "rank"))
    assert "<!-- why: each rank spends " in loading
    assert "<!-- why: rank 1 spends " in rank and " ms more in forward than the other ranks" in rank


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch 2.14 tells which tensors a message has")
def test_what_each_form_sends_and_keeps():
    """Four ranks and Adam, which has two numbers for each weight: ZeRO-1 shares these out, FSDP everything."""
    before = FEW_DIGITS.replace("150", "2000")
    done = forker().run("-m", "dev.timelines", "adam", before=before, timeout=280)
    assert done.code == 0, done.err
    rows = [line.strip("| \n").split("|") for line in done.out.splitlines() if line.startswith("| `")]
    cells = [[float(cell.replace(",", "")) for cell in row[3:]] for row in rows]
    assert all(row[-1] == pytest.approx(sum(row[1:-1]), abs=4) for row in cells)  # rounded
    n = 4e-3 * sum(p.numel() for p in Wide(1, 28).parameters())  # kB
    expected = [
        (0, n, 2 * n, n),  # one process: kB sent, weights, optimizer state, gradients
        (n, n, 2 * n, n),  # DDP
        (n + n / 4, n, 2 * n / 4, n + n / 4),  # ZeRO-1: all gradients out, a slice of the weights; a slice averaged
        (n + 2 * n / 4, n / 4, 2 * n / 4, None),  # FSDP: its weights for forward and for backward
    ]
    for row, form in zip(cells, expected, strict=True):
        assert all(want is None or has == pytest.approx(want, rel=0.01) for has, want in zip(row, form, strict=False))
    assert cells[3][-1] < cells[2][-1] < cells[1][-1]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch 2.14 tells which tensors a message has")
def test_what_the_ring_sends_and_keeps():
    """A batch of 40, two layers of width 64: the forms of docs/scaling.md, with what is received."""
    done = forker().run("-m", "dev.timelines", "attention", before=FEW_DIGITS, timeout=280)
    assert done.code == 0, done.err
    rows = [
        re.sub("[ ,]", "", row).replace("tokens", "").split("|")
        for row in re.findall(r"^\| (\d.*) \|$", done.out, re.M)
    ]
    sums, parameters = {}, {49: 104_960, 196: 113_600}
    for tokens, n, messages, kilobytes, *kept in ([int(cell) for cell in row] for row in rows):
        batch, width, layers = 40, 64, 2
        sums[tokens, n] = kept
        sent = layers * 2 * 4 * batch * tokens * width * ((n - 1) / n + 2) if n > 1 else 0
        assert messages == 30 + (2 + 2 * layers * (2 * n - 1) if n > 1 else 0), "gradients, logits, check, ring"
        assert kilobytes == pytest.approx((2 * sent + 4 * parameters[tokens]) / 1000, rel=0.02)
    for tokens in 49, 196:
        activations, temporary = ([sums[tokens, n][kind] for n in (1, 2, 4)] for kind in (4, 5))
        assert activations[0] > 1.3 * activations[1] > 1.3 * 1.3 * activations[2]
        assert temporary[0] > 3 * temporary[1] > 3 * 1.5 * temporary[2]
