"""MNIST, CIFAR-10 and synthetic digits as whole tensors, and a DataLoader that never touches a single image.

The usual loader decodes, transforms and stacks image by image, in Python.  Here a data set is one uint8 tensor, a batch
is one indexed gather, and it is normalised after it has reached the device.

    train_set, test_set = load("mnist", "data")                       # or "synthetic": no file, no network
    train_loader = loader(train_set, 128, RandomSampler(train_set))   # any sampler; DistributedSampler too
    for images, labels in batches(train_loader, device): ...          # float images, normalised, on the device

    train_set = Augmented(train_set, seed=0)                          # and cropped and flipped at random, there
    train_set.set_epoch(epoch)                                        # before each epoch
"""

import contextlib
import ctypes
import functools
import hashlib
import http.client
import io
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import distributed as torch_dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import datasets
from tqdm import tqdm

DATASETS = ("mnist", "cifar10", "synthetic")
COLOUR_DATASETS = ("cifar10", "synthetic")
LOCK_TIMEOUT = 600  # seconds to wait for another process that downloads
DOWNLOAD_TIMEOUT = 30  # seconds without a byte from the server
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MALLOC_LIMITS = {  # bytes, by the names that the environment has for them (mallopt(3))
    "MALLOC_MMAP_THRESHOLD_": 32 * 2**20,  # smaller blocks come from the heap; glibc takes no larger number
    "MALLOC_TRIM_THRESHOLD_": 1024 * 2**20,  # free memory at the heap's end that is kept
}
MNIST_MD5 = {  # of the unpacked files; those of the packed ones are checked by torchvision
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


class DataError(Exception):
    """The data can't be had; the message is one line that says what is missing, why, and what to do."""


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

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch at once: DataLoader calls this instead of __getitem__ where it exists."""
        index = torch.tensor(indices)
        return self.images[index], self.labels[index]


class Augmented(Images):
    """Images that `batches` crops at random (out of the image with PAD black pixels on each side) and flips at random.

    Crops and flips depend only on seed, epoch and example index: the number of processes, the batch size and a restart
    in the middle of an epoch change nothing.  Call `set_epoch` before each epoch.
    """

    PAD = 4

    def __init__(self, images: Images, seed: int = 0) -> None:
        super().__init__(images.images, images.labels, images.mean, images.std)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw anew: the row and the column that the crop starts at, and whether to flip; uint8, [N, 3]."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        highs = (2 * self.PAD + 1, 2 * self.PAD + 1, 2)
        draws = [torch.randint(high, (len(self),), generator=generator, dtype=torch.uint8) for high in highs]
        self.draws = torch.stack(draws, dim=1)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *super().__getitems__(indices), self.draws[indices]


def augment(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Crop and flip a whole batch at once, on its device: images [N, channels, H, W], draws as in `Augmented`."""
    row, column, flip = draws.long().unbind(1)
    height, width = images.shape[2:]
    padded = F.pad(images, [Augmented.PAD] * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: every possible crop of every image
    crops = windows[torch.arange(len(images), device=images.device), :, row, column]
    return torch.where(flip.bool().view(-1, 1, 1, 1), crops.flip(-1), crops)


def load(name: str, data_dir: str, limit: int | None = None, colour: bool = False) -> tuple[Images, Images]:
    """The train and the test set, as `Images`; at most `limit` examples of each.

    `name` is one of DATASETS or COLOUR_DATASETS.  MNIST is read from data_dir/MNIST/raw, CIFAR-10 from
    data_dir/cifar-10-batches-py (`prepare` puts them there).  `colour` gives the synthetic digits CIFAR-10's shape,
    [N, 3, 32, 32].
    """
    if name == "synthetic":
        train, test = _digits(12_000, seed=1), _digits(2_000, seed=2)
        mean, std = (0.21,), (0.16,)
        if colour:
            train, test = ((F.pad(images, [2] * 4).repeat(1, 3, 1, 1), labels) for images, labels in (train, test))
            mean, std = 3 * mean, 3 * std
    elif name == "cifar10":
        parts = [datasets.CIFAR10(data_dir, train) for train in (True, False)]
        images = [torch.from_numpy(part.data).permute(0, 3, 1, 2) for part in parts]
        # with the channels last in memory, as will be the batches: the faster layout for convolutions
        images = [part.contiguous(memory_format=torch.channels_last) for part in images]
        train, test = ((part, torch.tensor(source.targets)) for part, source in zip(images, parts, strict=True))
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    else:
        files = [str(Path(data_dir, "MNIST", "raw", file)) for file in MNIST_MD5]
        train, test = [
            (datasets.mnist.read_image_file(images).unsqueeze(1), datasets.mnist.read_label_file(labels))
            for images, labels in (files[:2], files[2:])
        ]
        mean, std = (0.1307,), (0.3081,)
    return tuple(Images(images[:limit], labels[:limit], mean, std) for images, labels in (train, test))


def loader(dataset: Images, batch_size: int, sampler: Sampler, drop_last: bool = False) -> DataLoader:
    """A DataLoader over `dataset` in the order of `sampler`; batch_size is this process's.

    drop_last leaves out a last batch that is not whole.
    """
    _keep_memory()
    options = {"collate_fn": _as_it_is, "pin_memory": torch.cuda.is_available(), "drop_last": drop_last}
    options["generator"] = torch.Generator()  # or each pass would draw from the numbers that dropout uses
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


@functools.cache  # once in each process
def _keep_memory() -> None:
    """Tell glibc to keep the memory that each step frees, for the next step.

    It would give large blocks back to the system, and get them again page by page: docs/results.md has what that costs.
    The user's own choice wins.  Where there is no glibc (macOS, musl) nothing happens.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, MALLOC_LIMITS["MALLOC_MMAP_THRESHOLD_"])
        mallopt(M_TRIM_THRESHOLD, MALLOC_LIMITS["MALLOC_TRIM_THRESHOLD_"])


def batches(loader: DataLoader, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches on `device`: images float32, normalised (and augmented, if `Augmented`); labels int64.

    On a terminal a progress bar is shown, of rank 0's share.  The process group says who that is, or else the sampler.
    """
    mean, std = (255 * torch.tensor(x, device=device).view(-1, 1, 1) for x in (loader.dataset.mean, loader.dataset.std))
    for batch in _with_progress_bar(loader):
        images, labels, *draws = [part.to(device, non_blocking=True) for part in batch]
        images = augment(images, *draws) if draws else images
        images = images.float(memory_format=torch.channels_last)  # also with one channel, or DDP warns on GPUs
        yield images.sub_(mean).div_(std), labels


def _with_progress_bar(loader: DataLoader) -> Iterable:
    rank = getattr(loader.sampler, "rank", 0)  # DistributedSampler's; other samplers have no rank
    if torch_dist.is_available() and torch_dist.is_initialized():
        rank = torch_dist.get_rank()  # also if every rank has the whole data set
    if rank > 0:
        return loader
    return tqdm(loader, leave=False, disable=None)  # None: only on a terminal


def prepare(name: str, data_dir: str, error: Callable[[str], None] | None = None) -> None:
    """Make sure that `load(name, data_dir)` will work: download what is missing, once, and check every file.

    Call it before any process starts, or in each of them: a file lock lets one process per file system do the work.
    What fails is a DataError, or a call of `error` with its message (argparse's `parser.error`, say).
    """
    try:
        if name not in DATASETS + COLOUR_DATASETS:
            names = dict.fromkeys(DATASETS + COLOUR_DATASETS)
            raise DataError(f"unknown data set {name!r}: choose from {', '.join(names)}")
        if name == "mnist":
            folder, files = Path(data_dir, "MNIST", "raw"), "MNIST's four unpacked files (train-images-idx3-ubyte, ...)"
            _prepare("MNIST", folder, MNIST_MD5, files, data_dir, datasets.MNIST)
        elif name == "cifar10":
            source, files = datasets.CIFAR10, "the files of cifar-10-python.tar.gz (data_batch_1, ..., batches.meta)"
            md5s = dict([*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])])
            _prepare("CIFAR-10", Path(data_dir, source.base_folder), md5s, files, data_dir, source)
    except DataError as problem:
        if error is None:
            raise
        error(str(problem))


