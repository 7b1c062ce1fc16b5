"""Two workers in a process group that another library has made; each writes what it prints into FOLDER/RANK.

python tests/anothers_group.py RAY FOLDER
torchrun --nproc_per_node=2 tests/anothers_group.py ACCELERATE FOLDER
(Not accelerate launch --cpu --num_processes 2, which starts one process.)
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from torch import distributed as torch_dist

import distributed as dist
import min_DDP


def train(folder):
    theirs, rank = torch_dist.group.WORLD, dist.get_rank()
    with open(Path(folder, str(rank)), "w") as file, contextlib.redirect_stdout(file):
        dist.init_process_group()
        total, mean = dist.all_reduce(torch.tensor(rank + 1)), dist.reduce(torch.tensor(float(rank)))
        print(f"rank {rank}: sum {total}, mean {mean}, share {[*dist.data_sampler(range(6), shuffle=False)]}")
        dist.cleanup()
        dist.launch(min_DDP.main_worker, argparse.Namespace(epochs=5, batch_size=40))  # calls it in this process
        torch_dist.all_reduce(total)
        print(f"afterwards: {total}, in {'the same' if torch_dist.group.WORLD is theirs else 'another'} group")


def with_ray(folder):
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(lambda: train(folder), scaling_config=ScalingConfig(num_workers=2)).fit()
    ray.shutdown()


def with_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)  # makes the group
    train(folder)
    accelerator.end_training()  # ends it


if __name__ == "__main__":
    {"RAY": with_ray, "ACCELERATE": with_accelerate}[sys.argv[1]](sys.argv[2])
