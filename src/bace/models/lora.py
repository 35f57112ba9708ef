"""LoRA: low-rank changes of the query and value projections of a frozen transformer.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

import math
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.additions import Additions, open_blocks
from bace.models.encoder import Encoder


class LowRank(nn.Module):
    """x -> B A x, exactly zero at first, because B starts at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, inputs))
        self.B = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5), generator=generator)

    def forward(
        self,
        x: Tensor,  # (..., inputs)
    ) -> Tensor:  # (..., outputs)
        return F.linear(F.linear(x, self.A), self.B)


class LoRA(Additions):
    """Sets of low-rank changes of every query and value projection: W + sum over the chosen sets of B A. Outside of
    `of`, all sets are used.

    Args:
        rank: the rank r of each change.
    """

    def __init__(self, encoder: Encoder, rank: int) -> None:
        if rank < 1:
            raise ConfigError(f"LoRA needs a rank of at least 1, not {rank}")
        paths = encoder.query_and_value
        projections = [cast(nn.Linear, block.get_submodule(path)) for block in open_blocks(encoder) for path in paths]
        super().__init__(encoder, len(projections))
        self.rank, self.shapes = rank, [(linear.in_features, linear.out_features) for linear in projections]
        for site, projection in enumerate(projections):
            projection.register_forward_hook(partial(self._add, site))

    def make(self, site: int, generator: torch.Generator) -> LowRank:
        return LowRank(*self.shapes[site], self.rank, generator)

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(range(len(self.sets))) if self.chosen is None else self.chosen

    def subspaces(self, index: int) -> list[Tensor]:  # (rank, inputs) each
        """The A of a set, site by site."""
        return [cast(LowRank, part).A for part in cast(nn.ModuleList, self.sets[index])]

    def weight(self, index: int, part: LowRank) -> Tensor | float:
        """The factor of the change B A of a set."""
        return 1.0

    def _add(self, site: int, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for index, part in zip(self.active, self.parts(site), strict=True):
            change = cast(LowRank, part)
            output = output + self.weight(index, change) * change(inputs[0])
        return output
