"""HAT's gates, compensated gradients (finite differences), sparsity and scores are compared with numpy. The weights and
outputs of old tasks stay the same bit for bit in runs with SGD and AdamW under momentum and weight decay. Passes are
compared with an adapter network without gates whose weights are masked by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from steps import array, assert_equal_bits, at_task, cross_entropy, make, recorded_passes, softmax, some, weights
from torch import Tensor, nn

import bace
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.hat import HAT
from bace.methods.parts.step_mask import DeltaMask
from bace.models.adapters import Adapter, add_adapters
from bace.models.gates import Gates, TaskNorm
from bace.models.heads import LinearHead
from bace.models.loading import load_encoder
from bace.models.model import Model

SMALL = {"name": "hat", "latent": 6, "gate_steps": 0}  # with few steps, gates stay about half open


def hat_at(tiny: Any, modality: str = "image", task: int = 1, **options: Any) -> Any:
    """Return a method at step 1 of 4 of the task's only epoch."""
    method = at_task(tiny, modality, {**SMALL, **options}, task, **{"benchmark.tasks": [2, 2, 1]})
    method.now.step, method.now.steps, method.now.epochs = 1, 4, 1
    return method


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def adapters(method: Any) -> list[Adapter]:
    return [module for module in method.model.encoder.modules() if isinstance(module, Adapter)]


# -- gates


def test_a_gated_adapter_computes_its_formula() -> None:
    """The output is u + up(relu(down(u) g1)) g2 with g = sigmoid(s e), here for s = 2, and with g = [e > 0]."""
    encoder_like = nn.ModuleDict({"a": Adapter(2, 2, torch.Generator().manual_seed(0))})
    encoder_like.embeddings, encoder_like.blocks, encoder_like.norm = nn.Identity(), nn.ModuleList(), nn.Identity()
    encoder_like.states = ()
    gates, adapter = Gates(encoder_like), encoder_like["a"]  # type: ignore[arg-type]
    gates.grow(torch.Generator().manual_seed(0))
    down, up = np.array([[1.0, -2.0], [0.5, 1.0]]), np.array([[3.0, 1.0], [4.0, -1.0]])
    e1, e2 = np.array([0.7, -0.3]), np.array([-1.5, 0.2])
    with torch.no_grad():
        for layer, weight, bias, e in ((adapter.down, down, 1.0, e1), (adapter.up, up, -2.0, e2)):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.fill_(bias)
            layer.gate.embeddings[0].copy_(torch.tensor(e))
    u = np.array([1.0, 0.25])
    hidden = down @ u + 1  # 1.5, 1.75
    for scale, g1, g2 in ((2.0, sigmoid(2 * e1), sigmoid(2 * e2)), (None, np.array([1, 0]), np.array([0, 1]))):
        with gates.of(0, scale):
            found = adapter(torch.tensor(u))
        np.testing.assert_allclose(array(found), u + (up @ np.maximum(hidden * g1, 0) - 2) * g2, rtol=1e-6)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_each_tasks_pass_is_that_of_plain_adapters_with_its_masks_and_norms(tiny: Any, modality: str) -> None:
    method = hat_at(tiny, modality, task=2)
    batch = method.stream.batch(method.stream[2].train)
    with torch.no_grad():
        for gate in method.gates.all():
            gate.embeddings[1].normal_(generator=torch.Generator().manual_seed(len(gate.used)))
        for adapter in adapters(method):  # as large as after a long training
            adapter.up.weight.normal_(generator=torch.Generator().manual_seed(1))
    found = []
    for t in range(3):
        plain = load_encoder(tiny.vit if modality == "image" else tiny.bert)
        twins = add_adapters(plain, 6, torch.Generator())
        with torch.no_grad():
            for twin, adapter in zip(twins, adapters(method), strict=True):
                for name in ("down", "up"):
                    gated = getattr(adapter, name)
                    mask = (gated.gate.embeddings[t] > 0).float()
                    getattr(twin, name).weight.copy_(gated.weight * mask[:, None])
                    getattr(twin, name).bias.copy_(gated.bias * mask)
            owned = {name: m for name, m in method.model.encoder.named_modules() if isinstance(m, TaskNorm)}
            for name, its in owned.items():
                plain.get_submodule(name).load_state_dict(its.norms[t].state_dict())
            assert len(owned) == (5 if modality == "image" else 4)  # two per block, and the final one
            expected = Model(plain, LinearHead(16)).eval()(batch).features
            method.model.eval()
            with method.gates.of(t):
                out = method.model(batch)
        torch.testing.assert_close(out.features, expected, rtol=1e-5, atol=1e-5)
        found.append(out.features)
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert torch.equal(method.model(batch).features, found[2])  # outside of `of`: the newest task, binary


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_network_of_the_first_task_starts_as_the_pre_trained_one(tiny: Any, modality: str) -> None:
    method = hat_at(tiny, modality, task=0)
    batch = method.stream.batch(method.stream[0].train)
    plain = Model(load_encoder(tiny.vit if modality == "image" else tiny.bert), LinearHead(16)).eval()
    with torch.no_grad():
        assert torch.equal(method.model.eval()(batch).features, plain(batch).features)
        with method.gates.of(0, method.scale):
            assert torch.equal(method.model(batch).features, plain(batch).features)


