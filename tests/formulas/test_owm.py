"""OWM's projectors are compared with the recursion and the closed-form inverse in numpy, and its updates with the
inputs that they must not affect (for any optimiser). In the limit of no projection it equals plain fine-tuning bit for
bit."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from steps import Array, array, assert_equal_bits, at_task, make, weights
from torch import Tensor, nn

from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError, TrainingError
from bace.methods import owm
from bace.methods.owm import OWM, mean_inputs
from bace.methods.parts.ridge import without
from bace.methods.seq import SEQ
from bace.models.adapters import Adapter
from bace.models.model import Model


def inputs(count: int, width: int = 6, seed: int = 0) -> Array:  # (width, count)
    return np.random.default_rng(seed).normal(size=(width, count)) * 2


def projector(R: Array, alpha: float, at_once: int = 1) -> Array:
    P = torch.eye(len(R), dtype=torch.float64)
    for part in torch.from_numpy(R).split(at_once, 1):
        P = without(P, part, alpha)
    return array(P)


# -- the projector


@pytest.mark.parametrize("alpha", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_the_recursion_is_the_closed_form(count: int, alpha: float) -> None:
    R = inputs(count)
    closed = np.linalg.inv(np.eye(6) + R @ R.T / alpha)
    for at_once in (1, 3, 20):
        np.testing.assert_allclose(projector(R, alpha, at_once), closed, atol=1e-12)


def test_inputs_stored_at_once_are_those_stored_one_after_the_other() -> None:
    """The authors store one position after another. The equality holds for any ridge of earlier inputs."""
    start = projector(inputs(2, seed=1), 7.0)
    P, R, alpha = start.copy(), inputs(4), 0.3
    for r in R.T:
        k = P @ r
        P -= np.outer(k, k) / (alpha + r @ k)
    np.testing.assert_allclose(array(without(torch.from_numpy(start), torch.from_numpy(R), alpha)), P, atol=1e-12)


def test_one_input_by_hand() -> None:
    """With r = (1, 2, 0) and alpha = 5, k = r and P = I - r r^T / 10."""
    P = without(torch.eye(3).double(), torch.tensor([[1.0], [2.0], [0.0]]).double(), 5.0)
    np.testing.assert_allclose(array(P), [[0.9, -0.2, 0], [-0.2, 0.6, 0], [0, 0, 1]], atol=1e-15)


def test_a_projector_that_is_not_one_gives_nan_and_no_error() -> None:
    """A step must not wait for the message of a factorisation; the loss, which is read later, is then not finite."""
    assert without(-torch.eye(3).double(), torch.full((3, 2), 9.0).double(), 1.0).isnan().all()


def test_a_projector_that_breaks_in_the_last_step_of_a_task_is_reported(tiny: Any) -> None:
    method, stream, _ = make(tiny, "image", {"name": "owm"})
    method.get_buffer("P0").fill_(torch.nan)
    with pytest.raises(TrainingError, match="rounding has destroyed a projector: raise alpha"):
        method.after_task(stream[0])


def test_stored_inputs_shrink_by_their_ridge() -> None:
    """|P r| <= alpha / (alpha + sigma_min^2) |r| for r in the span of R, and the same bound holds for what an update
    adds to W r."""
    R, alpha = inputs(4), 0.3
    P = projector(R, alpha)
    bound = alpha / (alpha + np.linalg.svd(R, compute_uv=False).min() ** 2)
    dW = np.random.default_rng(1).normal(size=(3, 6))
    for r in R.T:
        assert 0 < np.linalg.norm(P @ r) <= bound * np.linalg.norm(r) * (1 + 1e-9)
        assert np.linalg.norm(dW @ P @ r) <= bound * np.linalg.norm(dW, 2) * np.linalg.norm(r) * (1 + 1e-9)


def test_a_projector_is_symmetric_with_eigenvalues_between_0_and_1() -> None:
    P = projector(inputs(50), 1e-3)
    assert np.abs(P - P.T).max() < 1e-9
    values = np.linalg.eigvalsh((P + P.T) / 2)
    assert values.min() > 0
    assert values.max() <= 1 + 1e-9


def test_as_alpha_vanishes_the_rank_falls_by_one_for_each_independent_input() -> None:
    R = inputs(3)
    R = np.concatenate([R, R[:, :1] - 2 * R[:, 1:2]], axis=1)  # four inputs, three of them independent
    values = np.sort(np.linalg.eigvalsh(projector(R, 1e-9)))
    assert (values[:3] < 1e-8).all()
    np.testing.assert_allclose(values[3:], 1, atol=1e-8)


# -- the stored inputs


def noted(model: Model, batch: Batch) -> list[Array]:
    """Return the inputs of each adapter's two Linears and of the head, recorded by other hooks, as (examples, tokens,
    inputs)."""
    found: list[Array] = []
    handles = []
    for name, module in model.encoder.named_modules():
        if name.endswith((".adapter.down", ".adapter.up")):
            handles.append(module.register_forward_pre_hook(lambda m, args: found.append(array(args[0]))))
    with torch.no_grad():
        features = model(batch).features
    for handle in handles:
        handle.remove()
    return [*found, array(features)]


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x)
    return result


def stored_inputs(method: Any, batch: Batch) -> list[Array]:  # (inputs, positions) each
    """Return the mean over the examples that have a token at a position, for each position."""
    real = batch.inputs.get("attention_mask", torch.ones(len(batch), 5)).bool().numpy()
    found = []
    for x in noted(method.model, batch):
        positions = [x[real[:, j], j] for j in range(x.shape[1])] if x.ndim == 3 else [x]
        found.append(np.stack([unit(rows.mean(0)) for rows in positions], axis=1))
    return found


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_mean_inputs_of_every_layer_are_stored_by_position_and_without_padding(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, {"name": "owm"})
    for layer in method.layers[:-1]:  # otherwise the inputs of `up` would be nearly zero
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    method.model.eval()
    batch = method.stream.batch(method.stream[1].train[:6])
    with mean_inputs(method.layers, batch) as means:
        method.model(batch)
    real = batch.inputs.get("attention_mask", torch.ones(6, 5))
    assert bool(real.all()) == (modality == "image")
    expected = stored_inputs(method, batch)
    assert len(means) == 2 * 2 * 2 + 1  # two blocks, two adapters each, two Linears each, and the head
    assert (means[0].shape[1], means[-1].shape[1]) == (real.shape[1], 1)
    for found, wanted in zip(means, expected, strict=True):
        np.testing.assert_allclose(array(found), wanted, atol=1e-5)


def test_the_ridge_falls_over_a_task_and_each_layer_has_a_projector_of_its_own(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alphas: list[float] = []

    def spied(P: Tensor, R: Tensor, alpha: float) -> Tensor:
        alphas.append(alpha)
        return without(P, R, alpha)

    monkeypatch.setattr(owm, "without", spied)
    options = {"name": "owm", "alpha": 2.0, "decay": 0.01}
    method, stream, config = make(tiny, "image", options, **{"benchmark.tasks": [2]})
    Trainer(method, stream, config).run()  # 20 examples, 2 epochs of 3 steps
    assert alphas == pytest.approx([2 * 0.01 ** (step / 6) for step in range(6) for _ in range(9)])
    made = [method.get_buffer(f"P{i}") for i in range(9)]
    assert all(not torch.equal(made[i], made[j]) for i in range(9) for j in range(i) if len(made[i]) == len(made[j]))


# -- the update


@pytest.mark.parametrize("trains", ["head", "adapters"])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("modality", ["image", "text"])
def test_what_layers_make_of_a_finished_tasks_inputs_stays(
    tiny: Any, modality: str, optimiser: str, trains: str
) -> None:
    """One batch is the whole task, so its mean inputs are stored. With a ridge close to 0, W r must not change in the
    next task, for any momentum and for Adam. In general |P R| <= sqrt(alpha) / 2."""
    options = {"name": "owm", "trains": trains, "mode": "end_of_task", "alpha": 1e-9}
    settings = {"train.batch_size": 64, "train.optimiser": optimiser, "train.weight_decay": 0.1, "train.epochs": 4}
    method, stream, config = make(tiny, modality, options, **settings)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    stored = stored_inputs(method, stream.batch(stream[0].train))
    for i, R in enumerate(stored):  # nothing was stored while the task was being learned
        P = array(method.get_buffer(f"P{i}"))
        assert np.linalg.norm(P @ R, 2) < 1e-4
        assert len(R) - R.shape[1] - 1e-3 < np.trace(P) < len(R) - 0.9
    before = [array(layer.weight) for layer in method.layers]
    trainer.learn(stream[1])
    for layer, old, R in zip(method.layers, before, stored, strict=True):
        change = array(layer.weight)[: len(old)] - old
        size = np.linalg.norm(change, 2)
        assert size > 1e-6
        # weights are rounded to single precision after the projection
        assert np.linalg.norm(change @ R, 2) < 1e-3 * size + 1e-6 * np.linalg.norm(old)
        other = unit(np.random.default_rng(0).normal(size=len(R)))
        assert np.linalg.norm(change @ other) > 1e-2 * size


def test_a_step_is_projected_by_inputs_that_include_its_own(tiny: Any) -> None:
    """In mode per_batch, the batch's mean input is stored before the step, and W changes by (raw change) P."""
    method = at_task(tiny, "image", {"name": "owm", "alpha": 0.5})
    method.now.steps = method.now.epochs = 1
    batch = method.stream.batch(method.stream[1].train[:6], view=method.now.view())
    before = [array(method.get_buffer(f"P{i}")).copy() for i in range(9)]
    old = [array(layer.weight) for layer in method.layers]
    method.loss(batch).backward()
    stored = stored_inputs(method, batch)
    method.before_step(batch)
    raw = [np.random.default_rng(i).normal(size=w.shape) for i, w in enumerate(old)]
    with torch.no_grad():
        for layer, change in zip(method.layers, raw, strict=True):
            trained = [p for p in layer.parameters() if p.requires_grad]
            for p, rows in zip(trained, np.split(change, np.cumsum([len(p) for p in trained])[:-1]), strict=True):
                p += torch.from_numpy(rows).to(p.dtype)
    method.after_step(batch)
    for i, layer in enumerate(method.layers):
        P = np.linalg.inv(np.linalg.inv(before[i]) + stored[i] @ stored[i].T / 0.5)
        np.testing.assert_allclose(array(layer.weight), old[i] + raw[i] @ P, atol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("trains", ["head", "adapters"])
def test_only_the_projected_matrices_change(tiny: Any, modality: str, trains: str) -> None:
    """Changes of biases and LayerNorms would break the guarantee."""
    method, stream, config = make(tiny, modality, {"name": "owm", "trains": trains})
    before = weights(method.model)
    Trainer(method, stream, config).run()
    after = weights(method.model)
    changed = {name for name in before if (after[name] != before[name]).any()}
    assert changed == {n for n in before if n.endswith((".adapter.down.weight", ".adapter.up.weight"))}
    assert bool(changed) == (trains == "adapters")
    assert not hasattr(method.model.head, "sigma")
    assert not len(method.model.head.biases)


def test_under_the_head_the_encoder_is_a_fixed_function_without_dropout(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "owm", "trains": "head"}, task=0, backbone=tiny.bert)
    assert method.model.has_dropout
    batch = method.stream.batch(method.stream[0].train[:4])
    clean = method.model.eval()(batch).features
    assert torch.equal(method.model.train()(batch).features, clean)
    assert not clean.requires_grad
    assert not any(isinstance(module, Adapter) for module in method.model.modules())


