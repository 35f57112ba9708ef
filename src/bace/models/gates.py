"""The parts that each task has in a frozen transformer with adapters: gates on the adapters' units, and LayerNorms.

The gates are HAT's (Serra et al., Overcoming Catastrophic Forgetting with Hard Attention to the Task, ICML 2018),
placed on adapters as in ROW (Kim et al., ICML 2023): u + up(relu(down(u) * g1)) * g2. A context chooses the task whose
gates and norms a pass uses: `with gates.of(task): model(batch)`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.adapters import Adapter
from bace.models.encoder import Encoder


@dataclass
class Active:
    """The task whose gates and norms are used now, shared by all layers of an encoder."""

    task: int = -1  # the newest
    scale: float | None = None  # s; None: binary gates


class Gate(nn.Module):
    """The gates of one layer's units: a = sigmoid(s e) with an embedding e for each task; binary, a = [e > 0]."""

    used: Tensor  # (units,) A: 1 where a finished task's gate is open, else 0

    def __init__(self, units: int, active: Active) -> None:
        super().__init__()
        self.active = active
        self.embeddings = nn.ParameterList()  # (units,) each
        self.register_buffer("used", torch.zeros(units))

    def forward(self) -> Tensor:  # (units,)
        e = self.embeddings[self.active.task]
        return (e > 0).to(e.dtype) if self.active.scale is None else torch.sigmoid(self.active.scale * e)

    def grow(self, generator: torch.Generator) -> None:
        self.embeddings.append(nn.Parameter(torch.randn(len(self.used), generator=generator).to(self.used.device)))


class TaskNorm(nn.Module):
    """A LayerNorm for each task; each starts as the pre-trained one."""

    def __init__(self, norm: nn.LayerNorm, active: Active) -> None:
        super().__init__()
        self.active, self.pretrained = active, norm
        self.norms = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norms[self.active.task](x))

    def grow(self) -> None:
        self.norms.append(copy.deepcopy(self.pretrained).requires_grad_(True))


class Gates:
    """All gates and norms of an encoder. The modules themselves become parts of it, so they are in its state.

    Afterwards, only adapters, gates and these norms of the encoder (in the blocks, and the final one) are trainable. A
    frozen prefix does not change. Outside of `of`, the gates and norms of the newest task are used, with binary gates.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.active = Active()
        adapters = [m for m in encoder.modules() if isinstance(m, Adapter) and m.up.weight.requires_grad]
        if not adapters:
            raise ConfigError("gates need adapters that are trained: freeze fewer blocks (backbone.freeze)")
        self.norms = _replace_norms(encoder, self.active)
        encoder.requires_grad_(False)
        # each adapter with the gates of its hidden and of its output units
        self.layers = [(a.requires_grad_(True), self._gated(a.down), self._gated(a.up)) for a in adapters]
        encoder.states = (*encoder.states, self.noted)

    def _gated(self, layer: nn.Linear) -> Gate:
        gate = Gate(layer.out_features, self.active)
        layer.add_module("gate", gate.to(layer.weight.device))
        layer.register_forward_hook(_multiply)
        return gate

    @contextmanager
    def of(self, task: int, scale: float | None = None) -> Iterator[None]:
        """Make passes use the gates and norms of this task, with a = sigmoid(scale e) or (None) binary gates."""
        before = self.active.task, self.active.scale
        self.active.task, self.active.scale = task, scale
        try:
            yield
        finally:
            self.active.task, self.active.scale = before

    def noted(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that restores the task and scale that passes use now."""
        return partial(self.of, self.active.task, self.active.scale)

    def all(self) -> list[Gate]:
        return [gate for _, hidden, output in self.layers for gate in (hidden, output)]

    # -- a task's life

    def grow(self, generator: torch.Generator) -> None:
        """Add the parts of a new task: embeddings drawn from the standard normal, and copies of the pre-trained
        norms."""
        for gate in self.all():
            gate.grow(generator)
        for norm in self.norms:
            norm.grow()

    def parameters(self, task: int) -> list[nn.Parameter]:
        """The adapters' weights and the parts of this task."""
        layers = [layer for adapter, _, _ in self.layers for layer in (adapter.down, adapter.up)]
        weights = [p for layer in layers for p in layer.parameters(recurse=False)]
        own = [p for norm in self.norms for p in norm.norms[task].parameters()]
        return [*weights, *self.embeddings(task), *own]

    def embeddings(self, task: int) -> list[nn.Parameter]:
        return [gate.embeddings[task] for gate in self.all()]

    def openness(self) -> Tensor:  # ()
        """sum a (1 - A) / sum (1 - A) over all units: the share of units unused so far that the active gates open."""
        free = [1 - gate.used for gate in self.all()]
        opened = torch.stack([(gate() * f).sum() for gate, f in zip(self.all(), free, strict=True)]).sum()
        return opened / torch.cat(free).sum().clamp(min=1)  # no unit free: 0

    @torch.no_grad()
    def compensate(self, task: int, scale: float, smax: float) -> None:
        """Multiply the embeddings' gradients by smax/s (cosh(s e) + 1) / (cosh(e) + 1), s e clipped at +-50.

        They become smax sigmoid'(e) dL/da, as without the annealing, which makes them vanish."""
        for gate in self.all():
            e = gate.embeddings[task]
            assert e.grad is not None
            e.grad *= smax / scale * (torch.cosh((scale * e).clamp(-50, 50)) + 1) / (torch.cosh(e) + 1)

    @torch.no_grad()
    def clamp(self, task: int, bound: float) -> None:
        for gate in self.all():
            gate.embeddings[task].clamp_(-bound, bound)

    @torch.no_grad()
    def keep(self, task: int) -> None:
        """A <- max(A, a), with the task's binary gates: the units that it uses are protected from now on."""
        with self.of(task):
            for gate in self.all():
                gate.used.copy_(torch.maximum(gate.used, gate()))

    def free(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The adapters' weights, each with its mask: 1 - min(A_i, A_j) for the weight from unit j to unit i.

        The inputs of `down` have no gates, so only its output units count. A task uses w_ij only if its gates of i and
        j are both open. Then the mask is 0 for all later tasks, and the task's outputs never change."""
        for adapter, hidden, output in self.layers:
            yield adapter.down.weight, (1 - hidden.used)[:, None].expand_as(adapter.down.weight)
            yield adapter.down.bias, 1 - hidden.used
            yield adapter.up.weight, 1 - torch.minimum(output.used[:, None], hidden.used)
            yield adapter.up.bias, 1 - output.used


def _multiply(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
    gate: Tensor = layer.get_submodule("gate")()  # found on the layer, so that a copied layer uses its own
    return output * gate.to(output.dtype)


def _replace_norms(encoder: Encoder, active: Active) -> list[TaskNorm]:
    embedding = set(encoder.embeddings.modules())
    found = []
    for parent in list(encoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm) and child.weight.requires_grad and parent not in embedding:
                found.append(TaskNorm(child, active))
                setattr(parent, name, found[-1])
    return found