@pytest.mark.parametrize("anneal", ["stage", "epoch"])
def test_the_slope_rises_over_the_stage_or_within_every_epoch(tiny: Any, anneal: str) -> None:
    """s = 1/smax + (smax - 1/smax) i/n. Two epochs of 20 examples in batches of 8 are twice three steps."""
    method, stream, config = make(tiny, "image", {**SMALL, "smax": 100.0, "anneal": anneal})
    passed: list[Any] = []
    method.model.register_forward_pre_hook(
        lambda model, _: (
            passed.append((method.gates.active.task, method.gates.active.scale)) if model.training else None
        )
    )
    trainer = Trainer(method, stream, config)
    for task in stream:
        trainer.learn(task)
    n, times = (6, 1) if anneal == "stage" else (3, 2)
    once = [0.01 + 99.99 * i / n for i in range(n)] * times
    assert [task for task, _ in passed] == [0] * 6 + [1] * 6
    assert [scale for _, scale in passed] == pytest.approx(once * 2)


def test_gates_at_the_steepest_slope_are_nearly_binary() -> None:
    """Gates are within 1e-2 of 0 or 1 for |e| > 0.02, with the smax of the paper and with that of Kim et al."""
    e = np.concatenate([np.linspace(-6, -0.02, 500), np.linspace(0.02, 6, 500)])
    for smax in (400.0, HAT().smax):
        assert np.abs(array(torch.sigmoid(smax * torch.tensor(e))) - (e > 0)).max() < 1e-2


# -- the loss and its gradients


def openness(method: Any, scale: float) -> float:
    """Return sum a (1 - A) / sum (1 - A), summed unit by unit."""
    top = bottom = 0.0
    for adapter in adapters(method):
        for layer in (adapter.down, adapter.up):
            for e, used in zip(layer.gate.embeddings[method.now.task].tolist(), layer.gate.used.tolist(), strict=True):
                top += 1 / (1 + math.exp(min(-scale * e, 700))) * (1 - used)
                bottom += 1 - used
    return top / bottom


@pytest.mark.parametrize("task", [0, 1])
def test_the_loss_is_cross_entropy_within_the_task_and_the_openness_of_unused_gates(tiny: Any, task: int) -> None:
    method = hat_at(tiny, task=task, lamb=0.3, gate_steps=0)  # with enlarged steps, no gate would stay open
    batch = some(method, 5)
    scale = 1 / 500 + (500 - 1 / 500) / 4
    loss = method.loss(batch)
    with torch.no_grad(), method.gates.of(task, scale):
        logits = array(method.model(batch).logits)[:, 2 * task : 2 * task + 2]
    assert loss["new"].item() == pytest.approx(cross_entropy(logits, batch.targets.numpy() - 2 * task), rel=1e-9)
    assert loss["sparsity"].item() == pytest.approx(0.3 * openness(method, scale), rel=1e-9)
    used = torch.cat([gate.used for gate in method.gates.all()])
    assert set(used.tolist()) == ({0.0, 1.0} if task else {0.0})
    if not task:
        gates = [array(torch.sigmoid(scale * gate.embeddings[0])) for gate in method.gates.all()]
        assert loss["sparsity"].item() == pytest.approx(0.3 * np.concatenate(gates).mean(), rel=1e-9)


def test_reusing_only_units_in_use_costs_nothing(tiny: Any) -> None:
    method = hat_at(tiny)
    for gate in method.gates.all():
        gate.embeddings[1].data.copy_(torch.where(gate.used > 0, 6.0, -6.0))
    with method.gates.of(1, 500.0):
        assert method.gates.openness().item() == 0
        for gate in method.gates.all():
            gate.used.fill_(1)
        assert method.gates.openness().item() == 0  # no unit is free, and the result is not 0 / 0


def test_without_its_weight_the_sparsity_is_left_out(tiny: Any) -> None:
    method = hat_at(tiny, lamb=0.0)
    assert set(method.loss(some(method, 5))) == {"new"}


