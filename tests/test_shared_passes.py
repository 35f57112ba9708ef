"""What is read several times passes the encoder once: test examples for all tasks and rules of prediction, and the
training examples of a task after it was learned for statistics, class means, herding and studies."""

from typing import Any

import pytest
import torch
from checks import short

from bace.config.parse import config_from
from bace.core.evaluation import evaluate_seen
from bace.core.study import Observation
from bace.core.trainer import Trainer
from bace.experiments.assemble import assemble
from bace.methods import METHODS
from bace.models.encoder import Encoder


def learned(tiny: Any, modality: str, method: Any, **changes: Any) -> Trainer:
    """Two tasks of a run, the second one trained but without what comes after training."""
    config = config_from(tiny.settings(modality, method=short(method), **{"measure.fwt": False, **changes}))
    made, stream = assemble(config)
    trainer = Trainer(made, stream, config)
    for task in stream[:2]:
        trainer.learn(task)
    return trainer


def passed(trainer: Trainer) -> float:
    return trainer.method.model.encoder.passes.total


@pytest.mark.parametrize("method", ["er", "icarl", "bic", "podnet"])
def test_evaluation_passes_each_test_example_once(tiny: Any, method: str) -> None:
    trainer = learned(tiny, "image", method)
    before, stream = passed(trainer), trainer.stream
    row, detail = evaluate_seen(trainer.method, stream[1])
    assert passed(trainer) - before == pytest.approx(sum(len(task.test) for task in stream[:2]))
    assert len(row) == 2
    assert all(len(scores) == 2 for scores in detail["scorers"].values())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_predictions_from_a_shared_pass_are_those_of_passes_of_their_own(tiny: Any, method: Any) -> None:
    """Also of methods that pass a batch several times, each time with other adapters or gates."""
    trainer = learned(tiny, min(method.modalities), method.title)
    made, stream = trainer.method, trainer.stream
    made.eval()
    with stream.licence("a test", stream[1].test):
        batch = stream.batch(stream[1].test)
    alone = made.predict(batch)
    with made.model.passed_once(batch):
        for scorer in made.scorers:
            made.predict(batch, scorer)
        torch.testing.assert_close(made.predict(batch), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_the_test_examples_of_all_tasks_are_predicted_in_common_batches(
    tiny: Any, modality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = learned(tiny, modality, "er")
    sizes, forward = [], Encoder.forward

    def watched(encoder: Encoder, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        sizes.append(len(next(iter(inputs.values()))))
        return forward(encoder, inputs, *arguments, **options)

    monkeypatch.setattr(Encoder, "forward", watched)
    evaluate_seen(trainer.method, trainer.stream[1])
    assert sizes == [sum(len(task.test) for task in trainer.stream[:2])]


def test_scores_in_common_batches_are_those_of_each_task_alone(tiny: Any) -> None:
    trainer = learned(tiny, "text", "icarl")
    method, stream = trainer.method, trainer.stream
    row, detail = evaluate_seen(method, stream[1])
    for scorer, scores in {None: row, **detail["scorers"]}.items():
        for task, score in zip(stream[:2], scores, strict=True):
            with stream.licence("a test", task.test):
                batch = stream.batch(task.test)
                right = method.predict(batch, scorer).argmax(1) == batch.targets
            assert score == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.parametrize("method", ["er", "icarl", "podnet", "simplecil"])
def test_herding_means_statistics_and_studies_share_a_pass_of_the_tasks_examples(tiny: Any, method: str) -> None:
    config = config_from(tiny.settings("image", method=short(method), **{"measure.fwt": False}))
    made, stream = assemble(config)
    trainer = Trainer(made, stream, config)
    trainer.learn(stream[0])
    trainer.enter(stream[1])
    made.grow(stream[1])
    for stage in made.stages(stream[1]):
        trainer.train(stage, 1)
    before, old = passed(trainer), len(made.memory)
    made.eval()
    made.after_task(stream[1])
    seen = Observation(made, stream[1], [0.0, 0.0])
    with seen.licence("a test"):
        features, _ = seen.training
    new, earlier = len(stream[1].train), len(stream[0].train)
    # class means also pass the memory, which has old examples, as it is and (iCaRL) mirrored
    assert new + earlier <= passed(trainer) - before <= new + earlier + 2 * old
    with stream.licence("a test", seen.training_ids):
        made.task_features.clear()
        torch.testing.assert_close(features, torch.cat([made.outputs(task.train).features for task in stream[:2]]))


def test_features_without_logits_are_those_with_logits(tiny: Any) -> None:
    trainer = learned(tiny, "text", "er")  # in two batches, sorted by length
    method, train = trainer.method, trainer.stream[1].train
    method.training_settings.eval_batch_size = len(train) // 2
    bare, both, kept = (method.outputs(train, logits=logits) for logits in (False, True, False))
    for out in (bare, kept):
        torch.testing.assert_close(out.features, both.features, rtol=0, atol=0)
        assert out.logits.shape == (len(train), 0)
    assert both.logits.shape == (len(train), method.model.head.classes)


@pytest.mark.parametrize("past_autograd", [False, True])
def test_kept_features_are_not_used_after_the_weights_have_changed(tiny: Any, past_autograd: bool) -> None:
    trainer = learned(tiny, "image", "er")
    method, train = trainer.method, trainer.stream[1].train
    method.outputs(train)
    weight = method.model.encoder.norm.weight
    with torch.no_grad():
        (weight.data if past_autograd else weight).mul_(2)
    found = method.outputs(train[:3])
    method.task_features.clear()
    torch.testing.assert_close(found, method.outputs(train[:3]))


def test_kept_features_can_not_be_read_without_permission(tiny: Any) -> None:
    from bace.errors import StreamRefused

    trainer = learned(tiny, "image", "er")
    method, stream = trainer.method, trainer.stream
    method.outputs(stream[1].train)
    stream.begin(stream[2], method.remembered())
    closed = stream[1].train[~torch.isin(stream[1].train, method.remembered())]
    with pytest.raises(StreamRefused):
        method.outputs(closed)


def test_nothing_is_kept_after_a_run(tiny: Any) -> None:
    config = config_from(tiny.settings("image", method="er"))
    trainer = Trainer(*assemble(config), config)
    trainer.run()
    assert trainer.method.task_features.rows is None


def test_a_learner_whose_examples_are_numbered_anew_does_not_read_features_of_others(tiny: Any) -> None:
    import bace

    learner = bace.Learner("er", backbone=tiny.vit, memory=4, **{"head.head_init": "imprint", "train.epochs": 1})
    pictures = torch.randint(0, 256, (24, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    learner.partial_fit(pictures[:20], ["a", "b"] * 10)
    assert learner.method is not None
    assert learner.method.task_features.rows is None  # nothing about examples that are gone
    outputs, read = learner.method.outputs, []

    def watched(examples: Any, *others: Any, **options: Any) -> Any:
        found = outputs(examples, *others, **options)
        learner.method.task_features.clear()
        read.append((found, outputs(examples, *others, **options)))
        return found

    learner.method.outputs = watched  # type: ignore[method-assign]
    learner.partial_fit(pictures[20:], ["c", "d"] * 2)
    assert read
    for found, alone in read:
        torch.testing.assert_close(found, alone)