@pytest.fixture
def single() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.mark.usefixtures("single")  # the step is split and summed in double precision: exact only for single weights
@pytest.mark.parametrize("trains", ["head", "adapters"])
@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_projection_it_is_fine_tuning_bit_for_bit(
    tiny: Any, modality: str, trains: Literal["head", "adapters"]
) -> None:
    """As alpha -> infinity, P = I. The reference is SEQ on the same trainable network."""

    class Plain(SEQ):
        def build(self, model: Model) -> Model:
            reference = OWM(trains=trains)
            reference.stream, reference.now = self.stream, self.now
            return reference.build(model)

    found = []
    for method in (OWM(alpha=1e300, trains=trains, clip=0), Plain()):
        learned, stream, config = make(tiny, modality, {"name": "seq"}, **{"train.optimiser": "adamw"})
        method.stream, method.now, method.memory = stream, learned.now, learned.memory
        method.training_settings = learned.training_settings
        method.model = method.build(learned.model)
        Trainer(method, stream, config).run()
        found.append(weights(method.model))
    assert_equal_bits(*found)


def test_adapters_that_are_there_are_used_and_a_frozen_prefix_stays_frozen(tiny: Any) -> None:
    method, _, _ = make(tiny, "image", {"name": "owm"}, **{"backbone.adapter": 3})
    assert {m.down.out_features for m in method.model.encoder.modules() if isinstance(m, Adapter)} == {3}
    method, _, _ = make(tiny, "image", {"name": "owm", "latent": 5}, **{"backbone.freeze": 1})
    adapters = [m for m in method.model.encoder.modules() if isinstance(m, Adapter)]
    assert [a.down.out_features for a in adapters] == [5, 5]  # none is in the frozen block
    assert len(method.layers) == 2 * 2 + 1
    method, _, _ = make(tiny, "image", {"name": "owm"}, **{"backbone.freeze": 1, "backbone.adapter": 3})
    adapters = [m for m in method.model.encoder.modules() if isinstance(m, Adapter)]
    assert [a.down.weight.requires_grad for a in adapters] == [False, False, True, True]
    assert len(method.layers) == 2 * 2 + 1


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"decay": 0.0}, {"clip": -1.0}, {"latent": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OWM(**wrong)