def test_compensated_gradients_are_smax_times_those_of_the_unannealed_gate(tiny: Any) -> None:
    """The expected gradient is smax sigmoid'(e) dL/da, with dL/da from central differences of the whole loss, for |s e|
    < 50."""
    method = hat_at(tiny, lamb=0.3, smax=40.0)
    with torch.no_grad():
        for adapter in adapters(method):
            for seed, layer in enumerate((adapter.down, adapter.up)):
                layer.weight.normal_(generator=torch.Generator().manual_seed(seed))
    batch, s = some(method, 5), method.scale  # about 10: |s e| < 36, so that 1 - a exceeds rounding errors
    torch.stack(list(method.loss(batch).values())).sum().backward()
    method.before_step(batch)
    largest = 0.0
    for gate in method.gates.all()[::3]:
        e = gate.embeddings[1]
        for unit in range(2):
            start = e.data[unit].clone()
            a = float(torch.sigmoid(s * start))
            assert 1e-9 < a < 1 - 1e-9
            h = 1e-4 * a * (1 - a)
            values = []
            for shifted in (a + h, a - h):
                e.data[unit] = math.log(shifted / (1 - shifted)) / s
                with torch.no_grad():
                    values.append(sum(term.item() for term in method.loss(batch).values()))
            e.data[unit] = start
            slope = (values[0] - values[1]) / (2 * h)
            flat = float(sigmoid(start.numpy()) * (1 - sigmoid(start.numpy())))
            assert e.grad[unit].item() == pytest.approx(40 * flat * slope, rel=2e-2, abs=1e-5)
            largest = max(largest, abs(slope))
    assert largest > 0.01


def test_the_compensation_is_clipped_where_the_gate_is_saturated(tiny: Any) -> None:
    """With s e = -200, the factor has cosh(50) in place of cosh(200)."""
    method = hat_at(tiny)
    gate = method.gates.all()[0]
    gate.embeddings[1].data.fill_(-2.0)
    for other in method.gates.all():
        other.embeddings[1].grad = torch.full_like(other.embeddings[1], 1e-12)
    method.gates.compensate(1, 100.0, 500.0)
    factor = 500 / 100 * (math.cosh(50) + 1) / (math.cosh(2) + 1)
    np.testing.assert_allclose(array(gate.embeddings[1].grad), 1e-12 * factor, rtol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"train.optimiser": "adamw", "train.lr": 0.005}], ids=["sgd", "adamw"])
def test_gates_move_as_far_as_in_so_many_steps(tiny: Any, settings: dict[str, Any]) -> None:
    """If eight steps are wanted and one is taken, gates move eight times as far; adapters, norms and head move as
    usual. If one step or none is wanted, gates move as far as the optimiser says."""
    ends = {}
    for wanted in (0, 1, 8):
        changes = {"train.batch_size": 20, "train.epochs": 1, **settings}
        method, stream, config = make(tiny, "image", {**SMALL, "gate_steps": wanted, "lamb": 50.0}, **changes)
        Trainer(method, stream, config).learn(stream[0])
        ends[wanted] = weights(method.model)
    start, _, _ = make(tiny, "image", {**SMALL}, **{"train.batch_size": 20, **settings})
    start.grow(start.stream[0])
    for name, before in weights(start.model).items():
        assert torch.equal(ends[0][name], ends[1][name])
        if "gate.embeddings" in name:
            moved = (before + 8 * (ends[0][name] - before)).clamp(-6, 6)
            torch.testing.assert_close(ends[8][name], moved, rtol=1e-4, atol=1e-5)
            assert (ends[0][name] - before).abs().max() > 1e-3
        elif not name.endswith("used"):
            assert torch.equal(ends[0][name], ends[8][name])


