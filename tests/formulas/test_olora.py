"""O-LoRA's overlap of subspaces is compared with hand-computed numbers and numpy, and its network with merged weights.
In the first task it equals LoRA, written with torch's own parametrisation of the projections in a plain loop."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import (
    array,
    at_stage,
    at_task,
    cross_entropy,
    learned_before,
    logits_of,
    make,
    recorded_passes,
    some,
    weights,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods.olora import OLoRA

OPTIONS = {"name": "o-lora", "rank": 3, "tune_epochs": 2, "tune_batch": 6, "tune_steps": 0}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_loss_is_cross_entropy_over_new_classes_and_the_overlap_of_subspaces(tiny: Any, modality: str) -> None:
    method = at_task(tiny, modality, OPTIONS, task=2, **{"benchmark.tasks": [2, 1, 2]})
    batch, sites = some(method, 5), range(4)
    A = [[array(method.lora.sets[t][site].A) for site in sites] for t in range(3)]
    overlap = sum(
        np.abs(A[t][site][r] @ A[2][site][s]) for t in (0, 1) for site in sites for r in range(3) for s in range(3)
    )
    terms = method.loss(batch)
    assert float(terms["orthogonal"]) == pytest.approx(0.5 * overlap)
    expected = cross_entropy(logits_of(method.model, batch)[:, 3:], batch.targets.numpy() - 3)
    assert float(terms["new"]) == pytest.approx(expected)


def test_the_overlap_by_hand(tiny: Any) -> None:
    """One projection has the row (1, 2, 0, ...) of the old task and the rows (3, -1, 0, ...), (0, -2, 0, ...) of the
    new task, which give |1| + |-4|. All other projections are orthogonal."""
    method = at_task(tiny, "image", {**OPTIONS, "rank": 2})
    with torch.no_grad():
        for old, new in zip(method.lora.subspaces(0), method.lora.subspaces(1), strict=True):
            old.zero_()
            new.zero_()
            old[1, 5], new[0, 6] = 1.0, 1.0
        old[0, :2], new[0, :2], new[1, :2] = (
            torch.tensor([1.0, 2.0]),
            torch.tensor([3.0, -1.0]),
            torch.tensor([0.0, -2]),
        )
    assert float(method.overlap()) == 5.0


def test_the_overlap_shrinks_in_training_where_it_counts(tiny: Any) -> None:
    def left(weight: float) -> float:
        options = {**OPTIONS, "orthogonality": weight, "tune_epochs": 10, "tune_lr": 0.005}
        return float(learned_before(tiny, "image", options, 2).method.overlap())

    assert left(0.5) < 0.5 * left(0.0)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_in_the_first_task_it_is_lora(tiny: Any, weight: float) -> None:
    """The reference is W + B A by torch's parametrisation, trained with AdamW in a plain loop over the same batches."""

    class Plus(nn.Module):
        def __init__(self, A: Tensor, B: Tensor) -> None:
            super().__init__()
            self.A, self.B = (nn.Parameter(value.detach().clone()) for value in (A, B))

        def forward(self, W: Tensor) -> Tensor:
            return W + self.B @ self.A

    method = at_task(tiny, "image", {**OPTIONS, "orthogonality": weight}, task=0)
    head = [p.detach().clone().requires_grad_() for p in method.model.head.of(0)]
    encoder = make(tiny, "image", {"name": "seq"})[0].model.encoder.eval().requires_grad_(False)
    changes = []
    for block, parts in zip(encoder.blocks, np.array(list(method.lora.sets[0])).reshape(-1, 2), strict=True):
        for linear, part in zip((block.attention.q_proj, block.attention.v_proj), parts, strict=True):
            changes.append(Plus(part.A, part.B))
            parametrize.register_parametrization(linear, "weight", changes[-1])

    learned, stream, config = make(tiny, "image", {**OPTIONS, "orthogonality": weight})
    with recorded_passes() as passes:
        Trainer(learned, stream, config).learn(stream[0])
    trained = [p for change in changes for p in change.parameters()]
    optimiser = torch.optim.AdamW([*trained, *head], lr=0.001, weight_decay=0.0)
    for batch in (passed.batch for passed in passes if passed.training):
        optimiser.zero_grad()
        F.cross_entropy(F.linear(encoder(batch.inputs)[:, 0], *head), batch.targets).backward()
        optimiser.step()
    for change, part in zip(changes, learned.lora.sets[0], strict=True):
        assert part.B.any()
        torch.testing.assert_close(part.A, change.A, atol=1e-10, rtol=0)
        torch.testing.assert_close(part.B, change.B, atol=1e-10, rtol=0)
    torch.testing.assert_close(learned.model.head.blocks[0], head[0], atol=1e-10, rtol=0)


def test_a_task_changes_its_own_change_and_head_rows_alone_and_all_changes_predict(tiny: Any) -> None:
    method, stream, config = make(tiny, "image", OPTIONS)
    trainer, before = Trainer(method, stream, config), weights(method)
    trainer.learn(stream[0])
    first = weights(method)
    trainer.learn(stream[1])
    last = weights(method)
    assert all(torch.equal(value, last[name]) for noted in (before, first) for name, value in noted.items())
    batch = some(method, 4)
    predicted = method.predict(batch)
    with method.lora.of(0, 1):
        assert torch.equal(method.model(batch).logits, predicted)
    with method.lora.of(1):
        assert not torch.equal(method.model(batch).logits, predicted)


def test_a_weight_of_zero_and_the_first_task_leave_the_overlap_out(tiny: Any) -> None:
    for method in (at_task(tiny, "image", {**OPTIONS, "orthogonality": 0.0}), at_task(tiny, "image", OPTIONS, task=0)):
        assert set(method.loss(some(method))) == {"new"}


def test_the_published_settings_are_the_default(tiny: Any) -> None:
    assert (OLoRA().rank, OLoRA().orthogonality, OLoRA().tune_batch) == (8, 0.5, 64)
    _, _, stage = at_stage(tiny, "text", {"name": "o-lora", "tune_steps": 0}, "tune", task=0)
    assert (stage.epochs, stage.optimiser, stage.lr, stage.weight_decay) == (1, "adamw", 0.001, 0.0)
    assert {stage.schedule(e) for e in (0, 0.5, 1)} == {1.0}


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"orthogonality": -0.5}, {"tune_lr": 0.0}, {"tune_steps": -1}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OLoRA(**wrong)
