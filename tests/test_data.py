"""data.py: the synthetic digits, whole-batch loading, and every way in which getting MNIST can fail.

Downloads run through torchvision's real code, against a server in this process that has files of MNIST's format.
"""

import gzip
import hashlib
import http.server
import io
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets
from torchvision.transforms.functional import normalize
from tqdm import tqdm
from world import ROOT, forker

import data

CPU = torch.device("cpu")
WAYS_OUT = ("copy MNIST's four unpacked files", "--dataset synthetic")


# ---------------------------------------------------------------------------------------------- the synthetic digits


@pytest.fixture(scope="module")
def digits():
    return data.load("synthetic", "no folder is needed")


def digest(*sets):
    parts = [part for one in sets for part in (one.images, one.labels)]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def test_digits_are_the_same_in_every_process(digits, tmp_path):
    # Other threads, another hash seed and another global seed: none of them may matter.
    (tmp_path / "digits.py").write_text(
        "import hashlib, torch, data; torch.manual_seed(5); torch.set_num_threads(2)\n"
        "parts = [p for one in data.load('synthetic', '') for p in (one.images, one.labels)]\n"
        "print(hashlib.sha256(b''.join(p.numpy().tobytes() for p in parts)).hexdigest())"
    )
    end = forker().run(tmp_path / "digits.py", path=[ROOT])
    assert end.out.strip() == digest(*digits), end.err


def test_digits_leave_the_global_seed_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    data.load("synthetic", "", limit=1)
    assert torch.equal(torch.rand(4), expected)


def test_digits_shape_dtype_range(digits):
    for one, count in zip(digits, (12_000, 2_000), strict=True):
        assert one.images.shape == (count, 1, 28, 28) and one.images.dtype == torch.uint8
        assert one.labels.shape == (count,) and one.labels.dtype == torch.int64
        assert len(one) == count
        assert one.images.min() == 0 and one.images.max() >= 240  # the whole range is used
        pixels = one.images.double() / 255  # and mean and std are the ones that `batches` normalises with
        assert pixels.mean().item() == pytest.approx(one.mean[0], abs=0.01)
        assert pixels.std().item() == pytest.approx(one.std[0], abs=0.01)


def test_digits_labels_are_balanced(digits):
    for one in digits:
        counts = one.labels.bincount(minlength=10)
        expected = len(one) / 10
        assert len(counts) == 10
        assert (counts - expected).abs().max() < 5 * (0.9 * expected) ** 0.5  # five standard deviations


def test_digits_are_all_different(digits):
    images = torch.cat([one.images for one in digits])
    assert len({image.numpy().tobytes() for image in images}) == 14_000  # none of the test set in the training set


def test_digits_are_no_task_for_a_linear_model(digits):
    # Least squares against one-hot labels, in closed form: the pixels alone must not give the answer away.
    pixels, others = (torch.cat([d.images.flatten(1).double() / 255, torch.ones(len(d), 1)], 1) for d in digits)
    targets = torch.nn.functional.one_hot(digits[0].labels, 10).double()
    weights = torch.linalg.solve(pixels.T @ pixels + 0.1 * torch.eye(785), pixels.T @ targets)
    accuracy = ((others @ weights).argmax(1) == digits[1].labels).double().mean()
    assert 0.2 < accuracy < 0.8  # above chance: labels and images belong together


def test_limit_takes_the_first(digits):
    train, test = data.load("synthetic", "", limit=7)
    for some, whole in ((train, digits[0]), (test, digits[1])):
        assert len(some) == 7
        assert torch.equal(some.images, whole.images[:7]) and torch.equal(some.labels, whole.labels[:7])


# ----------------------------------------------------------------------------------------------------------- batches


def numbered(count, channels=1):
    """Images whose pixels are their index, times 10 in the second channel; labels 100 + index."""
    index = torch.arange(count)
    images = torch.stack([index * 10**channel for channel in range(channels)], 1).to(torch.uint8)
    images = images.view(count, channels, 1, 1).expand(-1, -1, 2, 3).contiguous()
    return data.Images(images, 100 + index, (0.5, 0.25)[:channels], (0.25, 2.0)[:channels])


def test_whole_batches_only(monkeypatch):
    def forbidden(self, index):
        raise AssertionError("one image was asked for")

    monkeypatch.setattr(data.Images, "__getitem__", forbidden)
    dataset = numbered(10)
    assert (
        sum(len(labels) for _, labels in data.batches(data.loader(dataset, 4, SequentialSampler(dataset)), CPU)) == 10
    )