def test_embeddings_stay_between_minus_six_and_six(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", {**SMALL, "lr": 1.0, "lamb": 50.0})
    Trainer(method, stream, config).learn(stream[0])
    embeddings = torch.cat([gate.embeddings[0].detach() for gate in method.gates.all()])
    assert embeddings.abs().max().item() == 6


# -- the protection of old tasks


OPTIMISERS = [
    {"train.optimiser": "sgd", "train.weight_decay": 0.1},
    {"train.optimiser": "adamw", "train.weight_decay": 0.1, "train.lr": 0.005},
]


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("settings", OPTIMISERS, ids=lambda s: s["train.optimiser"])
def test_weights_in_use_and_outputs_of_old_tasks_keep_every_bit(tiny: Any, modality: str, settings: Any) -> None:
    method, stream, config = make(tiny, modality, SMALL, **{"benchmark.tasks": [2, 1, 2], **settings})
    trainer = Trainer(method, stream, config)
    everything = torch.cat([task.test for task in stream])
    with stream.licence("test", everything):
        batch = stream.batch(everything)
    before: list[tuple[dict[str, Tensor], list[Any]]] = []
    for task in stream:
        trainer.learn(task)
        for earlier, (old, outs) in enumerate(before):
            now = method.passes(batch)
            for mine, its in zip(outs, now, strict=False):
                assert torch.equal(mine.features, its.features)
                assert torch.equal(mine.logits, its.logits)
            changed = 0
            for name, value in weights(method.model).items():
                if ".adapter." not in name or not name.endswith(("weight", "bias")):
                    continue
                layer, kind = name.rsplit(".", 1)
                holds = _in_use(old, layer, kind)
                assert torch.equal(value[holds], old[name][holds])
                assert torch.equal(torch.signbit(value[holds]), torch.signbit(old[name][holds]))
                if earlier == task.index - 1:
                    changed += int((value[~holds] != old[name][~holds]).sum())
            assert changed or earlier < task.index - 1
        before.append((weights(method.model), method.passes(batch)))


def _in_use(state: dict[str, Tensor], layer: str, kind: str) -> Tensor:
    """Find the weights w_ij with A_i = A_j = 1 in plain loops. `down` has no gates before it."""
    own = state[f"{layer}.gate.used"]
    if kind == "bias":
        return own == 1
    weight = state[f"{layer}.{kind}"]
    holds = torch.zeros_like(weight, dtype=torch.bool)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            enters = layer.endswith("down") or state[f"{layer.removesuffix('up')}down.gate.used"][j] == 1
            holds[i, j] = own[i] == 1 and enters
    return holds


def test_all_weights_that_no_task_computes_with_are_free(tiny: Any) -> None:
    method = hat_at(tiny)
    masks = {id(p): mask for p, mask in method.gates.free()}
    state, counts = weights(method.model), {0: 0, 1: 0}
    for name, p in method.model.named_parameters():
        if ".adapter." in name and name.endswith(("weight", "bias")):
            layer, kind = name.rsplit(".", 1)
            assert torch.equal(masks.pop(id(p)) == 0, _in_use(state, layer, kind))
            counts[p.ndim - 1] += 1
    assert not masks
    assert counts == {0: 8, 1: 8}


def test_gates_norms_and_heads_of_old_tasks_and_the_backbone_keep_every_bit(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", SMALL, **{"train.weight_decay": 0.1})
    trainer = Trainer(method, stream, config)
    trainer.learn(stream[0])
    before = weights(method.model)
    trainer.learn(stream[1])
    after = weights(method.model)
    shared = [name for name in before if ".adapter." in name and name.endswith(("weight", "bias", "used"))]
    assert_equal_bits(
        {name: value for name, value in before.items() if name not in shared},
        {name: after[name] for name in before if name not in shared},
    )
    owned = [name for name in after if name not in before]
    assert {name.rsplit(".", 2)[0].rsplit(".", 1)[-1] for name in owned if "norm" in name} == {"norms"}
    started = at_task(tiny, "image", SMALL).model.state_dict()
    assert all(not torch.equal(after[name], started[name]) for name in owned)  # the new parts were trained


def test_the_accumulated_mask_is_binary_and_only_grows(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", SMALL, **{"benchmark.tasks": [2, 1, 2]})
    trainer = Trainer(method, stream, config)
    expected = [torch.zeros_like(gate.used) for gate in method.gates.all()]
    for task in stream:
        trainer.learn(task)
        for mask, gate in zip(expected, method.gates.all(), strict=True):
            mask[gate.embeddings[task.index] > 0] = 1
            assert torch.equal(gate.used, mask)
    assert any((mask == 0).any() for mask in expected)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_masked_step_holds_weights_scales_or_leaves_them(kind: str) -> None:
    """The result is p_old + mask (p_new - p_old) with momentum and weight decay, with zero and non-zero gradients."""
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    start[0, 1:] = -0.0
    plain, masked = (nn.Parameter(start.clone()) for _ in range(2))
    mask = torch.tensor([[0.0] * 4, [0.25] * 4, [1.0] * 4])
    delta = DeltaMask([(masked, mask)])
    made = [
        torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)
        if kind == "sgd"
        else torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
        for p in (plain, masked)
    ]
    for step in range(4):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)) * (step < 2)
        old = masked.detach().clone()
        plain.data[1] = old[1]  # both start from the same weights, so that the plain step is the unmasked one
        for p, optimiser in zip((plain, masked), made, strict=True):
            p.grad = gradient.clone()
            if p is masked:
                delta.before_step()
            optimiser.step()
        delta.after_step()
        assert torch.equal(masked[0], start[0])
        assert torch.equal(torch.signbit(masked[0]), torch.signbit(start[0]))
        torch.testing.assert_close(masked[1], old[1] + 0.25 * (plain[1] - old[1]))
        assert torch.equal(masked[2], plain[2])
    assert not torch.equal(plain[0], start[0])


