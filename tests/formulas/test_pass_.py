"""PASS's three terms, rotations, prototypes and radius are compared with numpy on the network's own features. On one
task it equals fine-tuning with four labels per class, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import array, assert_equal_bits, at_task, cross_entropy, make, recorded_passes, some, weights
from torch import Tensor

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.pass_ import PASS
from bace.methods.seq import SEQ
from bace.models.heads import AugmentedHead
from bace.models.model import Model, Output


def moved(method: Any) -> None:
    """Move the student away from its teacher."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in method.model.encoder.parameters():
            p += 0.02 * torch.randn(p.shape, generator=rng)


def turned(batch: Batch) -> tuple[Any, Any]:
    """Return all images, then all of them rotated once, twice and three times, and their labels."""
    pixels = batch.inputs["pixel_values"].numpy()
    labels = np.concatenate([4 * batch.targets.numpy() + k for k in range(4)])
    return np.concatenate([np.rot90(pixels, k, axes=(2, 3)) for k in range(4)]), labels


def features_of(model: Model, pixels: Any) -> Any:
    with torch.no_grad():
        hidden = model.encoder.eval()({"pixel_values": torch.from_numpy(pixels.copy())})
    return array(hidden[:, 0])


def linear(head: Any, features: Any) -> Any:
    """Return the logits of all labels."""
    bias = np.concatenate([array(b) for b in head.biases])
    return features @ np.concatenate([array(block) for block in head.blocks]).T + bias


# -- rotations


def test_every_picture_is_turned_by_quarters_and_labelled_4y_plus_k(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"})
    batch = some(method, 5)
    found = method.rotated(batch)
    pixels, labels = turned(batch)
    np.testing.assert_array_equal(found.inputs["pixel_values"].numpy(), pixels)
    np.testing.assert_array_equal(found.targets.numpy(), labels)
    assert found.examples.tolist() == batch.examples.tolist() * 4
    assert not np.array_equal(pixels[:5], pixels[5:10])


def test_texts_have_one_label_a_class_and_are_left_as_they_are(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "pass"})
    batch = some(method, 5)
    assert method.rotated(batch) is batch
    assert [len(block) for block in method.head.blocks] == [2, 2]


