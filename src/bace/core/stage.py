"""A stage of training, which a method declares and the trainer carries out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bace.config.schema import OptimiserName
from bace.data.batch import Batch

Loss = Tensor | dict[str, Tensor] | None
SMALLEST_BATCH = 8  # the limit to which batches shrink if a task has too few steps


@dataclass
class Stage:
    """One stage of training. `examples` and `groups` are called after `prepare`, so they may be decided late.

    On resume, `Method.stages` creates the stages again: `structure` (modules and buffers of the right shape, without
    values) is replayed, but `prepare` (values) runs only once.
    """

    name: str
    loss: Callable[[Batch], Loss]
    epochs: int
    batch_size: int
    examples: Callable[[], Tensor]  # ids
    module: Callable[[], nn.Module]  # is trained and in train mode; everything else is in eval mode
    # the optimised parameters by group; the other parameters of the module get no gradient meanwhile. Default: all
    # parameters of the module, in the groups that its modules name (`optimiser_group`)
    groups: Callable[[], Mapping[str, Iterable[nn.Parameter]]] | None = None
    # the ids of an epoch in order, as many as `examples`; default: each once, shuffled
    sampler: Callable[[torch.Generator], Tensor] | None = None
    augment: bool = True  # random views; otherwise clean ones
    cached: bool = False  # the loss uses outputs that before_epoch has computed, so its batches have no inputs
    optimise: bool = True  # False: a stage without gradients
    min_steps: int = 0  # the number of epochs is raised until there are at least this many optimiser steps
    lr: float | None = None  # default: the run's, as for the optimiser, momentum, weight decay, clip and schedule
    rates: Mapping[str, float] = field(default_factory=dict)  # learning rates of groups that have their own
    optimiser: OptimiserName | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    schedule: Callable[[float], float] | None = None  # epochs so far (may be fractional) -> factor of the learning rate
    structure: Callable[[], None] | None = None
    prepare: Callable[[], None] | None = None


def enough_steps(examples: int, epochs: int, batch: int, least: int) -> tuple[int, int]:
    """Epochs and batch size for at least `least` steps. Published tunings are long: a few epochs over thousands of
    examples are a thousand steps, but over hundreds a few dozen. If there are too few steps, batches become smaller,
    but not below SMALLEST_BATCH, and then there are more epochs."""
    if least:
        batch = min(batch, max(SMALLEST_BATCH, examples * epochs // least))
    steps = max(-(-examples // batch), 1)  # of an epoch
    return max(epochs, -(-least // steps)), batch
