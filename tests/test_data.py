"""data.py: the synthetic digits, whole batches, augmentation, and what happens when MNIST can't be had.

Downloads run through torchvision's real code, against a server in this process.
"""

import functools
import gzip
import hashlib
import http.server
import json
import os
import pickle
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets
from world import ROOT, forker, run_in_a_group_of_one

import data
from ddp_by_diff.equivalence.formats import InFloat64

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return data.load("synthetic", "no folder is needed")


def test_digits_fill_their_range_and_have_the_mean_that_batches_subtracts(digits):
    for one, count in zip(digits, (12_000, 2_000), strict=True):
        assert one.images.shape == (count, 1, 28, 28) and one.images.dtype == torch.uint8
        assert one.labels.shape == (count,) and one.labels.dtype == torch.int64 and len(one) == count
        assert one.images.min() == 0 and one.images.max() >= 240
        pixels = one.images.double() / 255
        assert (pixels.mean().item(), pixels.std().item()) == pytest.approx((one.mean[0], one.std[0]), abs=0.01)
        expected = count / 10
        assert (one.labels.bincount(minlength=10) - expected).abs().max() < 5 * (0.9 * expected) ** 0.5  # 5 deviations
    images = torch.cat([one.images for one in digits])
    assert len({image.numpy().tobytes() for image in images}) == 14_000  # no test image is in the training set


def hashes(*tensors):
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]


