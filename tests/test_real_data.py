"""Real pictures and a really pre-trained backbone, where they are present."""

from pathlib import Path

import torch
import torch.nn.functional as F

from bace.runner import assemble
from bace.settings import config_from
from bace.trainer import Trainer


def test_vit_tiny_learns_ten_classes_of_cifar100_better_than_nearest_class_mean(
    real_data: Path, real_models: Path
) -> None:
    settings = {
        "benchmark": "my-images",
        "benchmark.path": str(real_data / "cifar100"),
        "benchmark.tasks": [10],
        "benchmark.train_per_class": 20,
        "benchmark.test_per_class": 10,
        "benchmark.augment": False,
        "backbone": str(real_models / "vit-tiny-patch16-224"),
        "backbone.image_size": 96,
        "backbone.freeze": 8,
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
