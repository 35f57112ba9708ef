"""Training equals ER bit for bit. The statistics are compared with separate passes over the data, and the rescaled
scores with hand-computed numbers."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from steps import Array, array, assert_equal_bits, make, softmax, weights
from torch import Tensor, nn

import bace
from bace.config.parse import config_from
from bace.core.stream import Stream
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.experiments.assemble import assemble
from bace.methods.il2m import IL2M
from bace.models.model import Output


class Fixed(nn.Module):
    """A network that returns these logits."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.tensor(logits, dtype=torch.float64)

    def forward(self, batch: Batch) -> Output:
        return Output(self.logits, self.logits)


@dataclass
class Classes:
    """The part of a stream that a prediction reads."""

    forgotten: tuple[int, ...]
    eligible = Stream.eligible


def rectifier(logits: Any, score: str = "prob", forgotten: tuple[int, ...] = (), **statistics: Any) -> Any:
    """Return a method with hand-made statistics. Classes 0 and 1 came with task 0, class 2 with task 1, and classes 3
    and 4 with task 2."""
    method: Any = IL2M(score=score)  # type: ignore[arg-type]
    method.model = Fixed(logits)
    method.stream = Classes(forgotten)
    method.learned = torch.tensor([0, 0, 1, 2, 2])
    for name, values in statistics.items():
        setattr(method, name, torch.tensor(values, dtype=torch.float64))
    return method


# mu_init / mu_cur: 3, 2, 1 (old), 1, 1 (new); conf(2) / conf(k): 0.6 / 0.9 = 2/3, 0.6 / 0.8 = 3/4
INITIAL, CURRENT, CONFIDENCE = [0.9, 0.8, 0.7, 0.5, 0.6], [0.3, 0.4, 0.7, 0.5, 0.6], [0.9, 0.8, 0.6]
RATIO = np.array([2.0, 4 / 3, 0.75, 1.0, 1.0])
STATISTICS = {"initial": [INITIAL] * 2, "current": [CURRENT] * 2, "confidence": [CONFIDENCE] * 2}


def shown(method: Any, examples: Tensor) -> Batch:
    with method.stream.licence("test", examples):
        found: Batch = method.stream.batch(examples)
    return found


# -- training


def test_by_default_the_memory_is_shuffled_into_the_tasks_data() -> None:
    assert (IL2M().policy.mode, IL2M(mode="batch").policy.mode) == ("concat", "batch")


@pytest.mark.parametrize(
    "options", [{"mode": "concat"}, {"mode": "batch"}, {"mode": "batch", "reduction": "joint"}], ids=str
)
def test_training_and_memory_are_ers_bit_for_bit(tiny: Any, options: dict[str, str]) -> None:
    er, il2m = (bace.run(tiny.settings("text", method={"name": name, **options})) for name in ("er", "il2m"))
    assert_equal_bits(weights(er.method.model), weights(il2m.method.model))
    assert_equal_bits(weights(er.method.memory), weights(il2m.method.memory))


# -- the decision


def test_probabilities_of_old_classes_are_rescaled_where_a_new_class_wins() -> None:
    p = np.array([[0.35, 0.03, 0.01, 0.6, 0.01], [0.1, 0.1, 0.1, 0.3, 0.4]])
    scores = rectifier(np.log(p), **STATISTICS).predict(None)
    expected = p * RATIO
    np.testing.assert_allclose(softmax(array(scores)), expected / expected.sum(1, keepdims=True))
    assert scores.argmax(1).tolist() == [0, 4]  # 0.7 beats 0.6; 0.2 does not beat 0.4


def test_logits_of_old_classes_are_rescaled_where_a_new_class_wins() -> None:
    z = np.array([[1.5, -1.0, 0.0, 2.0, 0.5], [0.5, 0.2, 1.0, 0.1, 1.9]])
    scores = rectifier(z, "logits", **STATISTICS).predict(None)
    np.testing.assert_allclose(array(scores), z * RATIO)
    assert scores.argmax(1).tolist() == [0, 4]


@pytest.mark.parametrize("score", ["prob", "logits"])
def test_rows_with_an_old_class_on_top_are_untouched_and_new_scores_never_change(score: str) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 5))
    scores = array(rectifier(z, score, **STATISTICS).predict(None))
    old_on_top = z.argmax(1) < 3
    assert 50 < old_on_top.sum() < 150  # each row is treated by itself
    assert (scores[old_on_top] == z[old_on_top]).all()
    assert (scores[:, 3:] == z[:, 3:]).all()
    assert (scores[~old_on_top, :3] != z[~old_on_top, :3]).all()


def test_a_forgotten_class_is_never_on_top() -> None:
    """Class 4 is new and has the highest logit. If it is forgotten, the old class 0 wins the first row, which then does
    not change, and the new class 3 wins the second row."""
    logits = [[2.0, 0.0, 0.0, 1.0, 3.0], [0.0, 1.0, 0.0, 2.0, 3.0]]
    known = rectifier(logits, **STATISTICS).predict(None)
    forgot = rectifier(logits, forgotten=(4,), **STATISTICS).predict(None)
    np.testing.assert_allclose(array(known), logits + np.log(RATIO))
    np.testing.assert_allclose(array(forgot), [logits[0], logits[1] + np.log(RATIO)])


