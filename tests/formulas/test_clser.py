"""CLS-ER's targets and loss are compared with numpy. Its averages are compared with closed forms (the plain mean during
warm-up) and with a recursion in numpy through a growing head. Update frequencies are counted. With lambda = 0 it equals
ER bit for bit."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from steps import array, assert_equal_bits, at_task, cross_entropy, logits_of, make, recorded_passes, softmax, weights
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.data.batch import Batch
from bace.errors import ConfigError

ALWAYS = {"r_plastic": 1.0, "r_stable": 1.0}


def clser(**changes: Any) -> dict[str, Any]:
    return {"name": "cls-er", **changes}


def new_batch(method: Any, count: int = 4) -> Batch:
    found: Batch = method.stream.batch(method.stream[method.now.task].train[:count], view=method.now.view())
    return found


def scatter(method: Any, by: float = 0.1) -> None:
    """Make the three networks differ, so that each is sometimes the better one."""
    for seed, network in enumerate((method.model, method.plastic, method.stable)):
        rng = torch.Generator().manual_seed(seed)
        for p in network.parameters():
            p.data += by * torch.randn(p.shape, generator=rng)


def watched_run(tiny: Any, **changes: Any) -> tuple[Any, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Run on two tasks. Return the method, the working network's weights at the start and after every step, and the
    stable network's."""
    method, stream, config = make(tiny, "image", clser(**ALWAYS, **changes))
    working: list[dict[str, Tensor]] = []
    stable: list[dict[str, Tensor]] = []
    grow = method.grow

    def grown(task: Any) -> None:
        grow(task)
        if not working:
            working.append(weights(method.model))
            stable.append(weights(method.stable))

    def after_step(batch: Batch) -> None:
        working.append(weights(method.model))
        type(method).after_step(method, batch)
        stable.append(weights(method.stable))

    method.grow, method.after_step = grown, after_step  # type: ignore[method-assign]
    Trainer(method, stream, config).run()
    return method, working, stable


# -- the loss


@pytest.mark.parametrize("modality", ["image", "token"])
def test_replayed_rows_are_pulled_to_the_network_that_is_surer_of_their_class(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, clser(lambda_mse=0.3), **{"train.batch_size": 32, "train.replay_o": "label"})
    scatter(method)
    batch = new_batch(method)
    with recorded_passes() as passes:
        loss = method.loss(batch)
    (both, *averages) = passes
    assert both.training
    assert {id(p.model) for p in averages} == {id(method.plastic), id(method.stable)}
    assert not any(p.training for p in averages)
    n = len(batch)
    targets = both.batch.targets.numpy()
    for p in averages:  # the same examples in the same view
        assert torch.equal(p.batch.targets, both.batch.targets[n:])

    logits = logits_of(method.model, both.batch)
    z = {name: logits_of(network, averages[0].batch) for name, network in method.named_children() if name in _AVERAGES}
    true = {name: softmax(scores)[np.arange(len(scores)), targets[n:]] for name, scores in z.items()}
    surer = true["stable"] > true["plastic"]
    assert surer.any()
    assert not surer.all()
    target = np.where(surer[:, None], z["stable"], z["plastic"])
    chosen = softmax(array(method.target(averages[0].batch)))[np.arange(len(surer)), targets[n:]]
    np.testing.assert_allclose(chosen, np.maximum(true["stable"], true["plastic"]), rtol=1e-5)
    assert loss["new"].item() == pytest.approx(cross_entropy(logits[:n], targets[:n]), rel=1e-5)
    assert loss["replay"].item() == pytest.approx(cross_entropy(logits[n:], targets[n:]), rel=1e-5)
    # twice, because the cross-entropy is two means
    assert loss["match"].item() == pytest.approx(2 * 0.3 * ((logits[n:] - target) ** 2).mean(), rel=1e-4)


_AVERAGES = ("plastic", "stable")