def _prepare(title: str, folder: Path, md5s: dict, files: str, data_dir: str, source: type) -> None:
    """Download into `folder` those of the files that are missing, by torchvision's class `source`; then check all."""
    ways_out = f"copy {files} to {folder}, or use --dataset synthetic"
    try:
        if not all((folder / file).exists() for file in md5s):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT):
                missing = [file for file in md5s if not (folder / file).exists()]  # again: another may have been here
                if missing:
                    _download(source, folder, missing)
        for file, md5 in md5s.items():
            if md5 and hashlib.md5((folder / file).read_bytes(), usedforsecurity=False).hexdigest() != md5:
                raise DataError(f"{folder / file} is corrupt: delete it to download it again, or {ways_out}")
    except Timeout:
        raise DataError(
            f"another process has held {folder / '.lock'} for {LOCK_TIMEOUT} s: end it, or {ways_out}"
        ) from None
    except OSError as problem:
        reason = f"{problem.strerror or problem}: {problem.filename or folder}"
        raise DataError(f"can't use --data-dir {data_dir} ({reason}); make it readable and writable") from None
    except RuntimeError as problem:  # torchvision: every mirror failed
        reason = " ".join(str(problem).split())
        raise DataError(f"{title} is not in {folder} and can't be downloaded ({reason}): {ways_out}") from None


