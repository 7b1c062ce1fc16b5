# Copied from the project ddp-by-diff 1.0.  SPDX-License-Identifier: MIT
"""MNIST, CIFAR-10 and synthetic digits as whole tensors, read by torch's own DataLoader.

The usual DataLoader decodes, transforms and stacks image by image, in Python, and then copies each batch to the GPU.
Here, a dataset is one uint8 tensor, which is moved to the device once (MNIST has 47 MB, CIFAR-10 154 MB).  DataLoader
yields only indices, so a batch is one indexed gather on the device, where it is also normalised.

    train_set, test_set = load("mnist", "data")                       # "synthetic" needs no file and no network
    train_loader = loader(train_set, 128, RandomSampler(train_set))   # any sampler; DistributedSampler too
    for images, labels in batches(train_loader, device): ...          # float images, normalised, on the device
"""

import contextlib
import ctypes
import functools
import io
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import distributed as torch_dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import datasets
from tqdm import tqdm

# The number of training examples in each dataset.  mnist-like: your own files, with MNIST's names, format and sizes.
DATASETS = {"mnist": 60_000, "mnist-like": 60_000, "cifar10": 50_000, "synthetic": 12_000}
COLOUR_DATASETS = ("cifar10", "synthetic")
LOCK_TIMEOUT = 600  # seconds to wait for another process's download
DOWNLOAD_TIMEOUT = 30  # seconds without a byte from the server
MNIST = {  # the md5 sums of the unpacked files; torchvision has those of the packed files
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
CIFAR10 = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch", "batches.meta"]


class Images(Dataset):
    """Images (uint8, [N, channels, height, width]) and labels (int64, [N]), with the mean and the standard deviation
    (of pixels in 0..1, one per channel) that `batches` normalises with."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean: tuple, std: tuple) -> None:
        self.images, self.labels, self.mean, self.std = images, labels, mean, std
        self.channels, self.side = images.shape[1], images.shape[3]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[int]:
        """Return the indices of a batch, for `batches`.  DataLoader calls it instead of __getitem__."""
        return indices


def load(name: str, data_dir: str, limit: int | None = None, colour: bool = False) -> tuple[Images, Images]:
    """Return the training set and the test set, as `Images`, with at most `limit` examples each.

    `name` is one of DATASETS.  MNIST is read from data_dir/MNIST/raw, and CIFAR-10 from data_dir/cifar-10-batches-py
    (`prepare` puts them there).  "mnist-like" (such as Fashion-MNIST) is read from MNIST's folder, but its md5 sums are
    not checked.  With `colour`, the synthetic digits have CIFAR-10's shape, [N, 3, 32, 32].
    """
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if name == "synthetic":
        train, test = _digits(DATASETS[name], seed=1), _digits(2_000, seed=2)
        mean, std = (0.2,), (0.16,)
        if colour:
            train, test = ((F.pad(images, [2] * 4).repeat(1, 3, 1, 1), labels) for images, labels in (train, test))
            mean, std = 3 * mean, 3 * std
    else:
        train, test = (_read(name, data_dir, is_train) for is_train in (True, False))
        mean, std = (0.1307,), (0.3081,)
        if name == "cifar10":
            mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    train_set, test_set = (Images(images[:limit], labels[:limit], mean, std) for images, labels in (train, test))
    return train_set, test_set


def _read(name: str, data_dir: str, is_train: bool, download: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if name != "cifar10":
        source = datasets.MNIST(data_dir, is_train, download=download)
        count = DATASETS[name] if is_train else 10_000
        if source.data.shape != (count, 28, 28) or len(source.targets) != count:
            sizes = f"images {list(source.data.shape)} and {len(source.targets)} labels"
            raise DataError(f"{sizes}, but {[count, 28, 28]} and {count} are expected")
        files = [file for file in MNIST if file.startswith("train") == is_train]
        for file in files if name == "mnist" else ():
            if not datasets.utils.check_md5(Path(source.raw_folder, file), MNIST[file]):
                raise DataError(f"{file} is damaged, or of another dataset (then type --dataset mnist-like)")
        if source.targets.max() > 9:
            raise DataError(f"label {source.targets.max()}, but labels must be 0 to 9")
        return source.data.unsqueeze(1), source.targets
    source = datasets.CIFAR10(data_dir, is_train, download=download)
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2)
    images = images.contiguous(memory_format=torch.channels_last)  # as the batches will be
    return images, torch.tensor(source.targets)


def loader(dataset: Images, batch_size: int, sampler: Sampler, drop_last: bool = False) -> DataLoader:
    """Return a DataLoader that yields the indices of `dataset` in the order of `sampler`, for `batches`.

    batch_size is the local batch size.  drop_last leaves out the last batch if it is smaller than the others.
    """
    _keep_memory()
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),  # so that the process doesn't wait for their copy to the GPU
        generator=torch.Generator(),  # without this, each pass would use up random numbers of dropout
    )


def batches(loader: DataLoader, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches on `device`: images float32, normalised (and augmented, if `Augmented`), and labels int64.

    The dataset is moved to `device`, and stays there.  On a terminal, rank 0 shows a progress bar of
    its share.  The rank is the process group's, or else the sampler's.
    """
    dataset: Any = loader.dataset
    dataset.images, dataset.labels = dataset.images.to(device), dataset.labels.to(device)
    mean, std = (255 * torch.tensor(x, device=device).view(-1, 1, 1) for x in (dataset.mean, dataset.std))
    if isinstance(dataset, Augmented):
        draws = dataset.draws.to(device)  # of this epoch
    for batch in _with_progress_bar(loader):
        index = batch.to(device, non_blocking=True)  # a copy from pinned memory runs in the background
        images, labels = dataset.images[index], dataset.labels[index]
        if isinstance(dataset, Augmented):
            images = augment(images, draws[index])
        # Make the images float, channels last, because convolutions are faster then, and DDP would warn on GPUs.
        images = images.float(memory_format=torch.channels_last)
        # Normalise in place: (pixel / 255 - mean) / std, as torchvision's ToTensor and Normalize do.
        yield images.sub_(mean).div_(std), labels


def _with_progress_bar(loader: DataLoader) -> Iterable:
    rank = getattr(loader.sampler, "rank", 0)  # a DistributedSampler has a rank, other samplers have none
    if torch_dist.is_available() and torch_dist.is_initialized():
        rank = torch_dist.get_rank()  # also if every rank has the whole dataset
    return loader if rank > 0 else tqdm(loader, leave=False, disable=None)  # None: only on a terminal


# ----------------------------------------------------------------------------------------------------- augmentation


class Augmented(Images):
    """Images that `batches` pads with PAD black pixels on each side, then crops and flips at random.

    Crops and flips depend only on seed, epoch and example index, not on the number of processes, the batch size or a
    restart in the middle of an epoch.  Call `set_epoch` before each epoch.
    """

    PAD = 4

    def __init__(self, images: Images, seed: int = 0) -> None:
        super().__init__(images.images, images.labels, images.mean, images.std)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw each image's crop (row, column) and whether to flip it, for this epoch: uint8, [N, 3]."""
        seed = self.seed + epoch + 2**31  # the sampler uses seed + epoch; only the low 32 bits matter
        generator = torch.Generator().manual_seed(seed)
        highs = (2 * self.PAD + 1, 2 * self.PAD + 1, 2)
        draws = [torch.randint(high, (len(self),), generator=generator, dtype=torch.uint8) for high in highs]
        self.draws = torch.stack(draws, dim=1)


def augment(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Crop and flip a whole batch at once, on its device: images [N, channels, H, W], draws as in `Augmented`."""
    row, column, flip = draws.long().unbind(1)
    height, width = images.shape[2:]
    padded = F.pad(images, [Augmented.PAD] * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: every possible crop of every image
    crops = windows[torch.arange(len(images), device=images.device), :, row, column]
    return torch.where(flip.bool().view(-1, 1, 1, 1), crops.flip(-1), crops)


# ------------------------------------------------------------------------------------------------ where data come from


class DataError(Exception):
    """The data can't be read or downloaded.  The message is one line: what is missing, why, and what to do."""


def prepare(name: str, data_dir: str, error: Callable[[str], None] | None = None) -> None:
    """Make sure that `load(name, data_dir)` works: torchvision downloads what is missing.

    Call it before any process starts, or in each of them, because a file lock lets only one process at a time download.
    If it fails, it calls `error` with the message (for example argparse's `parser.error`), or raises DataError.
    """
    try:
        if name not in DATASETS:
            raise DataError(f"unknown dataset {name!r}: choose from {', '.join(DATASETS)}")
        if name != "synthetic":
            _fetch(name, data_dir)
    except DataError as problem:
        if error is None:
            raise
        error(str(problem))


def _fetch(name: str, data_dir: str) -> None:
    """Read the dataset; if that fails, download it, and read it then."""
    data_dir = os.path.expanduser(data_dir)  # as torchvision does; the shell doesn't in --data-dir=~/data
    in_folder, files = ("cifar-10-batches-py", CIFAR10) if name == "cifar10" else ("MNIST/raw", list(MNIST))
    folder = Path(data_dir, in_folder)
    time_out, threads = socket.getdefaulttimeout(), torch.get_num_threads()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)  # urllib would wait forever for a silent server
    torch.set_num_threads(1)  # after torch's thread pool has started, no process can be forked
    tqdm.monitor_interval = 0  # torchvision's progress bar would start a thread, too
    try:
        try:
            load(name, data_dir)
            return
        except Exception as problem:
            if isinstance(problem, DataError) or name == "mnist-like":  # torchvision replaces no file of MNIST
                raise
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(data_dir, ".lock"), timeout=LOCK_TIMEOUT), contextlib.redirect_stdout(io.StringIO()):
            _read(name, data_dir, is_train=True, download=True)  # downloads nothing if another process has done it
        load(name, data_dir)
    except Exception as problem:  # the network, the disk and torchvision's readers raise many kinds of errors
        kind = "" if isinstance(problem, DataError) else f"{type(problem).__name__}: "
        reason = " ".join(f"{kind}{problem}".split())
        raise DataError(
            f"{name} can't be read from {folder} or downloaded ({reason}): delete this folder if it is damaged, copy "
            f"the unpacked files into it ({', '.join(files)}), or use --dataset synthetic"
        ) from None
    finally:
        socket.setdefaulttimeout(time_out)
        torch.set_num_threads(threads)


