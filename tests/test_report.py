"""report.py by itself, with metrics of one's own; test_cifar10.py reads back what a whole run leaves behind."""

import csv
import io
import json

import pytest
import torch.utils.tensorboard  # noqa: F401  the forked processes find it imported, and matplotlib, too
from PIL import Image
from test_distributed import WORLDS, run

import checkpoint
import report


@pytest.fixture(scope="module", autouse=True)
def a_first_picture():
    report.curves([], "")


def _reports(rank, n, folder):
    folders = [report.new_folder(folder, "net") for _ in range(3)]
    assert len(set(folders)) == 3 and all(path.is_dir() for path in folders)  # in one second, probably
    assert checkpoint.from_primary(folders) == folders
    reporter = report.Report(folders[0], {"lr": 0.5})
    for epoch in 1, 2:
        reporter.add({"epoch": epoch, "validation_f1": epoch / 4})
        reporter.log(f"epoch {epoch}")
    reporter.close()
    assert [row["validation_f1"] for row in reporter.history] == [0.25, 0.5]  # on every rank
    again = report.Report(folders[0], {"lr": 0.5}, reporter.history[:1])  # resumed after the first epoch
    assert again.history == reporter.history[:1]
    again.close()
    return folders[0]


@WORLDS
def test_metrics_of_ones_own(tmp_path, n, capfd):
    folder = run(_reports, n, tmp_path)
    printed = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("distributed: ")]
    assert printed == ["epoch 1", "epoch 2"]
    assert [line[21:] for line in (folder / "log.txt").read_text().splitlines()] == printed
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.5}
    with open(folder / "metrics.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{"epoch": "1", "validation_f1": "0.25"}]
    with Image.open(folder / "curves.png") as picture:
        assert picture.size == (1200, 480)


def test_curves_of_no_epoch_at_all():
    with Image.open(io.BytesIO(report.curves([], "nothing yet"))) as picture:
        assert picture.size == (1200, 480)