def in_colour():
    """The hashes of digits, channel by channel, and of their labels."""
    torch.manual_seed(5)
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    some, _ = data.load("synthetic", "", limit=7000, colour=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert some.images.shape == (7000, 3, 32, 32) and len(some.mean) == len(some.std) == 3
    assert not some.images[:, :, :2].any() and not some.images[..., -2:].any()
    return hashes(*some.images[:, :, 2:-2, 2:-2].transpose(0, 1).contiguous(), some.labels)


def test_digits_are_the_same_in_every_process_and_in_colour(digits):
    """With other threads and another global seed; and they draw nothing from the global generator."""
    images, labels = digits[0].images[:7000], digits[0].labels[:7000]
    assert run_in_a_group_of_one(in_colour) == hashes(images, images, images, labels)


def numbered(count, channels=1):
    """Images whose pixels are their index, times 10 in the second channel; labels 100 + index."""
    index = torch.arange(count)
    images = torch.stack([index * 10**channel for channel in range(channels)], 1).to(torch.uint8)
    images = images.view(count, channels, 1, 1).expand(-1, -1, 2, 3).contiguous()
    return data.Images(images, 100 + index, (0.5, 0.25)[:channels], (0.25, 2.0)[:channels])


def test_batches_are_normalised_channel_by_channel_and_whole(monkeypatch):
    monkeypatch.delattr(data.Images, "__getitem__")  # no image is asked for by itself
    dataset = numbered(6, channels=2)
    before, state = dataset.images.clone(), torch.get_rng_state()
    ((images, labels),) = data.batches(data.loader(dataset, 6, range(6)), CPU)
    assert images.dtype == torch.float32 and images.shape == (6, 2, 2, 3)
    assert labels.dtype == torch.int64 and labels.tolist() == [100, 101, 102, 103, 104, 105]
    for i in range(6):  # (pixel / 255 - mean) / std
        assert images[i, 0].flatten().tolist() == pytest.approx([(i / 255 - 0.5) / 0.25] * 6, abs=1e-6)
        assert images[i, 1].flatten().tolist() == pytest.approx([(10 * i / 255 - 0.25) / 2.0] * 6, abs=1e-6)
    assert torch.equal(dataset.images, before)
    assert torch.equal(torch.get_rng_state(), state)  # else an evaluation would change the dropout that follows


def test_only_indices_are_sent_to_the_device_in_each_step():
    dataset, meta = numbered(6), torch.device("meta")
    loader = data.loader(dataset, 4, range(6))
    assert [index.tolist() for index in loader] == [[0, 1, 2, 3], [4, 5]]
    moved = []
    for _ in range(2):
        found = [(images.device, labels.device) for images, labels in data.batches(loader, meta)]
        assert found == [(meta, meta)] * 2
        moved.append(dataset.images)
    assert moved[0] is moved[1] and moved[0].device == dataset.labels.device == meta


def test_order_is_the_samplers_and_the_last_batch_is_short_or_left_out():
    dataset = numbered(10)
    share = DistributedSampler(dataset, num_replicas=3, rank=1, shuffle=False)  # 10 is padded to 12 by the first two
    for sampler, expected in ([3, 0, 9, 9, 1], [[3, 0], [9, 9], [1]]), ([], []), (share, [[1, 4], [7, 0]]):
        loader = data.loader(dataset, 2, sampler)
        found = list(data.batches(loader, CPU))
        assert [(labels - 100).tolist() for _, labels in found] == expected and len(loader) == len(expected)
        for images, labels in found:
            assert ((images[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().tolist() == (labels - 100).tolist()
    assert data._with_progress_bar(loader) is loader, "no bar on rank 1, also without a group, as with Horovod"
    short = data.batches(data.loader(dataset, 4, range(10), drop_last=True), CPU)
    assert [len(labels) for _, labels in short] == [4, 4]


def test_images_have_the_layout_of_the_convolutions():
    """Else cuDNN gives the first gradient other strides than DDP's bucket has, and DDP warns on every rank."""
    for channels in 1, 2:
        dataset = numbered(3, channels)
        for images in dataset, data.Augmented(dataset):
            ((batch, _),) = data.batches(data.loader(images, 3, range(3)), CPU)
            assert batch.stride() == (6 * channels, 1, 3 * channels, channels)  # of [3, channels, 2, 3]


def crops_and_flips(seed, epoch, count=500, batch_size=64, order=None):
    """Where each example was cropped, and whether it was flipped: (row, column, flip), read from its pixels alone.

    Every pixel holds its place: its row in the first channel, its column in the second, both from 1; the border is 0.
    """
    places = torch.arange(1, 33, dtype=torch.uint8).expand(32, 32)
    images = torch.stack([places.T, places]).expand(count, -1, -1, -1)
    dataset = data.Augmented(data.Images(images, torch.arange(count), (0.0, 0.0), (1 / 255, 1 / 255)), seed)
    dataset.set_epoch(epoch)
    found = torch.full((count, 3), -1)
    for crops, labels in data.batches(data.loader(dataset, batch_size, order or range(count)), CPU):
        middle = crops[:, :, 16, 16:18].round().long()  # never of the border: it is 4 wide
        flip = middle[:, 1, 1] < middle[:, 1, 0]  # the columns go down
        row, column = middle[:, 0, 0] - 13, middle[:, 1, 0] - 13  # 17 in the centre: cropped at (4, 4)
        found[labels] = torch.stack([row, torch.where(flip, column + 1, column), flip], dim=1)
    assert torch.equal(found, dataset.draws.long())
    return found


def test_crops_and_flips_depend_on_seed_epoch_and_example_alone():
    expected = crops_and_flips(seed=3, epoch=2)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(crops_and_flips(seed=3, epoch=2, batch_size=7, order=order), expected)
    assert [column.unique().tolist() for column in expected.T] == [list(range(9)), list(range(9)), [0, 1]]
    assert (expected / torch.tensor([8, 8, 1])).mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.1)
    of_seed_0 = crops_and_flips(seed=0, epoch=1), crops_and_flips(seed=0, epoch=2)
    others = crops_and_flips(seed=4, epoch=2), crops_and_flips(seed=3, epoch=1)
    for one, other in (of_seed_0, (expected, others[0]), (expected, others[1])):
        assert (other == one).all(1).double().mean() < 0.04  # by chance one in 9 x 9 x 2
    of_the_sampler = torch.randint(9, (500,), generator=torch.Generator().manual_seed(3 + 2))  # as it draws the order
    assert (expected[:, 0] == of_the_sampler).double().mean() < 0.2  # by chance one in 9


def test_persistent_workers_have_each_epochs_own_crops_and_flips():
    """They hold a copy of the data set, made in the first epoch."""
    noise = torch.randint(256, (100, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    dataset = data.Augmented(data.Images(noise, torch.zeros(100), (0.0,), (1 / 255,)))
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, 50, sampler=range(100), **workers)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        found = torch.cat([images for images, _ in data.batches(loader, CPU)])
        assert torch.equal(found, data.augment(noise, dataset.draws).float())


FILES = {"train-images-idx3-ubyte": (60_000, 28, 28), "train-labels-idx1-ubyte": (60_000,)}
FILES |= {"t10k-images-idx3-ubyte": (10_000, 28, 28), "t10k-labels-idx1-ubyte": (10_000,)}


def write_mnist(folder):
    """Files of MNIST's names, format and sizes: a black image, a white one, black ones; labels 0.  Sparse files."""
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for name, shape in FILES.items():
        with (raw / name).open("wb") as file:
            file.write(bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape))
            header = file.tell()
            if len(shape) == 3:
                file.write(bytes(784) + bytes([255]) * 784)
            file.truncate(header + torch.Size(shape).numel())
    return raw


def message(*args):
    """What prepare says: one line, the same through `error`; and it changes nothing in this process."""
    before, threads = socket.getdefaulttimeout(), torch.get_num_threads()
    told = []
    data.prepare(*args, error=told.append)
    with pytest.raises(data.DataError, match=r"\A[^\n]+\Z") as raised:
        data.prepare(*args)
    assert (socket.getdefaulttimeout(), torch.get_num_threads()) == (before, threads)
    assert told == [str(raised.value)]
    return told[0]


def test_black_and_white_pixels_of_mnist_in_a_folder_with_a_tilde(tmp_path, monkeypatch):
    """MNIST's mean is 0.1307, its standard deviation 0.3081: torchvision's and everybody's numbers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_mnist(tmp_path / "there")
    data.prepare("mnist-like", "~/there")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(FILES)  # a folder to read only
    for one, count in zip(data.load("mnist-like", "~/there"), (60_000, 10_000), strict=True):
        assert one.images.shape == (count, 1, 28, 28) and one.labels.shape == (count,)
        ((images, _),) = data.batches(data.loader(one, 2, [0, 1]), CPU)
        expected = torch.tensor([(0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081]).view(2, 1, 1, 1)
        torch.testing.assert_close(images, expected.expand(2, 1, 28, 28))


def test_a_damaged_file_is_one_line(tmp_path):
    """Cut off; of the other set, which has other numbers of images and labels; or with a label of no class."""
    raw = write_mnist(tmp_path)
    labels = (raw / "t10k-labels-idx1-ubyte").read_bytes()
    for name, content in [
        ("train-images-idx3-ubyte", bytes(4000)),
        ("train-images-idx3-ubyte", (raw / "t10k-images-idx3-ubyte").read_bytes()),
        ("train-labels-idx1-ubyte", labels),
        ("t10k-labels-idx1-ubyte", labels[:30] + bytes([200]) + labels[31:]),
    ]:
        whole = (raw / name).rename(tmp_path / "whole")
        (raw / name).write_bytes(content)
        text = message("mnist-like", str(tmp_path))
        assert f"can't be read from {raw}" in text and "--dataset synthetic" in text
        assert ("(label 200, but labels must be 0 to 9)" in text) == (200 in content)
        assert sorted(path.name for path in raw.iterdir()) == sorted(FILES)  # nothing is deleted
        whole.rename(raw / name)


def let_pass(monkeypatch, raw):
    """The files there, for MNIST's."""
    monkeypatch.setattr(data, "MNIST", {name: hashlib.md5((raw / name).read_bytes()).hexdigest() for name in FILES})


def test_what_is_not_mnists_to_the_last_bit_is_refused_unless_it_is_ones_own(tmp_path, monkeypatch):
    """One label, then one pixel is another one; torchvision doesn't look."""
    raw = write_mnist(tmp_path)
    let_pass(monkeypatch, raw)
    data.prepare("mnist", str(tmp_path))
    for name in "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte":
        whole = shutil.copy(raw / name, tmp_path / "whole")
        with (raw / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x09")
        text = message("mnist", str(tmp_path))
        assert f"mnist can't be read from {raw}" in text and f"({name} is damaged, or of another dataset" in text
        assert "--dataset mnist-like" in text and not (tmp_path / ".lock").exists()  # nothing is downloaded
        train, test = data.load("mnist-like", str(tmp_path))
        assert {train.labels[-1].item(), test.images[-1, 0, -1, -1].item()} == {0, 9}
        shutil.move(whole, raw / name)


def test_files_that_are_not_there_are_named_with_their_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(datasets.MNIST, "mirrors", [])
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:0/")
    monkeypatch.chdir(tmp_path)
    for name, folder, files in ("mnist", "MNIST/raw", FILES), ("cifar10", "cifar-10-batches-py", CIFAR10):
        text = message(name, "~/here")
        assert f"{tmp_path}/here/{folder}" in text and all(file in text for file in files)
    assert not (tmp_path / "~").exists()


def test_a_bad_name_is_one_line_and_digits_need_no_folder(tmp_path):
    assert all(word in message("nope", str(tmp_path)) for word in ("'nope'", *data.DATASETS))
    data.prepare("synthetic", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


CIFAR10 = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def test_cifar10_is_read_normalised_and_checked(tmp_path, monkeypatch):
    """Six files of two images each, with the numbers that torchvision's checksums want replaced."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.repeat(np.array([[0, 255, 51], [102, 0, 255]], dtype=np.uint8), 1024, axis=1)  # red, green, blue
    pixels[:, 32 * 2 + 5] = 7  # row 2, column 5, in red
    for number, name in enumerate(CIFAR10):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [number, number + 1]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("0123456789")}))
    sums = [[name, hashlib.md5((folder / name).read_bytes()).hexdigest()] for name in [*CIFAR10, "batches.meta"]]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", sums[5:6])
    monkeypatch.setattr(datasets.CIFAR10, "meta", datasets.CIFAR10.meta | {"md5": sums[6][1]})
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:0/")
    data.prepare("cifar10", str(tmp_path))
    train, test = data.load("cifar10", str(tmp_path))
    assert (train.channels, train.side, len(train), test.labels.tolist()) == (3, 32, 10, [5, 6])
    ((images, _),) = data.batches(data.loader(test, 2, [0, 1]), CPU)
    for channel, mean, std in (0, 0.4914, 0.2470), (1, 0.4822, 0.2435), (2, 0.4465, 0.2616):  # everybody's numbers
        for image in range(2):
            expected = (pixels[image].reshape(3, 1024)[channel] / 255 - mean) / std
            assert images[image, channel].flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    (folder / "data_batch_3").write_bytes(b"?")
    assert f"cifar10 can't be read from {folder}" in message("cifar10", str(tmp_path))


def test_a_server_that_never_answers_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        text = message("mnist", str(tmp_path))
    assert f"mnist can't be read from {tmp_path}/MNIST/raw or downloaded (" in text and "timed out" in text


class Handler(http.server.SimpleHTTPRequestHandler):
    """A mirror; `server.gets` is what was fetched."""

    def do_GET(self):
        if self.headers["Method"] == "HEAD":  # so torchvision looks for a redirection; it doesn't read the answer
            self.do_HEAD()
        else:
            self.server.gets.append(self.path)
            super().do_GET()

    def log_message(self, *args):
        pass


TWICE = """
import json, os, sys, torch, data, distributed_launcher as launcher
from torchvision import datasets
torch.set_num_threads(1)  # the first call sets the size of a second pool, of threads that start at once
torch.set_num_threads(2)
before = launcher.fork_is_safe(), torch.get_num_threads()
datasets.MNIST.mirrors, datasets.MNIST.resources, data.MNIST = json.loads(sys.argv[1])
other = os.fork()
data.prepare("mnist", sys.argv[2])
assert (launcher.fork_is_safe(), torch.get_num_threads()) == before
print(*map(len, data.load("mnist", sys.argv[2])), flush=True)
sys.exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_two_processes_download_once_and_can_be_forked_afterwards_as_before(tmp_path, monkeypatch):
    resources, raw = [], write_mnist(tmp_path / "mirror")
    let_pass(monkeypatch, raw)
    for path in raw.iterdir():
        packed = gzip.compress(path.read_bytes(), 1)
        (tmp_path / f"{path.name}.gz").write_bytes(packed)
        resources.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    (tmp_path / "twice.py").write_text(TWICE)
    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.gets = []
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        settings = json.dumps([[f"http://127.0.0.1:{server.server_address[1]}/"], resources, data.MNIST])
        end = forker().run(tmp_path / "twice.py", settings, tmp_path / "data", path=[ROOT])
        server.shutdown()
    assert end[:2] == (0, "60000 10000\n" * 2), end
    assert sorted(server.gets) == sorted(f"/{name}.gz" for name in FILES)


def test_real_mnist():
    folder = Path(os.environ.get("MNIST_DIR", ROOT / "data"))
    if not (folder / "MNIST" / "raw").exists():
        pytest.skip("no real MNIST here: set MNIST_DIR to a folder that holds MNIST/raw")
    data.prepare("mnist", str(folder))
    train, test = data.load("mnist", str(folder))  # compares the sums
    assert (len(train), len(test), train.labels[:5].tolist()) == (60_000, 10_000, [5, 0, 4, 1, 9])
    shares = train.images.flatten().bincount().double() / train.images.numel()  # of each of the 256 shades
    shades = torch.arange(256) / 255
    mean = (shares * shades).sum().item()
    std = (shares * (shades - mean) ** 2).sum().item() ** 0.5
    assert (round(mean, 4), round(std, 4)) == (train.mean[0], train.std[0])


def test_the_digits_are_the_same_in_float64():
    """equivalence measures rounding in a run in float64, which must have the same images."""
    expected = data.load("synthetic", "")[0].images
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            assert data.load("synthetic", "")[0].images.equal(expected)
    finally:
        torch.set_default_dtype(default)
