"""The optimiser of a stage: torch's own, over named groups of parameters that have their own learning rates."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from bace.config.schema import Training
from bace.core.method import Stage
from bace.errors import CheckpointError, TrainingError

OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
ENCODER = "encoder"  # the group of parameters for which no module names another


def groups_of(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """A module's parameters by the `optimiser_group` that the nearest module around them names."""
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
    """What a stage optimises: the groups that it names, or all of its module."""
    if stage.groups is None:
        return groups_of(stage.module())
    return {name: list(parameters) for name, parameters in stage.groups().items()}


def make_optimiser(
    stage: Stage, groups: Mapping[str, Iterable[nn.Parameter]], train: Training
) -> torch.optim.Optimizer:
    """A new one. Weights decay; biases, norms and scales do not."""
    lr = train.lr if stage.lr is None else stage.lr
    rates = {} if train.head_lr is None or stage.lr is not None else {"head": train.head_lr}
    rates |= stage.rates
    trained = [(p, rates.get(name, lr)) for name, parameters in groups.items() for p in parameters if p.requires_grad]
    alike: dict[tuple[float, float], list[nn.Parameter]] = {}
    for p, rate in trained:
        alike.setdefault((rate, train.weight_decay if p.ndim > 1 else 0.0), []).append(p)
    options = [{"params": ps, "lr": r, "base_lr": r, "weight_decay": decay} for (r, decay), ps in alike.items()]
    if not options:
        raise TrainingError(f"stage '{stage.name}' has no trainable parameter")
    kind = stage.optimiser or train.optimiser
    # fused: one kernel instead of a Python loop over parameters
    if kind == "adam":
        return torch.optim.Adam(options, lr=lr, fused=True)
    if kind == "adamw":
        return torch.optim.AdamW(options, lr=lr, fused=True)
    momentum = train.momentum if stage.momentum is None else stage.momentum
    optimiser = torch.optim.SGD(options, lr=lr, momentum=momentum, fused=True)
    if momentum:  # what the first step would make; fused SGD cannot take some parameters with and some without
        optimiser.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p, _ in trained})
    return optimiser


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


def learning_rate_factor(stage: Stage, train: Training, epochs: float, steps: int) -> float:
    """For the step after this many epochs (a fraction too) of `steps` steps each: a linear warm-up, then the schedule
    over what is left."""
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
    """No gradient is computed for the parameters of a module that are not trained."""
    moving = set(trained)
    at_rest = [p for p in module.parameters() if p.requires_grad and p not in moving]
    try:
        for p in at_rest:
            p.requires_grad_(False)
        yield
    finally:
        for p in at_rest:
            p.requires_grad_(True)


# -- its state in a checkpoint: by parameter and slot


def state_of(optimiser: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    return {
        f"{names[p]}|{slot}": torch.as_tensor(value)
        for p, slots in optimiser.state.items()
        for slot, value in slots.items()
        if value is not None
    }


def restore_state(optimiser: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Tensor]) -> None:
    """Where there is none for a parameter, its state stays as it is."""
    slots_of: dict[str, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, _, slot = key.rpartition("|")
        slots_of.setdefault(name, {})[slot] = value
    for group in optimiser.param_groups:
        for p in group["params"]:
            if slots := slots_of.get(names[p]):
                if any(value.ndim and (value.shape != p.shape or value.dtype != p.dtype) for value in slots.values()):
                    raise CheckpointError(f"the checkpoint's optimiser state of '{names[p]}' does not fit it")
                optimiser.state[p] = {slot: value.to(p.device) for slot, value in slots.items()}
