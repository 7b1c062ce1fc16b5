"""What the programs of this folder share: flags, model, data in two ways, and the line after each epoch.

The model, the flags and their defaults are those of mnist_ddp.py.  So is the recipe (SGD with momentum, OneCycleLR):
the programs differ in how they load data and talk to each other, not in what they learn.

The data come image by image, as in pytorch/examples (mnist/main.py): a transform for each image.  With --whole-batches
they come as in data.py, and the model has the layout that mnist_ddp.py gives it.  Then only the library makes a
difference to mnist_ddp.py.
"""

import argparse

import torch
from PIL import Image
from torchvision import transforms

import data
from mnist_ddp import ConvNet


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "synthetic"])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=200, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="two batches in each epoch")
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_parser()
    parser.add_argument("--whole-batches", action="store_true", help="load as data.py does, not image by image")
    return parser.parse_args()


class SingleImages(torch.utils.data.Dataset):
    """As torchvision's MNIST: each image is a PIL image, which ToTensor and Normalize transform, one by one."""

    def __init__(self, images: data.Images) -> None:
        self.images, self.labels = images.images[:, 0].numpy(), images.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(images.mean, images.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class WholeBatches(data.Images):
    """data.py's way: a batch is one indexed gather from a tensor, and is normalised at once, as in `data.batches`."""

    def __init__(self, images: data.Images) -> None:
        super().__init__(images.images, images.labels, images.mean, images.std)
        self.pixel_mean, self.pixel_std = (255 * torch.tensor(x).view(-1, 1, 1) for x in (self.mean, self.std))

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = super().__getitems__(indices)
        images = images.float(memory_format=torch.channels_last)
        return images.sub_(self.pixel_mean).div_(self.pixel_std), labels


def whole(batch: tuple) -> tuple:
    """What `WholeBatches` returns is a batch already."""
    return batch


def load(args: argparse.Namespace) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset, dict]:
    """The train set, the test set, and what a DataLoader of them needs beside its usual arguments."""
    limit = 2 * args.batch_size if args.dry_run else None
    data._keep_memory()  # as data.loader does
    train_set, test_set = data.load(args.dataset, args.data_dir, limit)
    if args.whole_batches:
        return WholeBatches(train_set), WholeBatches(test_set), {"collate_fn": whole}
    return SingleImages(train_set), SingleImages(test_set), {}


def make_model(args: argparse.Namespace) -> ConvNet:
    """The scripts' model, with the same initial weights."""
    torch.manual_seed(args.seed)
    model = ConvNet(1, 28)
    return model.to(memory_format=torch.channels_last) if args.whole_batches else model


def epoch_line(epoch: int, epochs: int, loss: float, correct: int, count: int, images_per_s: float) -> str:
    """The scripts' line; epoch starts with 1, loss is the average over the examples."""
    accuracy = f"accuracy {correct / count:.2%} ({correct}/{count})"
    return f"epoch {epoch}/{epochs}  loss {loss:.4f}  {accuracy}  {images_per_s:.0f} images/s"
