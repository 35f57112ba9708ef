"""Scale and shift: every linear map and LayerNorm of a frozen transformer gets a factor and a summand for each output.

Lian et al., Scaling & Shifting Your Features: A New Baseline for Efficient Model Tuning, NeurIPS 2022.
"""

from functools import partial

import torch
from torch import Tensor, nn

from bace.models.additions import Additions, open_blocks
from bace.models.encoder import Encoder


class ScaleShift(nn.Module):
    """y -> scale * y + shift, near the identity at first: N(1, 0.02^2) and N(0, 0.02^2)."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.02 * torch.randn(width, generator=generator))
        self.shift = nn.Parameter(0.02 * torch.randn(width, generator=generator))

    def forward(
        self,
        y: Tensor,  # (..., width)
    ) -> Tensor:  # (..., width)
        return self.scale * y + self.shift


class ScalesAndShifts(Additions):
    """Sets of scales and shifts after every Linear, LayerNorm and convolution (of picture patches)."""

    def __init__(self, encoder: Encoder) -> None:
        blocks = open_blocks(encoder)
        below = [encoder.embeddings] if encoder.frozen is None else []
        found = [module for part in (*below, *blocks, encoder.norm) for module in part.modules()]
        scaled = [module for module in found if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d)]
        super().__init__(encoder, len(scaled) if blocks else 0)
        self.widths = [len(module.weight) for module in scaled]
        for site, module in enumerate(scaled):
            module.register_forward_hook(partial(self._apply_to, site))

    def make(self, site: int, generator: torch.Generator) -> ScaleShift:
        return ScaleShift(self.widths[site], generator)

    def _apply_to(self, site: int, module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        channels = 1 if isinstance(module, nn.Conv2d) else -1  # (examples, channels, height, width) of a convolution
        for part in self.parts(site):
            output = part(output.movedim(channels, -1)).movedim(-1, channels)
        return output