def test_a_rotated_class_is_never_predicted(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"})
    batch = some(method, 8)
    method.model.eval()
    logits = linear(method.head, features_of(method.model, batch.inputs["pixel_values"].numpy()))
    assert logits.shape == (8, 16)
    np.testing.assert_allclose(array(method.predict(batch)), logits[:, [0, 4, 8, 12]], atol=1e-5)
    with torch.no_grad():
        for bias in method.head.biases:
            bias += 100 * (torch.arange(8) % 4 > 0)  # rotations would win by far
    np.testing.assert_allclose(array(method.predict(batch)), logits[:, [0, 4, 8, 12]], atol=1e-5)


# -- the loss


def test_the_three_terms_by_numpy(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass", "lambda_kd": 3.0, "lambda_proto": 2.0, "temp": 0.5})
    moved(method)
    batch = some(method, 5)
    loss = {name: float(term.detach()) for name, term in method.loss(batch).items()}
    pixels, labels = turned(batch)
    student, teacher = features_of(method.model, pixels), features_of(method.teacher, pixels)
    assert loss["new"] == pytest.approx(cross_entropy(linear(method.head, student) / 0.5, labels), rel=1e-4)
    # the Frobenius norm of the whole difference, as if the batch had 64 images
    distance = np.sqrt(((student - teacher) ** 2).sum()) * np.sqrt(64 / 5)
    assert loss["distil"] == pytest.approx(3 * distance, rel=1e-4)
    rng = method.now.rng("prototypes")  # a class and a direction for each of the five
    classes = torch.randint(2, (5,), generator=rng).numpy()
    noisy = array(method.prototypes)[classes] + float(method.radius) * torch.randn(5, 16, generator=rng).numpy()
    expected = cross_entropy(linear(method.head, noisy) / 0.5, 4 * classes)
    assert loss["prototypes"] == pytest.approx(2 * expected, rel=1e-4)
    assert float(method.radius) > 0


def test_the_feature_distance_of_texts_counts_their_rows(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "pass", "lambda_kd": 1.0})
    moved(method)
    batch = some(method, 4)
    difference = method.model(batch).features - method.teacher(batch).features
    assert method.loss(batch)["distil"].item() == pytest.approx(float(difference.norm()) * 8, rel=1e-4)  # sqrt(256 / 4)


def test_prototypes_reach_the_head_alone(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"})
    method.model.zero_grad()
    method.loss(some(method, 5))["prototypes"].backward()
    for name, p in method.model.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) == name.startswith("head."), name


def test_the_feature_term_is_nothing_and_has_a_finite_gradient_while_student_and_teacher_agree(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"})
    term = method.loss(some(method, 5))["distil"]
    assert float(term) == pytest.approx(0, abs=1e-3)
    term.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in method.model.parameters())


def test_a_weight_of_0_skips_its_passes_and_the_first_task_has_neither(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass", "lambda_kd": 0.0, "lambda_proto": 0.0})
    with recorded_passes() as passes:
        assert set(method.loss(some(method, 5))) == {"new"}
    assert len(passes) == 1
    method = at_task(tiny, "image", {"name": "pass"}, task=0)
    assert set(method.loss(some(method, 5))) == {"new"}


def test_prototypes_are_drawn_anew_each_step_over_all_old_classes(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"})
    asked: list[Tensor] = []
    method.cross_entropy = lambda features, labels: asked.append(labels) or torch.zeros(())  # type: ignore[func-returns-value]
    for step in range(30):
        method.now.step = step
        method.prototype_loss(10)
    counts = torch.bincount(torch.cat(asked), minlength=8)
    assert counts[[1, 2, 3, 5, 6, 7]].sum() == 0
    assert 100 < counts[0] < 200  # of 300 for two classes
    assert len({tuple(labels.tolist()) for labels in asked}) > 20


# -- prototypes and radius


def test_the_radius_is_the_root_of_the_mean_variance_of_the_first_tasks_classes(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "pass"}, task=0)
    rng = np.random.default_rng(0)
    spread, targets = np.array([0.5, 2.0]), method.stream.labels(method.stream[0].train)[1].numpy()
    features = rng.normal(size=(20, 16)) * spread[targets][:, None] + targets[:, None]

    def outputs(examples: Tensor, **options: Any) -> Output:
        return Output(torch.from_numpy(features).float(), torch.zeros(20, 0))

    method.outputs = outputs
    method.after_task(method.stream[0])
    variance = [np.trace(np.cov(features[targets == c].T)) / 16 for c in (0, 1)]
    assert float(method.radius) == pytest.approx(np.sqrt(np.mean(variance)), rel=1e-5)
    assert float(method.radius) == pytest.approx(np.sqrt((0.5**2 + 2**2) / 2), rel=0.15)


def test_a_prototype_is_the_mean_feature_of_a_class_when_it_was_learned(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "pass"}, **{"benchmark.tasks": [2, 1, 2]})
    found, radius = [], []
    remember = method.after_task

    def watched(task: Any) -> None:
        remember(task)
        batch = stream.batch(task.train)
        features = features_of(method.model, batch.inputs["pixel_values"].numpy())
        found.append(np.stack([features[batch.targets.numpy() == c].mean(0) for c in task.classes]))
        radius.append(float(method.radius))

    method.after_task = watched  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    np.testing.assert_allclose(array(method.prototypes), np.concatenate(found), atol=1e-5)
    assert radius[0] == radius[1] == radius[2] > 0


# -- equalities


def test_on_one_task_of_pictures_it_is_fine_tuning_on_four_labels_a_class(tiny: Any) -> None:
    class FourLabels(SEQ):
        def build(self, model: Model) -> Model:
            model.head = AugmentedHead(model.encoder.width, 4)
            return model

        def stages(self, task: Any) -> Any:
            rate = self.training_settings.lr
            return [self.stage(task, optimiser="adam", lr=rate / 10, rates={"head": rate / 10 * 10})]

        def loss(self, batch: Batch) -> Tensor:
            pixels, labels = turned(batch)
            inputs = {"pixel_values": torch.from_numpy(pixels.copy())}
            wide = Batch(inputs, torch.from_numpy(labels), batch.examples, batch.rows)
            return F.cross_entropy(self.model.head.all(self.model(wide).features) / 0.1, wide.targets)  # type: ignore[operator]

    found = []
    for method in (PASS(), FourLabels()):
        learned, stream, config = make(tiny, "image", {"name": "seq"}, **{"benchmark.tasks": [4]})
        method.stream, method.now, method.memory = stream, learned.now, learned.memory
        method.training_settings = learned.training_settings
        method.model = method.build(learned.model)
        Trainer(method, stream, config).run()
        found.append(weights(method.model))
    assert_equal_bits(*found)


def test_on_one_task_of_texts_at_temperature_1_it_is_fine_tuning(tiny: Any) -> None:
    found = []
    for method in ({"name": "pass", "temp": 1.0, "head_rate": 1.0}, {"name": "seq"}):
        settings = {"benchmark.tasks": [4], "head.kind": "linear", "train.optimiser": "adamw"}
        learned, stream, config = make(tiny, "text", method, **settings)
        Trainer(learned, stream, config).run()
        found.append(weights(learned.model))
    assert_equal_bits(*found)


@pytest.mark.parametrize("wrong", [{"temp": 0.0}, {"head_rate": 0.0}, {"lambda_kd": -1.0}, {"lambda_proto": -1.0}])
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PASS(**wrong)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"train.optimiser": "sgd"}, (0.002, 0.02)),
        ({"train.optimiser": "adamw"}, (0.02, 0.2)),
        ({"train.optimiser": "sgd", "train.head_lr": 0.5}, (0.002, 0.5)),
    ],
    ids=str,
)
def test_adams_encoder_takes_a_tenth_of_a_rate_meant_for_sgd_and_the_head_ten_times_the_encoders(
    tiny: Any, settings: dict[str, Any], rates: tuple[float, float]
) -> None:
    method, stream, config = make(tiny, "image", {"name": "pass"}, **{"train.lr": 0.02, **settings})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    assert type(trainer.optimiser) is torch.optim.Adam
    head = {id(p) for p in method.model.head.parameters()}
    found = {(id(p) in head, round(g["lr"], 9)) for g in trainer.optimiser.param_groups for p in g["params"]}
    assert found == {(False, rates[0]), (True, rates[1])}