def _download(source: type, folder: Path, missing: list[str]) -> None:
    """Into a folder beside, then renamed: a file that is there is whole, whenever this is killed."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)  # urllib would wait for ever for a server that says nothing
    tqdm.monitor_interval = 0  # no thread that watches torchvision's bars: a process with threads can't be forked
    fresh = folder / ".download"
    shutil.rmtree(fresh, ignore_errors=True)  # of one that was killed
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # torchvision prints each mirror that failed
            source(fresh, download=True)
        for file in missing:
            shutil.move(next(fresh.rglob(file)), folder / file)
    except (OSError, http.client.HTTPException) as problem:  # a server that says nothing, or no HTTP
        raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        socket.setdefaulttimeout(before)


def _as_it_is(batch: tuple) -> tuple:
    return batch


def _digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits in Pillow's built-in font: turned, scaled, moved, faded and noisy; images [count, 1, 28, 28], labels.

    Only integers are computed with, so the same seed gives the same tensors on every machine.
    """
    from PIL import Image, ImageDraw, ImageFilter, ImageFont  # only this function needs Pillow

    size, centre = 112, 56  # four pixels of the glyph for one of the image; smoothed, so that one look-up is enough
    glyphs = torch.zeros(10, size, size, dtype=torch.int32)
    for digit in range(10):
        glyph = Image.new("L", (size, size))
        draw = ImageDraw.Draw(glyph)
        draw.text((centre, centre), str(digit), font=ImageFont.load_default(88), fill=255, anchor="mm")
        pixels = glyph.filter(ImageFilter.BoxBlur(2)).tobytes()
        glyphs[digit] = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(size, size)

    generator = torch.Generator().manual_seed(seed)

    def draw_ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32)

    y, x = torch.meshgrid(torch.arange(28, dtype=torch.int32), torch.arange(28, dtype=torch.int32), indexing="ij")
    degrees = [math.radians(degree) for degree in range(-35, 36)]
    cos, sin = (torch.tensor([round(256 * f(d)) for d in degrees], dtype=torch.int32) for f in (math.cos, math.sin))

    def draw_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        label, turn = draw_ints(0, 9, n, 1, 1), draw_ints(0, 70, n, 1, 1)
        step = draw_ints(280, 460, n, 1, 1)  # glyph pixels per image pixel, in 1/100: 2.8 to 4.6
        right, down = (2 * at - 27 - 2 * draw_ints(-4, 4, n, 1, 1) for at in (x, y))  # half pixels from the middle
        a, b = cos[turn] * step // 100, sin[turn] * step // 100
        column = ((a * right + b * down >> 9) + centre).clamp_(0, size - 1)
        row = ((a * down - b * right >> 9) + centre).clamp_(0, size - 1)
        ink = glyphs.flatten()[(label * size + row) * size + column]
        image = ink * draw_ints(90, 175, n, 1, 1) // 255 + draw_ints(0, 80, n, 28, 28)
        return image.to(torch.uint8), label.flatten().long()

    images, labels = zip(*(draw_batch(min(500, count - start)) for start in range(0, count, 500)), strict=True)
    return torch.cat(images).unsqueeze(1), torch.cat(labels)
