"""The optimiser of a stage: one of torch's, over named groups of parameters with their own learning rates."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from bace.config.schema import Training
from bace.core.stage import Stage
from bace.errors import CheckpointError, TrainingError

OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
ENCODER = "encoder"  # the default group


def groups_of(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """A module's parameters by group; the innermost module with an `optimiser_group` names the group."""
    groups: dict[str, list[nn.Parameter]] = {}
    taken: set[nn.Parameter] = set()

    def visit(part: nn.Module, name: str) -> None:
        name = getattr(part, "optimiser_group", name)
        own = [p for p in part.parameters(recurse=False) if p not in taken]
        taken.update(own)
        groups.setdefault(name, []).extend(own)
        for child in part.children():
            visit(child, name)

    visit(module, ENCODER)
    return groups


def stage_groups(stage: Stage) -> dict[str, list[nn.Parameter]]:
    """The groups that a stage optimises: those that it names, or all parameters of its module."""
    if stage.groups is None:
        return groups_of(stage.module())
    return {name: list(parameters) for name, parameters in stage.groups().items()}


def make_optimiser(
    stage: Stage, groups: Mapping[str, Iterable[nn.Parameter]], train: Training
) -> torch.optim.Optimizer:
    """A new optimiser. Weight decay applies to weights, not to biases, norms and scales."""
    lr = train.lr if stage.lr is None else stage.lr
    rates = {} if train.head_lr is None or stage.lr is not None else {"head": train.head_lr}
    rates |= stage.rates
    trained = [(p, rates.get(name, lr)) for name, parameters in groups.items() for p in parameters if p.requires_grad]
    weight_decay = train.weight_decay if stage.weight_decay is None else stage.weight_decay
    alike: dict[tuple[float, float], list[nn.Parameter]] = {}
    for p, rate in trained:
        alike.setdefault((rate, weight_decay if p.ndim > 1 else 0.0), []).append(p)
    options = [{"params": ps, "lr": r, "base_lr": r, "weight_decay": decay} for (r, decay), ps in alike.items()]
    if not options:
        raise TrainingError(f"stage '{stage.name}' has no trainable parameter")
    kind = stage.optimiser or train.optimiser
    # fused: one kernel instead of a Python loop over the parameters
    if kind == "adam":
        return torch.optim.Adam(options, lr=lr, fused=True)
    if kind == "adamw":
        return torch.optim.AdamW(options, lr=lr, fused=True)
    momentum = train.momentum if stage.momentum is None else stage.momentum
    optimiser = torch.optim.SGD(options, lr=lr, momentum=momentum, fused=True)
    if momentum:  # as the first step would; fused SGD needs momentum buffers for all parameters or for none
        optimiser.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p, _ in trained})
    return optimiser


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


def learning_rate_factor(stage: Stage, train: Training, epochs: float, steps: int) -> float:
    """The factor for the step after this (possibly fractional) number of epochs of `steps` steps each: a linear
    warm-up, then the schedule over the remaining steps."""
    if stage.schedule:
        return stage.schedule(epochs)
    progress = epochs / stage.epochs
    if progress < train.warmup:
        return min((epochs + 1 / steps) / (train.warmup * stage.epochs), 1.0)
    progress = (progress - train.warmup) / (1 - train.warmup)
    if train.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0


@contextlib.contextmanager
def resting(module: nn.Module, trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Compute no gradient for the parameters of a module that are not trained."""
    moving = set(trained)
    at_rest = [p for p in module.parameters() if p.requires_grad and p not in moving]
    try:
        for p in at_rest:
            p.requires_grad_(False)
        yield
    finally:
        for p in at_rest:
            p.requires_grad_(True)


@dataclass(frozen=True)
class OptimiserState:
    """The state that an optimiser keeps for each parameter, to be passed on to another optimiser of its kind. A
    parameter that was replaced since then starts without state, even if it has the same name."""

    kind: str  # "SGD", "AdamW"; "" for an old checkpoint that does not record it
    slots: dict[Tensor, dict[str, Tensor]]

    @classmethod
    def of(cls, optimiser: torch.optim.Optimizer) -> Self:
        noted = {
            p: {slot: torch.as_tensor(value) for slot, value in slots.items() if value is not None}
            for p, slots in optimiser.state.items()
        }
        return cls(type(optimiser).__name__, noted)

    @classmethod
    def from_names(cls, kind: str, saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Self:
        """The inverse of `by_name`."""
        noted: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in saved.items():
            name, _, slot = key.rpartition("|")
            if (p := parameters.get(name)) is None:
                continue
            if value.ndim and (value.shape != p.shape or value.dtype != p.dtype):
                raise CheckpointError(f"the checkpoint's optimiser state does not fit the parameter '{name}'")
            noted.setdefault(p, {})[slot] = value
        return cls(kind, noted)

    def by_name(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The state by parameter and slot, for a checkpoint."""
        return {f"{name}|{slot}": t for name, p in parameters.items() for slot, t in self.slots.get(p, {}).items()}

    def hand_over(self, optimiser: torch.optim.Optimizer) -> None:
        if self.kind in ("", type(optimiser).__name__):
            for p in (p for group in optimiser.param_groups for p in group["params"] if p in self.slots):
                optimiser.state[p] = {slot: value.to(p.device) for slot, value in self.slots[p].items()}