def test_normalised_values():
    dataset = numbered(6, channels=2)
    before = dataset.images.clone()
    ((images, labels),) = data.batches(data.loader(dataset, 6, SequentialSampler(dataset)), CPU)
    assert images.dtype == torch.float32 and images.shape == (6, 2, 2, 3)
    assert labels.dtype == torch.int64 and labels.tolist() == [100, 101, 102, 103, 104, 105]
    for i in range(6):  # (pixel / 255 - mean) / std, channel by channel
        assert images[i, 0].flatten().tolist() == pytest.approx([(i / 255 - 0.5) / 0.25] * 6, abs=1e-6)
        assert images[i, 1].flatten().tolist() == pytest.approx([(10 * i / 255 - 0.25) / 2.0] * 6, abs=1e-6)
    assert torch.equal(dataset.images, before)


def test_same_as_torchs_loader_and_torchvisions_normalize(digits):
    """Compares with torch.utils.data's own image-by-image path and torchvision's normalize."""
    dataset = data.load("synthetic", "", limit=50)[0]
    ours = list(data.batches(data.loader(dataset, 16, SequentialSampler(dataset)), CPU))
    per_image = [dataset[i] for i in range(50)]  # a list: DataLoader collates it image by image
    theirs = list(DataLoader(per_image, 16))
    assert len(ours) == len(theirs) == 4
    for (images, labels), (raw, expected) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(images, normalize(raw.float() / 255, dataset.mean, dataset.std))
        assert torch.equal(labels, expected)


def test_a_pass_draws_no_global_random_numbers():
    """Else an evaluation would change the dropout of the training that follows."""
    dataset = numbered(10)
    loader = data.loader(dataset, 4, SequentialSampler(dataset))
    before = torch.get_rng_state()
    assert len(list(data.batches(loader, CPU))) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_last_batch_is_short():
    dataset = numbered(10)
    loader = data.loader(dataset, 4, SequentialSampler(dataset))
    assert len(loader) == 3
    assert [len(labels) for _, labels in data.batches(loader, CPU)] == [4, 4, 2]


@pytest.mark.parametrize("order", [[3, 0, 9, 9, 1], list(range(9, -1, -1)), []], ids=["some", "reversed", "none"])
def test_order_is_the_samplers(order):
    loader = data.loader(numbered(10), 2, order)
    seen = [(round((images[i, 0, 0, 0].item() * 0.25 + 0.5) * 255), labels[i].item() - 100)
            for images, labels in data.batches(loader, CPU) for i in range(len(labels))]  # fmt: skip
    assert seen == [(i, i) for i in order]


def test_distributed_sampler():
    dataset = numbered(10)
    sampler = DistributedSampler(dataset, num_replicas=3, rank=1, shuffle=False)
    labels = [labels.tolist() for _, labels in data.batches(data.loader(dataset, 3, sampler), CPU)]
    assert labels == [[101, 104, 107], [100]]  # 10 is padded to 12 with the first two


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("terminal", "rank", "bar"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_progress_bar_of_rank_0s_share_on_a_terminal(monkeypatch, terminal, rank, bar):
    """Whatever the environment says: a world of one has no rank in it, and horovodrun's has other names."""
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", "5")
    dataset = numbered(4)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=False)
    assert len(list(data.batches(data.loader(dataset, 1, sampler), CPU))) == 2
    assert ("0/2" in stderr.getvalue()) == bar
    list(data.batches(data.loader(dataset, 1, SequentialSampler(dataset)), CPU))  # nobody's share: all of it
    assert ("0/4" in stderr.getvalue()) == terminal


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_bar_of_rank_0_where_all_have_the_same_data(monkeypatch, rank):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)  # DataLoader asks, too
    dataset = numbered(4)
    assert len(list(data.batches(data.loader(dataset, 1, SequentialSampler(dataset)), CPU))) == 4
    assert ("0/4" in sys.stderr.getvalue()) == (rank == 0)


@pytest.mark.parametrize("channels", [1, 2])
def test_images_have_the_layout_of_the_convolutions(channels):
    """Else cuDNN gives the first gradient other strides than DDP's bucket has, and DDP warns on every rank."""
    dataset = numbered(3, channels)
    for images in dataset, data.Augmented(dataset):
        ((batch, _),) = data.batches(data.loader(images, 3, range(3)), CPU)
        assert batch.stride() == (6 * channels, 1, 3 * channels, channels)  # of [3, channels, 2, 3]


