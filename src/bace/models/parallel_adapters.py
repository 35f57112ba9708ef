"""Adapters beside the MLP of every block of a frozen transformer.

Chen et al., AdaptFormer: Adapting Vision Transformers for Scalable Visual Recognition, NeurIPS 2022.
"""

import math
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.additions import Additions, empty_linear, open_blocks
from bace.models.encoder import Encoder


class ParallelAdapter(nn.Module):
    """x -> s up(dropout(relu(down(x)))), exactly zero at first, because `up` and the biases start at zero."""

    def __init__(self, width: int, hidden: int, scale: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.down = empty_linear(width, hidden, bias=True)
        self.up = empty_linear(hidden, width, bias=True)
        self.dropout, self.scale = nn.Dropout(dropout), scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5), generator=generator)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(
        self,
        x: Tensor,  # (..., width)
    ) -> Tensor:  # (..., width)
        up: Tensor = self.up(self.dropout(torch.relu(self.down(x))))
        return self.scale * up


class ParallelAdapters(Additions):
    """Sets of adapters, one beside the MLP of each block: x + MLP(LN(x)) + s up(relu(down(x))), where x is the input of
    the MLP branch, before its LayerNorm. If a block normalises after the sum (BERT), that sum has one more term.

    Args:
        hidden: the number r of units in the bottleneck.
        scale: the factor s.
        dropout: dropout rate of the bottleneck in training.
    """

    def __init__(self, encoder: Encoder, hidden: int = 64, scale: float = 0.1, dropout: float = 0.1) -> None:
        if hidden < 1 or not 0 <= dropout < 1:
            raise ConfigError(
                f"adapters need at least 1 hidden unit, not {hidden}, and a dropout of at least 0 and below 1, not "
                f"{dropout}"
            )
        blocks = open_blocks(encoder)
        super().__init__(encoder, len(blocks))
        self.width, self.hidden, self.scale, self.dropout = encoder.width, hidden, scale, dropout
        self.inputs: dict[int, Tensor] = {}  # x of the branch that is being passed
        for site, block in enumerate(blocks):
            start, end = (block.get_submodule(path) for path in encoder.mlp_branch)
            start.register_forward_pre_hook(partial(self._note, site))
            end.register_forward_hook(partial(self._add, site))

    def make(self, site: int, generator: torch.Generator) -> ParallelAdapter:
        return ParallelAdapter(self.width, self.hidden, self.scale, self.dropout, generator)

    def _note(self, site: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.active:
            self.inputs[site] = inputs[0]

    def _add(self, site: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.active:
            return None
        x = self.inputs.pop(site)
        for adapter in self.parts(site):
            output = output + cast(Tensor, adapter(x))
        return output
