"""PODNet's head, classification loss and pooled distances are compared with hand-computed numbers and numpy, its
clusters with scikit-learn, and the factors in the loss of a step with numpy. Tests check which weights the second stage
changes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from steps import (
    Array,
    array,
    assert_equal_bits,
    at_task,
    learned_before,
    make,
    next_stage,
    recorded_passes,
    softmax,
    some_of_all,
    weights,
)
from tiny_encoders import save, tiny_inputs, tiny_model

import bace
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.parts.losses import nca, pooled_distance
from bace.methods.podnet import PODNet
from bace.models.heads import CosineHead, ProxyHead, kmeans
from bace.models.image_encoder import ImageEncoder
from bace.models.loading import load_encoder


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(method: Any) -> Any:
    """Move the student away from its teacher, as after some steps."""
    rng = generator(5)
    with torch.no_grad():
        for p in method.model.encoder.parameters():
            p += 0.05 * torch.randn(p.shape, generator=rng)
    return method


# -- the head


def test_proxies_by_hand() -> None:
    head = ProxyHead(2, proxies=2, sigma_init=10.0)
    head.grow(1, generator())
    head.blocks[0].data = torch.tensor([[2.0, 0.0], [0.0, -3.0]])
    # unit feature (.6, .8), proxies (1, 0) and (0, -1): squared distances .16 + .64 and .36 + 3.24
    share = math.exp(-0.8) / (math.exp(-0.8) + math.exp(-3.6))
    expected = 10 * (share * -0.8 + (1 - share) * -3.6)
    assert head(torch.tensor([[3.0, 4.0]])).item() == pytest.approx(expected, rel=1e-5)


def test_one_proxy_is_the_cosine_head_at_twice_its_scale_less_a_constant() -> None:
    heads = ProxyHead(16, proxies=1, sigma_init=4.0).double(), CosineHead(16, sigma_init=8.0).double()
    features = torch.randn(5, 16, generator=generator(1), dtype=torch.float64)
    for task, classes in enumerate((3, 2)):
        for head in heads:
            head.grow(classes, generator(task))
            head.double()
        torch.testing.assert_close(heads[0](features), heads[1](features) - 8)


def test_a_proxy_head_grows_by_classes_and_leaves_old_logits_their_values() -> None:
    head, features = ProxyHead(16, proxies=4), torch.randn(5, 16, generator=generator(1))
    assert head(features).shape == (5, 0)
    head.grow(3, generator(0))
    before = head(features)
    head.grow(2, generator(1))
    assert head(features).shape == (5, 5)
    assert head.classes == 5
    torch.testing.assert_close(head(features)[:, :3], before, rtol=0, atol=1e-12)
    h = array(features) / np.linalg.norm(features, axis=1, keepdims=True)
    w = array(head.weight) / np.linalg.norm(array(head.weight), axis=1, keepdims=True)
    s = -((h[:, None] - w[None]) ** 2).sum(-1).reshape(5, 5, 4)  # the proxies of a class are adjacent
    np.testing.assert_allclose(array(head(features)), 10 * (softmax(s) * s).sum(-1), rtol=1e-4, atol=1e-5)


def test_one_row_for_each_class_is_imprinted_on_all_its_proxies() -> None:
    """Forward transfer uses this. Equal proxies score as one."""
    head = ProxyHead(3, proxies=4)
    head.grow(2, generator())
    head.imprint(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 5.0]]))
    torch.testing.assert_close(head(torch.tensor([[0.0, 0.0, 1.0]])), torch.tensor([[-20 / 3, 0.0]]))  # 2 cos - 2


def test_forward_transfer_is_measured_with_it(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method="podnet"))
    assert result.metrics["FWT"] is not None
    assert math.isfinite(result.metrics["FWT"])


# -- clusters


def blobs(points: int = 60, clusters: int = 4, spread: float = 1.0) -> torch.Tensor:
    centres = 6 * torch.randn(clusters, 5, generator=generator(2), dtype=torch.float64)
    noise = torch.randn(points, 5, generator=generator(3), dtype=torch.float64)
    return centres[torch.arange(points) % clusters] + spread * noise


def test_clusters_are_a_fixed_point_of_lloyds_steps_and_as_tight_as_scikit_learns() -> None:
    points = blobs(spread=3.0)
    centres = kmeans(points, 6, generator(1))
    again = KMeans(6, init=centres.numpy(), n_init=1, max_iter=300).fit(points.numpy())
    np.testing.assert_allclose(again.cluster_centers_, centres.numpy(), atol=1e-9)
    best = KMeans(6, n_init=10, random_state=0).fit(points.numpy())
    assert again.inertia_ <= 1.15 * best.inertia_


def test_well_separated_clusters_are_found() -> None:
    points = blobs(spread=0.1)
    centres = kmeans(points, 4, generator(0))
    means = np.stack([points[i::4].mean(0).numpy() for i in range(4)])
    order = [int(np.linalg.norm(centres.numpy() - mean, axis=1).argmin()) for mean in means]
    assert sorted(order) == [0, 1, 2, 3]
    np.testing.assert_allclose(centres.numpy()[order], means, atol=1e-9)


def test_clusters_depend_on_the_generator_alone() -> None:
    points = blobs(spread=5.0)
    torch.manual_seed(0)
    first = kmeans(points, 6, generator(1))
    torch.manual_seed(1)
    assert torch.equal(kmeans(points, 6, generator(1)), first)
    assert not torch.equal(kmeans(points, 6, generator(2)), first)


def test_of_fewer_points_than_clusters_each_is_a_centre() -> None:
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 1.0]])
    centres = kmeans(points, 5, generator(0))
    assert centres.shape == (5, 2)
    assert {tuple(row) for row in centres.tolist()} == {(0.0, 1.0), (2.0, 0.0)}
    assert torch.equal(kmeans(points[:0], 3, generator(0)), torch.zeros(3, 2))


# -- the classification loss


def published(scores: Array, targets: Array, scale: float, margin: float) -> float:
    """Follow the published code: the margin is subtracted from all scores, and the true class stays in the sum as
    exp(0)."""
    total = 0.0
    for s, y in zip(scores, targets, strict=True):
        u = scale * (s - margin)
        u = u - u.max()
        others = [0.0 if j == y else u[j] for j in range(len(u))]
        total -= u[y] - math.log(sum(math.exp(x) for x in others))
    return total / len(targets)


@pytest.mark.parametrize("margin", [0.0, 0.6, 5.0])
def test_as_code_the_loss_is_the_published_one_whatever_the_margin(margin: float) -> None:
    rng = np.random.default_rng(0)
    scores, targets = rng.uniform(-1, 1, (12, 5)), rng.integers(0, 5, 12)
    value = nca(torch.from_numpy(4.0 * scores), torch.from_numpy(targets))
    assert value.item() == pytest.approx(published(scores, targets, 4.0, margin))


def test_as_code_the_loss_of_a_right_prediction_is_its_cross_entropy_and_of_a_wrong_one_is_larger() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert nca(logits, torch.tensor([0])).item() == pytest.approx(-math.log(softmax(array(logits))[0, 0]), rel=1e-5)
    # y = 1 and u = (0, -1, -2) give 1 + log(1 + e^0 + e^-2)
    assert nca(logits, torch.tensor([1])).item() == pytest.approx(1 + math.log(2 + math.exp(-2)), rel=1e-5)


def test_intended_the_true_class_must_win_by_the_margin() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 9.0]])
    # first row: -(3 - 6) + log(e + 1); the second row wins by more than 6, so its loss is 0
    expected = (3 + math.log(math.e + 1)) / 2
    assert nca(logits, torch.tensor([0, 2]), 6.0).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("margin", [None, 0.6])
def test_one_class_alone_leaves_nothing_to_learn(margin: float | None) -> None:
    logits = torch.tensor([[1.0], [-2.0]], requires_grad=True)
    value = nca(logits, torch.tensor([0, 0]), margin)
    value.backward()
    assert value.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", ["as_code", "intended"])
def test_the_method_takes_the_margin_it_is_told(tiny: Any, margin: str) -> None:
    method = at_task(tiny, "image", {"name": "podnet", "margin": margin, "delta": 0.4})
    batch = some_of_all(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    both = next(p.batch for p in passes if p.training)
    with torch.no_grad():
        logits, targets = array(method.model(both).logits), both.targets.numpy()
    n, sigma = len(batch), method.model.head.sigma.item()
    for name, part in (("new", slice(n)), ("replay", slice(n, None))):
        if margin == "as_code":
            expected = published(logits[part] / sigma, targets[part], sigma, 0.4)
        else:
            each = [
                max(0.0, -(z[y] - sigma * 0.4) + math.log(np.exp(np.delete(z, y)).sum()))
                for z, y in zip(logits[part], targets[part], strict=True)
            ]
            expected = sum(each) / len(each)
        assert loss[name].item() == pytest.approx(expected, rel=1e-4)


# -- pooled outputs


def test_pooled_distance_by_hand_ignores_lengths() -> None:
    # units (.6, .8) and (1, 0) have distance sqrt(.16 + .64); equal directions have distance 0
    student, teacher = torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[7.0, 0.0], [5.0, 5.0]])
    assert pooled_distance(student, teacher).item() == pytest.approx(math.sqrt(0.8) / 2, rel=1e-5)
    torch.testing.assert_close(pooled_distance(3 * student, 0.1 * teacher), pooled_distance(student, teacher))


def test_patches_lie_where_they_were_cut_and_other_tokens_are_left_out(tmp_path: Any) -> None:
    for family, others in (("vit", 1), ("deit", 2), ("dinov2", 1)):
        encoder = load_encoder(save(tiny_model(family), tmp_path / family))
        assert isinstance(encoder, ImageEncoder)
        inputs = tiny_inputs(family, height=24, width=40)  # patches of 8: three rows of five
        _, taps = encoder(inputs, taps=True)
        assert taps[0].shape[1] == others + 15
        place = torch.arange(-others, 15).expand(2, 2, -1).transpose(1, 2)  # every patch holds its own number
        assert torch.equal(encoder.patch_map(place, inputs), torch.arange(15).view(3, 5).expand(2, 2, 3, 5))


def test_pictures_are_pooled_along_height_and_width_of_the_squared_map(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "podnet"})
    batch = some_of_all(method, 2)
    tap = torch.randn(len(batch), 5, 3, generator=generator(0))  # a class token and 2 x 2 patches
    got = array(method.pool(tap, batch))
    for example in range(len(batch)):
        grid = array(tap[example, 1:]).reshape(2, 2, 3)  # row, column, channel
        sums = [(grid[i, :, c] ** 2).sum() for c in range(3) for i in range(2)]
        sums += [(grid[:, j, c] ** 2).sum() for c in range(3) for j in range(2)]
        np.testing.assert_allclose(np.sort(got[example]), np.sort(sums), rtol=1e-5)
    # shuffling the patches within rows keeps the sums along rows and changes the sums along columns
    shuffled = tap[:, [0, 2, 1, 4, 3]]
    same = np.isclose(got, array(method.pool(shuffled, batch)))
    assert same[:, :6].all()
    assert not same[:, 6:].any()


def test_texts_are_pooled_over_tokens_and_over_channels_without_padding(tiny: Any) -> None:
    method = at_task(tiny, "text", {"name": "podnet"})
    batch = some_of_all(method, 4)
    mask = batch.inputs["attention_mask"].numpy()
    assert (mask == 0).any()
    tap = torch.randn(*mask.shape, 3, generator=generator(0))
    got = array(method.pool(tap, batch))
    for example, length in enumerate(mask.sum(1)):
        shown = array(tap[example, :length]) ** 2
        over_channels = np.concatenate([shown.sum(1), np.zeros(mask.shape[1] - length)])
        np.testing.assert_allclose(got[example], np.concatenate([over_channels, shown.sum(0)]), rtol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("task", [1, 2])
def test_distillation_is_weighted_by_the_root_of_seen_over_new_and_averaged_over_blocks(
    tiny: Any, modality: str, task: int
) -> None:
    settings = {"name": "podnet", "lambda_flat": 2.0, "lambda_spatial": 7.0}
    method = moved(at_task(tiny, modality, settings, task, **{"benchmark.tasks": [2, 1, 2]}))
    batch = some_of_all(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    assert [p.model is method.model for p in passes] == [True, False]
    both = passes[0].batch
    with torch.no_grad():
        after, before = (model(both, taps=True) for model in (method.model, method.teacher))
    factor = 2 * {1: math.sqrt(3 / 1), 2: math.sqrt(5 / 2)}[task]  # the cross-entropy is two means
    h, h0 = array(after.features), array(before.features)
    cosines = (h * h0).sum(1) / np.linalg.norm(h, axis=1) / np.linalg.norm(h0, axis=1)
    assert loss["flat"].item() == pytest.approx(2 * factor * (1 - cosines).mean(), rel=1e-3)
    layers = []
    for a, b in zip(after.taps, before.taps, strict=True):
        if modality == "image":
            maps = [array(x[:, 1:]).reshape(len(x), 2, 2, -1) ** 2 for x in (a, b)]
            pooled = [np.concatenate([m.sum(1).reshape(len(m), -1), m.sum(2).reshape(len(m), -1)], 1) for m in maps]
        else:
            shown = array(both.inputs["attention_mask"])[:, :, None]
            pooled = [np.concatenate([(array(x) ** 2 * shown).sum(i) for i in (1, 2)], 1) for x in (a, b)]
        units = [p / np.linalg.norm(p, axis=1, keepdims=True) for p in pooled]
        layers.append(np.linalg.norm(units[0] - units[1], axis=1).mean())
    assert len(layers) == 2
    assert loss["spatial"].item() == pytest.approx(7 * factor * np.mean(layers), rel=1e-3)
    assert min(layers) > 1e-3


def test_distillation_starts_at_zero_with_a_gradient_of_zero(tiny: Any) -> None:
    """At the first step of a task, student and teacher are equal."""
    method = at_task(tiny, "image", {"name": "podnet"})
    loss = method.loss(some_of_all(method))
    assert loss["spatial"].item() == 0
    assert loss["flat"].item() == pytest.approx(0, abs=1e-6)
    method.model.zero_grad()
    loss["spatial"].backward()
    gradients = [p.grad for p in method.model.encoder.parameters() if p.grad is not None]
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_student_feels_its_pooled_outputs_in_every_block_and_the_teacher_does_not(tiny: Any) -> None:
    method = moved(at_task(tiny, "image", {"name": "podnet"}))
    method.model.zero_grad()
    method.loss(some_of_all(method))["spatial"].backward()
    for block in method.model.encoder.blocks:
        assert all((p.grad != 0).any() for p in block.parameters() if p.ndim > 1)
    assert all(p.grad is None for p in method.teacher.parameters())


def test_terms_that_are_off_cost_no_pass(tiny: Any) -> None:
    for off, passes in (({"lambda_flat": 0.0}, 2), ({"lambda_flat": 0.0, "lambda_spatial": 0.0}, 1)):
        method = at_task(tiny, "image", {"name": "podnet", **off})
        with recorded_passes() as made:
            terms = method.loss(some_of_all(method))
        assert len(made) == passes
        assert "flat" not in terms


# -- proxies of a task


@pytest.mark.parametrize("proxies", [1, 3])
def test_new_proxies_are_centres_of_their_class_at_the_mean_norm_of_the_old_ones(tiny: Any, proxies: int) -> None:
    method = at_task(tiny, "image", {"name": "podnet", "proxies": proxies})
    task = method.stream[1]
    with torch.no_grad():
        method.model.encoder.norm.bias[0] += 3  # lengths differ, so directions are averaged, not features
    method.imprint(task)
    with torch.no_grad():
        features = array(method.model.eval()(method.stream.batch(task.train)).features)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    targets = method.stream.targets[task.train].numpy()
    old, new = (array(block) for block in method.model.head.blocks)
    assert new.shape == (2 * proxies, 16)
    lengths = np.linalg.norm(new, axis=1)
    np.testing.assert_allclose(lengths, np.linalg.norm(old, axis=1).mean(), rtol=1e-5)
    for c, rows in zip(task.classes, (new / lengths[:, None]).reshape(2, proxies, 16), strict=True):
        own = features[targets == c]
        # every centre is the mean of its nearest points, up to its length
        split = KMeans(proxies, init=rows, n_init=1).fit(own)
        means = split.cluster_centers_ / np.linalg.norm(split.cluster_centers_, axis=1, keepdims=True)
        np.testing.assert_allclose(rows, means, atol=1e-4)


def test_old_proxies_stay_in_the_main_stage_and_move_when_the_classifier_is_tuned(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {"name": "podnet"})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    trainer.enter(stream[1])
    method.grow(stream[1])
    main, tune = method.stages(stream[1])
    seen: list[list[int]] = []
    before = weights(method.model)
    trainer.train(main, 2)
    between = weights(method.model)
    assert torch.equal(between["head.blocks.0"], before["head.blocks.0"])
    assert not torch.equal(between["head.blocks.1"], before["head.blocks.1"])
    assert not torch.equal(between["head.sigma"], before["head.sigma"])
    next_stage(trainer)
    loss = tune.loss
    tune.loss = lambda batch: (seen.append(batch.examples.tolist()), loss(batch))[1]
    trainer.train(tune, 2)
    after = weights(method.model)
    changed = {name for name in between if not torch.equal(after[name], between[name])}
    assert changed == {"head.blocks.0", "head.blocks.1"}
    # it sees equally many examples of each class for 20 epochs, in one batch of eight
    assert [len(batch) for batch in seen] == [8] * 20
    assert sorted(stream.targets[seen[0]].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    # these are the memory after the task: herded with this encoder, old classes cut to the first of their order
    assert sorted(method.memory.examples.tolist()) == sorted(seen[0])
    kept = method.memory.examples.clone()
    again = torch.cat(list(method.choose(stream[1].train, stream[1], 2).values()))
    assert torch.equal(kept[method.memory.task == 1], again)
    method.after_task(stream[1])
    assert torch.equal(method.memory.examples, kept)


def test_the_tuning_loss_is_the_classification_loss_of_fixed_features(tiny: Any) -> None:
    method = at_task(tiny, "image", {"name": "podnet"})
    batch = some_of_all(method)
    method.eval()
    with torch.no_grad():
        logits = array(method.model(batch).logits)
    method.model.zero_grad()
    loss = method.tuning_loss(batch)
    loss.backward()
    assert loss.item() == pytest.approx(published(logits, batch.targets.numpy(), 1.0, 0.0), rel=1e-4)
    assert all(p.grad is None for p in method.model.encoder.parameters())


def test_without_memory_or_epochs_there_is_no_second_stage(tiny: Any) -> None:
    for settings in ({"memory.size": 0}, {"method": {"name": "podnet", "tune_epochs": 0}}):
        result = bace.run(tiny.settings("image", **{"method": "podnet", **settings}))
        stages = [[stage.name for stage in result.method.stages(task)] for task in result.method.stream]
        assert stages == [["main"]] * 3
    with_memory, *_ = make(tiny, "image", {"name": "podnet"})
    assert [len(with_memory.stages(task)) for task in with_memory.stream] == [1, 2]


# -- nearest mean of exemplars


def test_nme_is_the_nearest_mean_of_exemplars(tiny: Any) -> None:
    result = bace.run(tiny.settings("image", method="podnet"))
    method = result.method
    stream, ids = method.stream, method.memory.examples
    everything = torch.cat([ids, *(task.test for task in stream)])
    with stream.licence("test", everything), torch.no_grad():
        kept, asked = (stream.batch(x) for x in (ids, everything[len(ids) :]))
        shown, h = (array(method.model.eval()(batch).features) for batch in (kept, asked))
        guesses = method.predict(asked, "nme").argmax(1).numpy()
    shown, h = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (shown, h))
    means = np.stack([shown[kept.targets.numpy() == c].mean(0) for c in range(5)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    expected = np.linalg.norm(h[:, None] - means[None], axis=2).argmin(1)
    assert (guesses == expected).all()
    assert set(result.metrics["scorers"]) == {"nme"}


# -- one loop, and refusals


def test_distillation_and_second_stage_do_not_touch_the_first_task(tiny: Any) -> None:
    """The first task has neither teacher nor memory."""
    off = {"name": "podnet", "lambda_flat": 0.0, "lambda_spatial": 0.0, "tune_epochs": 0}
    one, other = (bace.run(tiny.settings("text", method=m, **{"benchmark.tasks": [3]})) for m in ("podnet", off))
    assert_equal_bits(weights(one.method.model), weights(other.method.model))


def test_a_second_stage_with_another_optimiser_takes_over_no_foreign_state(tiny: Any) -> None:
    """AdamW's state means nothing to SGD."""
    changes = {"train.optimiser": "adamw", "train.reset_optimiser": False}
    trainer = learned_before(tiny, "text", {"name": "podnet", "tune_epochs": 1}, 2, **changes)
    assert trainer.optimiser is not None
    slots = {key for state in trainer.optimiser.state.values() for key in state}
    assert slots == {"momentum_buffer"}


def test_a_linear_head_is_exchanged_too(tiny: Any) -> None:
    for kind, sigma in (("linear", 10), ("cosine", 4)):
        method, *_ = make(tiny, "image", {"name": "podnet"}, **{"head.kind": kind, "head.sigma_init": 4.0})
        assert isinstance(method.model.head, ProxyHead)
        assert method.model.head.sigma.item() == sigma


def test_tokens_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="old and to new entities"):
        bace.run(tiny.settings("token", method="podnet"))


@pytest.mark.parametrize("wrong", ["lambda_flat", "lambda_spatial", "proxies", "delta", "tune_epochs", "tune_lr"])
def test_wrong_settings_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        PODNet(**{wrong: -1})