# -- prediction


def test_scores_are_raw_logits_or_softmaxes_of_each_tasks_own_head(tiny: Any) -> None:
    scores = {}
    for kind in ("logits", "softmax"):
        method = hat_at(tiny, task=2, scores=kind)
        batch = some(method, 5)
        method.model.eval()
        with recorded_passes() as passes:
            scores[kind] = array(method.predict(batch))
        assert len(passes) == 3
    parts = []
    for t, columns in enumerate((slice(0, 2), slice(2, 4), slice(4, 5))):
        with torch.no_grad(), method.gates.of(t):
            parts.append(array(method.model(batch).logits)[:, columns])
    np.testing.assert_allclose(scores["logits"], np.concatenate(parts, 1), rtol=1e-6)
    likely = [softmax(part) for part in parts]
    np.testing.assert_allclose(scores["softmax"], np.concatenate(likely, 1), rtol=1e-5)


def test_the_least_uncertain_head_predicts(tiny: Any) -> None:
    """There are two heads of two classes, because a head of one class is always certain."""
    method = hat_at(tiny, scores="entropy")
    with torch.no_grad():
        for block in method.head.blocks:
            block.normal_(generator=torch.Generator().manual_seed(len(block)))
    shown = torch.cat([task.test for task in method.stream])
    with method.stream.licence("test", shown):
        batch = method.stream.batch(shown)
    method.model.eval()
    likely = []
    for t in range(2):
        with torch.no_grad(), method.gates.of(t):
            likely.append(softmax(array(method.model(batch).logits)[:, 2 * t : 2 * t + 2]))
    sure = np.stack([(p * np.log(p)).sum(1) for p in likely], 1).argmax(1)
    assert set(sure.tolist()) == {0, 1}
    expected = [2 * t + likely[t][row].argmax() for row, t in enumerate(sure)]
    assert method.predict(batch).argmax(1).tolist() == expected


def test_early_stopping_watches_the_tasks_own_head(tiny: Any) -> None:
    method = hat_at(tiny)
    valid = method.stream[1].train
    method.model.eval()
    logits = array(method.model(method.stream.batch(valid)).logits)[:, 2:4]
    targets = method.stream.targets[valid].numpy() - 2
    assert method.validation_loss(valid) == pytest.approx(cross_entropy(logits, targets), rel=1e-5)
    method.now.stage = "another"
    assert method.validation_loss(valid) is None


# -- the backbone


def test_the_backbones_own_adapters_are_taken_if_it_has_some(tiny: Any) -> None:
    settings = {"benchmark.tasks": [2, 2]}
    made = bace.run(tiny.settings("image", method=SMALL, **settings))
    method = {"name": "hat", "gate_steps": 0}
    taken = bace.run(tiny.settings("image", method=method, **settings, **{"backbone.adapter": 6}))
    assert [adapter.down.out_features for adapter in adapters(taken.method)] == [6] * 4
    assert made.matrix == taken.matrix
    assert_equal_bits(weights(made.method.model), weights(taken.method.model))


def test_a_frozen_prefix_has_no_gates(tiny: Any) -> None:
    for settings in ({"backbone.freeze": 1}, {"backbone.freeze": 1, "backbone.adapter": 6}):
        method, stream, _ = make(tiny, "image", SMALL, **settings)
        method.grow(stream[0])
        assert len(method.gates.layers) == 2
        assert len(method.gates.norms) == 3
        prefix = method.model.encoder.blocks[0]
        assert not any(p.requires_grad for p in prefix.parameters())
        assert not any("gate" in name or "norms" in name for name in prefix.state_dict())


def test_what_makes_no_sense_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="freeze fewer blocks"):
        make(tiny, "image", SMALL, **{"backbone.freeze": 2})
    with pytest.raises(ConfigError, match=r"HAT is not defined for token data .*O belongs to no task"):
        make(tiny, "token", SMALL)
    for wrong in ({"smax": 0.5}, {"lamb": -1.0}, {"latent": 0}, {"lr": 0.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} \\({next(iter(wrong.values()))}\\)"):
            HAT(**wrong)
