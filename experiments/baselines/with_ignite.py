"""The same training written with PyTorch-Ignite: idist.Parallel, idist.auto_*, its engines and metrics.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 -m experiments.baselines.with_ignite --dataset synthetic
"""

import time

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Average

from experiments.baselines.common import epoch_line, load, make_model, parse_args


def main(local_rank, args):
    device = idist.device()
    train_set, test_set, options = load(args)
    train_loader = idist.auto_dataloader(train_set, batch_size=args.batch_size, shuffle=True, **options)
    test_loader = idist.auto_dataloader(test_set, batch_size=args.batch_size, shuffle=False, **options)
    model = idist.auto_model(make_model(args))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), args.lr, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))

    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device, non_blocking=True)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device, non_blocking=True)
    Average().attach(trainer, "loss")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())

    @trainer.on(Events.EPOCH_STARTED)
    def start_epoch(engine):
        if idist.get_world_size() > 1:
            train_loader.sampler.set_epoch(engine.state.epoch)
        engine.state.started = time.perf_counter()

    @trainer.on(Events.EPOCH_COMPLETED)
    def end_epoch(engine):  # the trainer takes loss.item() after each step, so nothing is left to wait for
        seconds = time.perf_counter() - engine.state.started
        seen = len(train_loader.sampler) * idist.get_world_size()
        accuracy = evaluator.run(test_loader).metrics["accuracy"]
        count = len(test_loader.sampler) * idist.get_world_size()  # with what the sampler repeats
        state, correct = engine.state, round(accuracy * count)
        if idist.get_rank() == 0:
            line = epoch_line(state.epoch, args.epochs, state.metrics["loss"], correct, count, seen / seconds)
            print(line, flush=True)

    trainer.run(train_loader, max_epochs=args.epochs)


if __name__ == "__main__":
    with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
        parallel.run(main, parse_args())
