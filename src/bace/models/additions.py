"""Additions to a frozen encoder: several sets of small trained parts. Every pass uses some of them.

A context chooses the sets of a pass: `with additions.of(0): model(batch)`. `with additions.of():` gives the original
encoder. Adapters, LoRA, scale-and-shift and deep prompts are additions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import cast

import torch
from torch import nn

from bace.errors import ConfigError
from bace.models.encoder import Encoder
from bace.models.model import parameter_count


class Additions:
    """Sets of parts, with one part of each set at every site of an encoder. The parts become modules of the encoder, so
    they are in its state. From then on, nothing else in the encoder is trained.

    A frozen prefix (backbone.freeze) gets no sites. Outside of `of`, the newest set is used.

    Args:
        encoder: the encoder that the parts are added to, in place.
        sites: the number of sites for the parts of a set; subclasses hook them.
    """

    def __init__(self, encoder: Encoder, sites: int) -> None:
        if not sites:
            raise ConfigError(
                f"all {len(encoder.blocks)} blocks of the backbone are frozen, so nothing can be added to them: set "
                "backbone.freeze to fewer"
            )
        encoder.requires_grad_(False)
        self.sites = sites
        self.sets = nn.ModuleList()  # of lists with a part for each site
        encoder.add_module("additions", self.sets)
        self.chosen: tuple[int, ...] | None = None  # by `of`
        encoder.states = (*encoder.states, self.noted)

    def make(self, site: int, generator: torch.Generator) -> nn.Module:
        """A new part for a site."""
        raise NotImplementedError

    def grow(self, generator: torch.Generator, device: torch.device) -> None:
        """Add a set."""
        parts = nn.ModuleList(self.make(site, generator) for site in range(self.sites))
        self.sets.append(parts.to(device))

    @contextmanager
    def of(self, *sets: int) -> Iterator[None]:
        """Make passes use these sets or, if there are none, only the frozen encoder."""
        before, self.chosen = self.chosen, sets
        try:
            yield
        finally:
            self.chosen = before

    def noted(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that restores the sets that passes use now."""
        return partial(self.of, *self.active)

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(range(len(self.sets)))[-1:] if self.chosen is None else self.chosen

    def parts(self, site: int) -> list[nn.Module]:
        """The parts at a site in this pass, one of each active set."""
        return [cast(nn.ModuleList, self.sets[index])[site] for index in self.active]

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """The parameters of one set."""
        return list(self.sets[index].parameters())

    def missing(self, sets: int) -> int:
        """The number of parameters that are still missing until there are this many sets."""
        return max(sets - len(self.sets), 0) * self.size

    @cached_property
    def size(self) -> int:
        """The number of parameters of a set."""
        return sum(parameter_count(self.make(site, torch.Generator())) for site in range(self.sites))


def open_blocks(encoder: Encoder) -> list[nn.Module]:
    """The blocks that are not frozen."""
    return list(encoder.blocks)[encoder.frozen or 0 :]


def empty_linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """A Linear whose weights are not drawn yet: on "meta", torch's own initialisation does nothing; on the CPU it would
    draw from the global generator."""
    return nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
