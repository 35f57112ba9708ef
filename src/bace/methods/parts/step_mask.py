"""Masks of updates that work with any optimiser."""

from collections.abc import Iterable

import torch
from torch import Tensor


class DeltaMask:
    """p <- p_old + mask (p_new - p_old): the mask of a weight is the factor of its step, so it does not move at
    0 and moves twice as far at 2.

    Masking the gradient would not stop a weight: momentum, Adam's averages and weight decay move it without a gradient.
    Masking the step stops it. Where a mask is 0, the weight keeps every bit.

    Call `before_step` and `after_step` from the method's hooks of these names.
    """

    def __init__(
        self,
        masks: Iterable[tuple[Tensor, Tensor]] = (),  # parameters, each with a mask of the same shape
    ) -> None:
        self.masks = list(masks)
        self.old: list[Tensor] = []  # the values before the step

    @torch.no_grad()
    def before_step(self) -> None:
        self.old = [p.clone() for p, _ in self.masks]

    @torch.no_grad()
    def after_step(self) -> None:
        for (p, mask), old in zip(self.masks, self.old, strict=True):
            p.copy_(torch.where(mask == 0, old, torch.lerp(old, p, mask)))
