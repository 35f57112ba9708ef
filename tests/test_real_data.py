"""Real pictures and a real pre-trained backbone, if they are present."""

from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
import torch.nn.functional as F

from bace.config.parse import config_from
from bace.core.trainer import Trainer
from bace.experiments.assemble import assemble
from bace.methods import METHODS, find_method


@pytest.fixture(scope="module")
def ten_classes(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first 20 training and 10 test pictures of the first ten classes of CIFAR-100, in its own layout, because each
    method would take half a second to read the whole set."""
    folder = tmp_path_factory.mktemp("ten-classes")
    for path in sorted((real_data / "cifar100").rglob("*.parquet")):
        table, count = parquet.read_table(path), 20 if "train" in path.name else 10
        labels = torch.tensor(table["fine_label"].to_pylist())
        taken = torch.cat([(labels == c).nonzero().flatten()[:count] for c in range(10)])
        small = folder / path.relative_to(real_data / "cifar100")
        small.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.take(arrow.array(taken.sort().values.tolist())), small)
    return str(folder)


def test_vit_tiny_learns_ten_classes_of_cifar100_better_than_nearest_class_mean(
    ten_classes: str, real_models: Path
) -> None:
    settings = {
        "benchmark": "my-images",
        "benchmark.path": ten_classes,
        "benchmark.tasks": [10],
        "benchmark.train_per_class": 20,
        "benchmark.test_per_class": 10,
        "benchmark.augment": False,
        "backbone": str(real_models / "vit-tiny-patch16-224"),
        "backbone.image_size": 64,
        "backbone.freeze": 8,
        "backbone.cache": 100,
        "method": "seq",
        "train.batch_size": 20,
        "train.lr": 0.01,
    }
    config = config_from(settings)
    method, stream = assemble(config)
    task = stream[0]
    with stream.licence("evaluation", torch.cat([task.train, task.test])):
        shown, asked = (F.normalize(method.outputs(ids).features, dim=1) for ids in (task.train, task.test))
        (_, taught), (_, truth) = stream.labels(task.train), stream.labels(task.test)
    means = torch.stack([shown[taught == c].mean(0) for c in task.classes])
    nearest_mean = 100 * float((torch.cdist(asked, means).argmin(1) == truth).float().mean())
    results = Trainer(method, stream, config).run()
    assert nearest_mean > 20  # the backbone is really pre-trained
    assert results.matrix[0][0] > nearest_mean


# shorter settings for parts that take long here and are tested elsewhere
FEWER = {"passes": 24, "anchor_steps": 10, "memory_steps": 10, "fuse_steps": 10, "tune_steps": 0}
FEWER |= {"balanced_epochs": 3, "linear_epochs": 10, "tune_epochs": 8, "M": 500, "expansion": 500}
FEWER |= {"init_epochs": 3, "expand_epochs": 2, "fuse_epochs": 2, "boost_epochs": 3, "compress_epochs": 3}
FEWER |= {"energy_steps": 1}
# L2P's head starts at zero, and PASS distinguishes four rotations of each class, so three epochs of five steps are too
# few
EPOCHS = {"L2P": 5, "PASS": 6}


@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_a_method_learns_real_pictures(ten_classes: str, real_models: Path, method: str) -> None:
    """On two tasks of four classes of CIFAR-100 at 48 pixels, a few steps each, losses are finite (or the trainer
    stops) and fall."""
    settings = {
        "benchmark": "my-images",
        "benchmark.path": ten_classes,
        "benchmark.tasks": [4, 4],
        "benchmark.train_per_class": 12,
        "benchmark.test_per_class": 8,
        "benchmark.augment": False,
        "backbone": str(real_models / "vit-tiny-patch16-224"),
        "backbone.image_size": 48,
        "backbone.freeze": 8,
        "backbone.cache": 100,
        "memory": 20,
        "train.batch_size": 12,
        "train.epochs": EPOCHS.get(method, 3),
        "train.lr": 0.003,  # a rate that suits linear heads on features with the length of a LayerNorm's output
        "measure.fwt": False,
    }
    fewer = {name: value for name, value in FEWER.items() if name in find_method(method).hyper_parameters()}
    config = config_from({**settings, "method": {"name": method, **fewer}})
    events: list[dict[str, Any]] = []
    results = Trainer(*assemble(config), config, log=events.append).run()
    losses = [event["loss"] for event in events if event["event"] == "epoch" and event["task"] == 1]
    assert losses[-1] is None or losses[-1] < losses[0]  # None is a stage without gradient
    assert results.matrix[0][0] > 40  # chance is 25
    assert len(results.matrix) == 2