def _digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return digits in Pillow's font, turned, scaled, moved, faded and noisy: uint8 [count, 1, 28, 28], and labels."""
    from PIL import Image, ImageDraw, ImageFont  # only this function needs Pillow

    def zeros(*shape: int) -> torch.Tensor:  # float32 also where equivalence makes all float32 float64: the same digits
        return torch.zeros(shape, dtype=torch.int32).view(torch.float32)

    glyphs = zeros(10, 1, 28, 28)
    for digit in range(10):
        glyph = Image.new("L", (28, 28))
        ImageDraw.Draw(glyph).text((14, 14), str(digit), font=ImageFont.load_default(24), fill=255, anchor="mm")
        glyphs[digit, 0] = torch.frombuffer(bytearray(glyph.tobytes()), dtype=torch.uint8).view(28, 28)

    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return zeros(count, *shape).uniform_(low, high, generator=generator)

    labels = torch.randint(10, (count,), generator=generator)
    angle, scale = uniform(-0.6, 0.6), uniform(0.75, 1.25)
    right, down = uniform(-0.3, 0.3), uniform(-0.3, 0.3)  # half the width is 1
    cos, sin = scale * angle.cos(), scale * angle.sin()
    turned = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(count, 2, 3)
    grid = F.affine_grid(turned, [count, 1, 28, 28], align_corners=False)
    images = F.grid_sample(glyphs[labels], grid, align_corners=False)
    images = images * uniform(0.35, 0.68, 1, 1, 1) + uniform(0, 80, 1, 28, 28)
    return images.to(torch.uint8), labels


@functools.cache  # once in each process
def _keep_memory() -> None:
    """Make glibc keep the memory that a step frees, for the next step.

    By default, glibc returns large blocks to the system, and gets them again page by page.  If the user has set
    variables of glibc, nothing is changed.
    """
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.getenv("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # macOS has no mallopt
    if mallopt and not is_chosen:
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: smaller blocks are on the heap; 32 MiB is glibc's maximum
        mallopt(-1, 1024 * 2**20)  # M_TRIM_THRESHOLD: bytes of free memory to keep at the end of the heap
