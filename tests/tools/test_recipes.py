"""The short pieces of code of docs/troubleshooting.md and docs/api.md do what is said of them, on three ranks."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from test_variables import srun_command
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from world import ROOT, free_port, run, shell

import distributed as dist

SECTIONS = [
    section
    for page in ("troubleshooting", "api")
    for section in re.split(r"^## ", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
]
# {heading: code}, without the whole programs: test_docs.py starts those
CODE = {
    section.partition("\n")[0]: code
    for section in SECTIONS
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    if "launch(" not in code
}


def after(heading, **names):
    """The names that are defined when the section's code has run."""
    names |= {"dist": dist, "torch": torch, "os": os}
    exec(CODE[heading], names)
    return names


def mapped(heading, folder):
    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    if dist.is_primary():
        torch.save(torch.arange(30), "images.pt")
    dist.barrier()
    loader = after(heading, DataLoader=DataLoader, batch_size=5)["loader"]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "images.pt" in maps.read_text()
    return sorted(torch.cat(dist.gather(torch.cat(list(loader)))).tolist()) == list(range(30))


def metric(heading, folder):
    import torchmetrics

    number = dist.get_rank() + 1
    mean = after(heading, torchmetrics=torchmetrics, results=[(float(number), number)])["mean"]
    return mean.item() == pytest.approx((1 + 4 + 9) / (1 + 2 + 3))


class CheckpointedTwice(nn.Linear):
    def forward(self, inputs):
        for _ in range(2):
            inputs = checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)
        return inputs


def static_graph(heading, folder):
    torch.manual_seed(0)
    model, inputs = CheckpointedTwice(4, 4), torch.randn(6, 4)
    model(inputs.clone()).pow(2).mean().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    model = after(heading, model=model)["model"]
    model(inputs[dist.get_rank() :: 3].clone()).pow(2).mean().backward()
    return torch.allclose(model.module.weight.grad, expected, atol=1e-6)


def whole_weights(heading, folder):
    from torch.distributed import fsdp, init_device_mesh

    os.chdir(folder)
    torch.manual_seed(0)
    model = nn.Linear(4, 7)
    expected = model.weight.detach().clone()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    after(heading, model=model)
    dist.barrier()
    return torch.equal(torch.load("model.pt")["weight"], expected)


def equal_ranks(heading, folder):
    model = nn.Linear(2, 2)
    dist.sync_params(model.parameters())
    names = [after(heading, model=model)["names"]]
    with torch.no_grad():
        model.bias[1] += dist.get_rank() == 1
    return [*names, after(heading, model=model)["names"]] == [[], ["bias"]]


def one_log(heading, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.chdir(folder)
    writer = after(heading, SummaryWriter=SummaryWriter, loss=torch.tensor(float(dist.get_rank())), step=7)["writer"]
    if dist.is_primary():
        writer.close()
    dist.barrier()
    log = EventAccumulator("runs/first").Reload()
    return len(os.listdir("runs/first")) == 1 and [(x.step, x.value) for x in log.Scalars("loss")] == [(7, 1.0)]


def average(heading, folder):
    model = dist.prepare_ddp_model(nn.BatchNorm1d(1))

    def train_step(batch):
        with torch.no_grad():
            dist.unwrap_model(model).weight.fill_(batch)
            dist.unwrap_model(model).running_mean.fill_(dist.get_rank() + 5)

    ema = after(heading, model=model, loader=[1, 2], train_step=train_step)["ema"].module
    return ema.weight.item() == pytest.approx(0.999 * 1 + 0.001 * 2) and ema.running_mean.item() == 5


CHECKS = {
    "DataLoader worker is killed by signal": mapped,
    "No backend type associated with device type cpu": metric,
    "Expected to mark a variable ready only once": static_graph,
    "Only rank 0 saves, with FSDP": whole_weights,
    "Are my ranks still equal?": equal_ranks,
    "wandb or TensorBoard shows one run for each rank": one_log,
    "An average of the weights (EMA), with DDP": average,
}


def in_a_folder_of_its_own(heading, folder):
    here = os.getcwd()
    try:
        return CHECKS[heading](heading, folder)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("heading", CODE)
def test_the_code_of_a_section(heading, tmp_path):
    if CHECKS[heading] is metric:
        pytest.importorskip("torchmetrics")
    if CHECKS[heading] is whole_weights and torch.__version__ < (2, 7):
        pytest.skip("fully_shard on the CPU needs torch 2.7")
    assert run(in_a_folder_of_its_own, 3, heading, tmp_path) == [True] * 3


CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell

for cell in sys.argv[1:]:
    InteractiveShell.instance().run_cell(cell)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_typed_in_a_notebook_to_debug_in_kubernetes_and_under_slurm(tmp_path):
    pytest.importorskip("IPython")
    bash = "import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[1]])"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun is beside python

    def typed(heading):
        return re.findall(r"```(?:text|sh)\n(.*?)```", next(x for x in SECTIONS if x.startswith(heading)), re.DOTALL)

    def prints(program, *args, **variables):
        done = shell("-c", program, *args, cwd=tmp_path, path=[ROOT], PATH=path, **variables)
        words = "rank 0 of 2 on cpu", "rank 1 of 2 on cpu", "(Pdb) 1", "(Pdb) 2", "BdbQuit", "epoch 4"
        return [word for word in words if word in done.out] or done

    program, joins = (ROOT / "min_DDP.py").read_text(encoding="utf-8"), "init_process_group()\n"
    torchrun = "torchrun --nproc_per_node=2 train.py"
    for call, keys, line, expected in (
        ("breakpoint()", "c", "python train.py 2>&1", ["BdbQuit"]),
        ("breakpoint()", "p world_size\nc", typed("breakpoint")[0], ["(Pdb) 1", "epoch 4"]),
        ("torch.distributed.breakpoint()", "up\np world_size\nc", torchrun, ["(Pdb) 2", "epoch 4"]),
    ):
        (tmp_path / "train.py").write_text(program.replace(joins, f"{joins}    {call}\n"))
        assert prints(bash, f"printf '{keys}\n' | {line}") == expected
    assert prints(CELLS, *typed("A function in a notebook")) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
    lines = typed("Kubernetes")[0].replace("29500", str(free_port())).replace("min_DDP.py", f"{ROOT}/min_DDP.py")
    assert prints(bash, f"{lines} wait") == ["epoch 4"]
    _, variables = srun_command()
    line = typed("srun torchrun")[0].replace("nodes=2", "nodes=1").replace("per_node=4", "per_node=2")
    line = line.replace("HOST:29500", f"localhost:{free_port()}")
    assert prints(bash, line, **variables) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]  # the cells' train.py
