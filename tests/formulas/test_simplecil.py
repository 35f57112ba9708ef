"""SimpleCIL's rows are compared with class means in numpy, and its decisions with cosines by hand. Its forward transfer
is the score that it reaches."""

from typing import Any

import numpy as np
import pytest
import torch
from steps import array, make
from torch import Tensor

from bace.core.trainer import Trainer


def learned(tiny: Any, modality: str, **changes: Any) -> Trainer:
    method, stream, config = make(tiny, modality, {"name": "simplecil"}, **{"benchmark.tasks": [2, 1, 2], **changes})
    trainer = Trainer(method, stream, config)
    trainer.run()
    return trainer


@pytest.mark.parametrize("modality", ["image", "text"])
def test_rows_are_the_mean_clean_features_of_their_classes(tiny: Any, modality: str) -> None:
    method = learned(tiny, modality).method
    stream = method.stream
    for task in stream:
        with stream.licence("a test", task.train):
            features, targets = method.outputs(task.train).features, stream.labels(task.train)[1]
        for c in task.classes:
            expected = array(features[targets == c]).mean(0)
            np.testing.assert_allclose(array(method.model.head.weight[c]), expected, rtol=0, atol=1e-12)


def test_decisions_are_by_the_cosine(tiny: Any) -> None:
    """There are two classes. The mean of (4, 0) and (0, 2) is (2, 1), and that of (0, 5) is (0, 5). (1, 1) has the
    cosines 3 / sqrt 10 and 1 / sqrt 2. (0.1, 0.4) is nearer to the first mean, but cosines give it to the second
    class."""
    method, stream, _ = make(tiny, "image", {"name": "simplecil"})
    method.now.show_task(stream[0])
    method.grow(stream[0])
    width = method.model.head.width
    x = torch.zeros(3, width)
    x[:, :2] = torch.tensor([[4.0, 0.0], [0.0, 2.0], [0.0, 5.0]])
    method.observe(x, torch.tensor([0, 0, 1]))
    method.after_epoch(None)
    asked = torch.zeros(2, width)
    asked[:, :2] = torch.tensor([[1.0, 1.0], [0.1, 0.4]])
    scores: Tensor = method.model.head(asked)
    cosines = [[3 / 10**0.5, 1 / 2**0.5], [0.6 / (5 * 0.17) ** 0.5, 0.4 / 0.17**0.5]]
    np.testing.assert_allclose(array(scores), cosines, rtol=1e-12)
    assert scores.argmax(1).tolist() == [0, 1]


def test_forward_transfer_is_the_score_with_the_rows_that_learning_gives(tiny: Any) -> None:
    trainer = learned(tiny, "image", **{"measure.fwt": True})
    reached = [row[-1] for row in trainer.results.matrix[1:]]
    assert trainer.results.before == pytest.approx(reached)


def test_nothing_is_trained_and_every_example_counts_once(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "simplecil"}, **{"train.epochs": 7})
    before = {name: p.clone() for name, p in method.model.encoder.named_parameters()}
    Trainer(method, stream, config).run()
    assert all(torch.equal(p, before[name]) for name, p in method.model.encoder.named_parameters())
    assert method.statistics.counts.tolist() == [10.0] * 4