def test_only_the_working_network_is_trained(tiny: Any) -> None:
    method = at_task(tiny, "image", clser())
    scatter(method)
    torch.stack(list(method.loss(new_batch(method)).values())).sum().backward()
    assert any(p.grad is not None for p in method.model.parameters())
    for name in _AVERAGES:
        network = getattr(method, name)
        assert not network.training
        assert all(p.grad is None and not p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_without_the_matching_the_working_network_is_ers_bit_for_bit(tiny: Any, modality: str) -> None:
    er = bace.run(tiny.settings(modality, method="er"))
    off = bace.run(tiny.settings(modality, method=clser(lambda_mse=0.0)))
    assert_equal_bits(weights(off.method.model), weights(er.method.model))
    assert off.metrics["scorers"]["working"]["A_last"] == er.metrics["A_last"]
    assert off.method.memory.examples.tolist() == er.method.memory.examples.tolist()


def test_a_joint_mean_is_ers_joint_mean(tiny: Any) -> None:
    er, off = (
        bace.run(tiny.settings("image", method=m))
        for m in ({"name": "er", "reduction": "joint"}, clser(lambda_mse=0.0, reduction="joint"))
    )
    assert_equal_bits(weights(off.method.model), weights(er.method.model))


def test_without_the_matching_the_averages_are_not_passed(tiny: Any) -> None:
    method = at_task(tiny, "image", clser(lambda_mse=0.0))
    with recorded_passes() as passes:
        method.loss(new_batch(method))
    assert [p.model for p in passes] == [method.model]


# -- the averages


def test_the_first_update_keeps_one_half(tiny: Any) -> None:
    """For n = 1, a = min(1 - 1/2, a_max). Every parameter, including head and scale, moves half of the way."""
    _, working, stable = watched_run(tiny)
    for name, start in stable[0].items():
        assert torch.equal(start, working[0][name])  # copies of the working network
        torch.testing.assert_close(stable[1][name], start + 0.5 * (working[1][name] - start), rtol=0, atol=1e-6)
    moved = [name for name in stable[0] if not torch.equal(stable[0][name], stable[1][name])]
    assert {"head.sigma", "head.blocks.0", "encoder.norm.weight"} <= set(moved)


def test_while_it_warms_up_an_average_is_the_plain_mean_of_all_weights_so_far(tiny: Any) -> None:
    """With a_n = 1 - 1/(n + 1) and no upper limit, w'_n = (w_0 + ... + w_n) / (n + 1)."""
    _, working, stable = watched_run(tiny, a_plastic=1.0, a_stable=1.0)
    for n in (2, 6):  # the first task's six steps
        for name, average in stable[n].items():
            mean = torch.stack([w[name].double() for w in working[: n + 1]]).mean(0)
            torch.testing.assert_close(average.double(), mean, rtol=1e-5, atol=1e-6)


def test_through_a_growing_head_every_average_follows_its_recursion(tiny: Any) -> None:
    """a = min(1 - 1/(n + 1), 0.8), and n continues to count over tasks. New rows start as copies of the working
    network's."""
    method, working, stable = watched_run(tiny, a_stable=0.8)
    rows = {"head.blocks.1": at_task(tiny, "image", {"name": "seq"}).model.head.blocks[1].detach()}
    expected = {name: array(value) for name, value in stable[0].items()}
    for n, (now, found) in enumerate(zip(working[1:], stable[1:], strict=True), 1):
        a = min(1 - 1 / (n + 1), 0.8)
        for name, value in now.items():
            before = expected[name] if name in expected else array(rows[name])
            expected[name] = a * before + (1 - a) * array(value)
            np.testing.assert_allclose(array(found[name]), expected[name], rtol=1e-4, atol=1e-5)
    assert int(method.steps) == len(working) - 1 == 6 + 10
    assert "head.blocks.1" in expected


@pytest.mark.parametrize("init", ["random", "imprint"])
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_new_head_rows_are_the_same_in_all_three_networks(tiny: Any, head: str, init: str) -> None:
    changes = {"head.kind": head, "head.head_init": init}
    method, stream, config = make(tiny, "image", clser(), **changes)
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    seen: list[Any] = []

    def stages(task: Any) -> list[Any]:
        seen.append([weights(network.head) for network in (method.model, method.plastic, method.stable)])
        return []

    method.stages = stages  # type: ignore[method-assign]
    trainer.learn(stream[1])
    working, plastic, stable = seen[0]
    for average in (plastic, stable):
        assert average.keys() == working.keys()
        assert torch.equal(average["blocks.1"], working["blocks.1"])
        assert not torch.equal(average["blocks.0"], working["blocks.0"])  # it keeps its own old rows
    if head == "linear":
        assert torch.equal(plastic["biases.1"], working["biases.1"])


def test_each_average_is_updated_by_its_own_chance(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 400 steps. If the two draws were one, the stable network would never be updated without the plastic
    one."""
    method = at_task(tiny, "image", clser(r_plastic=0.7, r_stable=0.4))
    steps = 400
    updated = {"plastic": np.zeros(steps), "stable": np.zeros(steps)}

    def count(average: Any, student: Any, beta: float) -> None:
        name = "plastic" if average is method.plastic else "stable"
        assert student is method.model
        updated[name][method.now.step] += 1

    monkeypatch.setattr("bace.methods.clser.average_into", count)
    for step in range(steps):
        method.now.step = step
        method.after_step(new_batch(method, 1))
    for (name, times), chance in zip(updated.items(), (0.7, 0.4), strict=True):
        assert set(times) == {0.0, 1.0}, name
        assert abs(times.mean() - chance) < 4.5 * np.sqrt(chance * (1 - chance) / steps)
    alone = (updated["stable"] * (1 - updated["plastic"])).mean()
    assert abs(alone - 0.4 * 0.3) < 4.5 * np.sqrt(0.12 * 0.88 / steps)


# -- prediction


def test_the_stable_network_predicts_and_the_others_are_scored_beside_it(tiny: Any) -> None:
    method = at_task(tiny, "image", clser())
    scatter(method)
    method.eval()
    batch = new_batch(method)
    for scorer, network in ((None, method.stable), ("working", method.model), ("plastic", method.plastic)):
        np.testing.assert_allclose(array(method.predict(batch, scorer)), logits_of(network, batch), rtol=1e-5)
    found = [array(method.predict(batch, scorer)) for scorer in (None, *method.scorers)]
    assert all(not np.allclose(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda_mse": -0.1}, "lambda_mse is -0.1"),
        ({"r_plastic": 0.5, "r_stable": 0.6}, r"r_stable \(0.6\) and r_plastic \(0.5\)"),
        ({"r_plastic": 1.1}, "must lie between 0 and 1"),
        ({"a_stable": 1.5}, r"a_stable \(1.5\) must lie between 0 and 1"),
    ],
)
def test_what_cannot_work_is_refused(tiny: Any, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny, "image", clser(**settings))