# ------------------------------------------------------------------------------------------------------ augmentation


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
    return found


def same(one, other):
    """The part of the examples that are cropped and flipped alike."""
    return (one == other).all(1).double().mean().item()


def test_each_epoch_has_crops_and_flips_of_its_own():
    epochs = [crops_and_flips(seed=3, epoch=epoch) for epoch in range(4)]
    for draws in epochs:
        assert [column.unique().tolist() for column in draws.T] == [list(range(9)), list(range(9)), [0, 1]]
        assert (draws / torch.tensor([8, 8, 1])).mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.1)
    for number, draws in enumerate(epochs):
        others = [crops_and_flips(seed=4, epoch=number), *epochs[:number]]
        assert max(same(draws, other) for other in others) < 0.04  # by chance one in 9 x 9 x 2


def test_crops_and_flips_depend_on_seed_epoch_and_example_alone():
    expected = crops_and_flips(seed=3, epoch=2)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1)).tolist()
    torch.rand(7)  # other numbers that were drawn
    assert torch.equal(crops_and_flips(seed=3, epoch=2, batch_size=7, order=order), expected)


# ----------------------------------------------------------------------------------------- errors without a download


def message(*args):
    """What prepare says; it must be one line, and the same through `error`."""
    with pytest.raises(data.DataError) as raised:
        data.prepare(*args)
    text = str(raised.value)
    assert text and "\n" not in text
    return text


def left(folder):
    """All that is in a data folder, but for what may stay after a failure."""
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")} - {
        "MNIST",
        "MNIST/raw",
        "MNIST/raw/.lock",
    }


def test_unknown_data_set(tmp_path):
    text = message("nope", str(tmp_path))
    assert all(word in text for word in ("'nope'", *data.DATASETS))


def test_error_is_called_instead_of_raising(tmp_path):
    told = []
    data.prepare("nope", str(tmp_path), error=told.append)
    assert told == [message("nope", str(tmp_path))]