@pytest.mark.filterwarnings("ignore:IL2M")
@pytest.mark.parametrize("score", ["prob", "logits"])
def test_ratios_of_one_give_ers_predictions_exactly(tiny: Any, score: str) -> None:
    """mu_cur = mu_init and confidences are equal, for any network."""
    methods = ({"name": "er", "mode": "concat"}, {"name": "il2m", "score": score})
    er, il2m = (bace.run(tiny.settings("image", method=m)) for m in methods)
    method: Any = il2m.method
    method.initial = method.initial.abs() + 0.1
    method.current, method.confidence = method.initial.clone(), torch.full_like(method.confidence, 0.7)
    batch = shown(method, torch.cat([task.test for task in method.stream]))
    assert method.kind() == ["prob", "logits"].index(score)
    assert torch.equal(method.predict(batch), er.method.predict(batch))


def test_one_task_has_nothing_to_rescale(tiny: Any) -> None:
    er, il2m = (bace.run(tiny.settings("image", method=name, **{"benchmark.tasks": [3]})) for name in ("er", "il2m"))
    batch = shown(il2m.method, il2m.method.stream[0].test)
    assert torch.equal(il2m.method.predict(batch), er.method.predict(batch))


# -- the statistics


def scores_one_by_one(method: Any, examples: Tensor) -> tuple[Array, Array]:  # (2, rows, classes), (rows,)
    """Return probabilities and logits of the clean view in eval mode."""
    method.model.eval()
    found = []
    for example in examples.tolist():
        with torch.no_grad():
            found.append(array(method.model(shown(method, torch.tensor([example]))).logits)[0])
    logits = np.stack(found)
    return np.stack([softmax(logits), logits]), method.stream.targets[examples].numpy()


@pytest.mark.parametrize("modality", ["image", "text"])  # images have random views, the text encoder has dropout
def test_statistics_of_a_class_are_frozen_when_it_was_new_and_refreshed_on_its_exemplars(
    tiny: Any, modality: str
) -> None:
    config = config_from(tiny.settings(modality, method="il2m", **{"train.lr": 0.05}))
    learned, stream = assemble(config)
    method: Any = learned
    trainer = Trainer(method, stream, config)
    initial, confidence = np.zeros((2, 0)), np.zeros((2, 0))
    sizes = []
    for task in stream:
        exemplars = method.memory.examples.clone()  # as in training, before they are cut to the new quota
        trainer.learn(task)
        scores, targets = scores_one_by_one(method, task.train)
        new = np.stack([scores[:, targets == c, c].mean(1) for c in task.classes], 1)
        initial = np.concatenate([initial, new], 1)
        confidence = np.concatenate([confidence, scores.max(2).mean(1)[:, None]], 1)
        np.testing.assert_allclose(array(method.initial), initial, rtol=1e-4)
        np.testing.assert_allclose(array(method.confidence), confidence, rtol=1e-4)
        current = initial.copy()
        if len(exemplars):
            scores, targets = scores_one_by_one(method, exemplars)
            for c in range(task.classes.start):
                current[:, c] = scores[:, targets == c, c].mean(1)
        np.testing.assert_allclose(array(method.current), current, rtol=1e-4)
        if task.index:
            assert (np.abs(current - initial)[:, : task.classes.start] > 1e-4).all()
        assert method.learned.tolist() == [t.index for t in stream[: task.index + 1] for _ in t.classes]
        sizes.append(len(exemplars))
    assert sizes == [0, 10, 9]


def test_without_exemplars_a_class_counts_as_unchanged(tiny: Any) -> None:
    learned, stream, config = make(tiny, "image", {"name": "il2m"}, **{"memory.size": 0})
    Trainer(learned, stream, config).run()
    method: Any = learned
    assert torch.equal(method.current, method.initial)
    batch = shown(method, torch.cat([task.test for task in stream]))
    assert torch.isfinite(method.predict(batch)).all()


@pytest.mark.parametrize("name", ["initial", "current", "confidence"])
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_probabilities_are_used_wherever_a_mean_logit_is_not_positive(name: str, value: float) -> None:
    z = np.log(np.array([[0.35, 0.03, 0.01, 0.6, 0.01]]))
    spoiled = {key: [list(row) for row in rows] for key, rows in STATISTICS.items()}
    spoiled[name][1][0] = value
    expected = rectifier(z, "prob", **STATISTICS).predict(None)
    assert torch.equal(rectifier(z, "logits", **spoiled).predict(None), expected)
    assert not torch.equal(rectifier(z, "logits", **STATISTICS).predict(None), expected)


def test_the_use_of_probabilities_in_place_of_logits_is_said(tiny: Any) -> None:
    settings = tiny.settings("image", method={"name": "il2m", "score": "logits"}, **{"head.sigma_init": 1.0})
    spoil = {"train.lr": 0.0}  # random rows: for some classes the mean cosine with their own data is negative
    with pytest.warns(UserWarning, match="a mean logit is not positive"):
        result = bace.run({**settings, **spoil})
    method: Any = result.method
    assert method.kind() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bace.run({**settings, **spoil, "method": "il2m"})


def test_tokens_are_refused_with_the_reason(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"not defined for token data \(refused: mean scores of a class"):
        assemble(config_from(tiny.settings("token", method="il2m")))
