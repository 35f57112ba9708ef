"""Updates that are allowed only in part, whatever the optimiser."""

from collections.abc import Iterable

import torch
from torch import Tensor


class DeltaMask:
    """p <- p_old + mask (p_new - p_old): each weight takes as much of the optimiser's step as its mask says, none of
    it at 0, twice as much at 2.

    Masking gradients does not hold a weight: momentum, Adam's averages and weight decay move it without one. Masking
    the step itself does. Where a mask is 0 the weight keeps every bit.

    Call `before_step` and `after_step` from the method's hooks of these names.
    """

    def __init__(
        self,
        masks: Iterable[tuple[Tensor, Tensor]] = (),  # parameters, each with a mask of its shape
    ) -> None:
        self.masks = list(masks)
        self.old: list[Tensor] = []  # of one step

    @torch.no_grad()
    def before_step(self) -> None:
        self.old = [p.clone() for p, _ in self.masks]

    @torch.no_grad()
    def after_step(self) -> None:
        for (p, mask), old in zip(self.masks, self.old, strict=True):
            p.copy_(torch.where(mask == 0, old, torch.lerp(old, p, mask)))