def test_synthetic_touches_nothing(tmp_path):
    data.prepare("synthetic", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_data_dir_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    text = message("mnist", str(file))
    assert f"can't use --data-dir {file}" in text and ("Not a directory" in text or "File exists" in text)
    assert file.read_text() == "precious"


def test_unreadable_folder(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root reads everything
    try:
        text = message("mnist", str(folder))
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
    assert f"can't use --data-dir {folder} (Permission denied: " in text
    assert left(folder) == set()


@pytest.mark.parametrize("bad", list(data.MNIST_MD5))
def test_corrupt_file(tmp_path, monkeypatch, bad):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    monkeypatch.setattr(data, "MNIST_MD5", {file: hashlib.md5(file.encode()).hexdigest() for file in data.MNIST_MD5})
    for file in data.MNIST_MD5:
        (raw / file).write_text(file)
    data.prepare("mnist", str(tmp_path))  # all is well
    (raw / bad).write_text("something else")
    text = message("mnist", str(tmp_path))
    assert f"{raw / bad} is corrupt: delete it" in text and all(way in text for way in WAYS_OUT)
    assert left(tmp_path) == {f"MNIST/raw/{file}" for file in data.MNIST_MD5}  # nothing deleted, nothing new


@pytest.mark.slow
def test_lock_held_by_another_process(tmp_path, monkeypatch, server):
    monkeypatch.setattr(data, "LOCK_TIMEOUT", 0.3)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    code = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]): print('held', flush=True); input()"
    command = [sys.executable, "-c", code, raw / ".lock"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        started = time.monotonic()
        text = message("mnist", str(tmp_path))
        assert time.monotonic() - started < 20
        assert f"{raw / '.lock'} for 0.3 s" in text and all(way in text for way in WAYS_OUT)
        assert server.gets == [] and left(tmp_path) == set()
    finally:
        holder.communicate("\n")
    data.prepare("mnist", str(tmp_path))  # once the lock is free, it goes on


# ---------------------------------------------------------------------------------------------------------- downloads


@pytest.fixture(scope="module")
def files():
    """Files of MNIST's names, format and sizes: black images, labels that count. Packed, they are small."""

    def idx(content, *shape):
        return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + content

    plain = {
        "train-images-idx3-ubyte": idx(bytes(60_000 * 784), 60_000, 28, 28),
        "train-labels-idx1-ubyte": idx(bytes(range(10)) * 6_000, 60_000),
        "t10k-images-idx3-ubyte": idx(bytes(10_000 * 784), 10_000, 28, 28),
        "t10k-labels-idx1-ubyte": idx(bytes(range(9, -1, -1)) * 1_000, 10_000),
    }
    packed = {f"{name}.gz": gzip.compress(content, 1) for name, content in plain.items()}
    return SimpleNamespace(
        packed=packed,
        resources=[(name, hashlib.md5(content).hexdigest()) for name, content in packed.items()],
        md5={name: hashlib.md5(content).hexdigest() for name, content in plain.items()},
    )


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        # torchvision first asks for a redirection, with a GET that has a header "Method: HEAD" and isn't read.
        if self.headers["Method"] != "HEAD":
            self.server.gets.append(self.path[1:])
        self.answer(body=True)

    def answer(self, body):
        server, name = self.server, self.path[1:]
        content = server.packed[name]
        fault = server.fault if name == server.faulty else ""
        time.sleep(server.delay)
        if fault == "silent":
            server.over.wait()
            return
        if fault == "no HTTP":
            self.wfile.write(b"welcome\r\n")
            return
        self.send_response(503 if fault == "unavailable" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body or fault == "unavailable":
            return
        if fault == "wrong":
            content = content[:-1] + b"?"
        self.wfile.write(content[: len(content) // 2] if fault in ("truncated", "stalled") else content)
        self.wfile.flush()
        if fault == "stalled":
            server.over.wait()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(files, monkeypatch):
    """A mirror with the generated files. `fault` is how it fails for the file `faulty`; `gets` is what was fetched."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.packed, server.gets, server.delay, server.over = files.packed, [], 0, threading.Event()
    server.fault, server.faulty = "", "t10k-images-idx3-ubyte.gz"  # the third: two are whole by then
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(datasets.MNIST, "mirrors", [server.url])
    monkeypatch.setattr(datasets.MNIST, "resources", files.resources)
    monkeypatch.setattr(data, "MNIST_MD5", files.md5)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def refused():
    """The address of a port that refuses connections: bound, so that nobody else gets it, and not listened on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}/"


def test_download(tmp_path, server, capfd):
    data.prepare("mnist", str(tmp_path / "new" / "folder"))
    assert sorted(server.gets) == sorted(server.packed)
    assert capfd.readouterr().out == ""
    folder = tmp_path / "new" / "folder"
    assert left(folder) == {f"MNIST/raw/{file}" for file in data.MNIST_MD5}

    train, test = data.load("mnist", str(folder))
    assert train.images.shape == (60_000, 1, 28, 28) and test.images.shape == (10_000, 1, 28, 28)
    assert train.images.dtype == torch.uint8 and train.labels.dtype == torch.int64
    assert train.labels[:10].tolist() == list(range(10)) and test.labels[:10].tolist() == list(range(9, -1, -1))
    assert len(data.load("mnist", str(folder), limit=5)[1]) == 5

    # What is complete is only read: no request, no lock, so that the folder may be read-only.
    (folder / "MNIST" / "raw" / ".lock").unlink(missing_ok=True)
    server.gets.clear()
    data.prepare("mnist", str(folder))
    assert server.gets == [] and not (folder / "MNIST" / "raw" / ".lock").exists()


@pytest.mark.slow
def test_download_of_what_is_missing(tmp_path, server):
    data.prepare("mnist", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    before = {file: (raw / file).stat().st_ino for file in data.MNIST_MD5}
    (raw / "t10k-labels-idx1-ubyte").unlink()
    data.prepare("mnist", str(tmp_path))
    data.load("mnist", str(tmp_path))
    kept = [file for file, inode in before.items() if (raw / file).stat().st_ino == inode]
    assert set(kept) >= set(data.MNIST_MD5) - {"t10k-labels-idx1-ubyte"}  # another process may be reading them


def test_a_download_leaves_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # tqdm's own default

    def source(root, download):
        list(tqdm([1], file=io.StringIO()))

    threads = threading.active_count()
    data._download(source, tmp_path, [])
    assert threading.active_count() == threads


def test_second_mirror(tmp_path, server, refused):
    datasets.MNIST.mirrors = [refused, server.url]  # undone by the fixture `server`
    data.prepare("mnist", str(tmp_path))
    assert sorted(server.gets) == sorted(server.packed)


def test_refused(tmp_path, server, refused):
    datasets.MNIST.mirrors = [refused]
    text = message("mnist", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    assert f"MNIST is not in {raw} and can't be downloaded" in text and "refused" in text
    assert all(way in text for way in WAYS_OUT)
    assert left(tmp_path) == set()


MORE = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("unavailable", "silent", "no HTTP")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["truncated", "wrong", "stalled", *MORE])
def test_failing_server(tmp_path, server, monkeypatch, fault, capfd):
    monkeypatch.setattr(data, "DOWNLOAD_TIMEOUT", 0.3)
    before = socket.getdefaulttimeout()
    server.fault = fault
    started = time.monotonic()
    text = message("mnist", str(tmp_path))
    assert time.monotonic() - started < 30
    assert f"MNIST is not in {tmp_path / 'MNIST' / 'raw'} and can't be downloaded" in text
    assert all(way in text for way in WAYS_OUT)
    assert left(tmp_path) == set()
    assert socket.getdefaulttimeout() == before
    assert capfd.readouterr().out == ""

    server.fault = ""  # and the next attempt isn't hampered by this one
    data.prepare("mnist", str(tmp_path))


@pytest.mark.slow
def test_two_processes_download_once(tmp_path, server, files):
    server.delay = 0.1  # eight requests: a download takes 0.8 s, and both processes come within that
    program = tmp_path / "twice.py"
    program.write_text(
        "import json, os, sys, data; from torchvision import datasets; MNIST = datasets.MNIST\n"
        "MNIST.mirrors, MNIST.resources, data.MNIST_MD5 = json.loads(sys.argv[1])\n"
        "other = os.fork()\n"
        "data.prepare('mnist', sys.argv[2]); print(*map(len, data.load('mnist', sys.argv[2])), flush=True)\n"
        "sys.exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))"
    )
    settings = json.dumps([[server.url], files.resources, files.md5])
    end = forker().run(program, settings, tmp_path / "data", path=[ROOT])
    assert end[:2] == (0, "60000 10000\n" * 2), end
    assert sorted(server.gets) == sorted(server.packed)
    assert left(tmp_path / "data") == {f"MNIST/raw/{file}" for file in data.MNIST_MD5}


# --------------------------------------------------------------------------------------------------------- real MNIST


@pytest.fixture(scope="module")
def mnist():
    folder = os.environ.get("MNIST_DIR")
    if not folder:
        folder = ROOT.parent / "shared" / "data"
        if not (folder / "MNIST" / "raw").exists():
            pytest.skip("no real MNIST here: set MNIST_DIR to a folder that holds MNIST/raw")
    data.prepare("mnist", str(folder))
    return data.load("mnist", str(folder))


def test_mnist_shape_and_label_counts(mnist):
    train, test = mnist
    assert train.images.shape == (60_000, 1, 28, 28) and test.images.shape == (10_000, 1, 28, 28)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    # Counts as published, e.g. in the data set's card at huggingface.co/datasets/ylecun/mnist
    assert train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_mnist_mean_and_std(mnist):
    train, test = mnist
    counts = train.images.flatten().bincount(minlength=256).double()  # exact: no rounding in the sums
    values = torch.arange(256).double() / 255
    mean = (counts * values).sum() / counts.sum()
    std = ((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt()
    assert (round(mean.item(), 4),) == train.mean == test.mean
    assert (round(std.item(), 4),) == train.std == test.std


# ------------------------------------------------------------------------------------------------------- the allocator

STEPS = """
import os, resource, torch, data
dataset = data.Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), (0.5,), (0.5,))
data.loader(dataset, 1, range(2))
def step():
    return [torch.ones(6_000_000) for _ in range(4)]  # 24 MB each, all freed at once
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc: data.py leaves the allocator alone")
def test_the_memory_of_a_step_is_kept_for_the_next(tmp_path):
    """Pages of 4 KiB that the system had to give again; with kept memory there are next to none."""
    (tmp_path / "steps.py").write_text(STEPS)
    pages = 5 * 4 * 24_000_000 // 4096
    usual = {name: None for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))}
    theirs = {"MALLOC_ARENA_MAX": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}
    for environment, kept in ({}, True), (theirs[0], False), (theirs[1], False):
        end = forker().run(tmp_path / "steps.py", path=[ROOT], **(usual | environment))
        assert (int(end.out) < pages / 10) == kept, (environment, end.out, end.err)
