"""Models that grow by one branch per task: whole encoders side by side, or tips on a shared trunk."""

import copy
from collections.abc import Iterator
from typing import Self, TypeVar, cast

import torch
from torch import nn

from bace.data.batch import Batch
from bace.models.encoder import Encoder
from bace.models.heads import WideningHead
from bace.models.model import Branch, Model, Output, read_rows
from bace.models.share import Share

Part = TypeVar("Part", bound=nn.Module)


class Expanded(Model):
    """Encoders side by side with one head over all their features (BEEF, FOSTER's teacher).

    Only the newest encoder is trained; the others are frozen and stay in eval mode. The encoders share everything that
    is never trained (a frozen prefix, or everything except adapters).
    """

    in_pieces = True
    head: WideningHead

    def __init__(self, encoder: Encoder, head: WideningHead, precision: torch.dtype = torch.float32) -> None:
        super().__init__(encoder, head, precision)
        self.trained = trained_part(encoder)
        self.others = nn.ModuleList()

    @property
    def encoders(self) -> list[Encoder]:
        return [self.encoder, *(cast(Encoder, other) for other in self.others)]

    @property
    def trained_size(self) -> int:
        """The number of parameters that each encoder does not share."""
        return sum(p.numel() for p, own in zip(self.encoder.parameters(), self.trained, strict=True) if own)

    def add_branch(self) -> None:
        """Add an encoder, a copy of the current first one. From now on, the earlier encoders are frozen."""
        branch = shallow_copy(self.encoder, self.trained)
        for old in self.encoders:
            old.requires_grad_(False)
        self.others.append(branch)

    def forward(self, batch: Batch, *, name: str = "main", taps: bool = False, newest: bool = False) -> Output:
        """With `newest`, only the newest encoder is passed, which gives its features (rows, branch) without logits. It
        is for training on that branch alone, where the frozen encoders then cost nothing."""
        if not newest:
            return super().forward(batch, name=name, taps=taps)
        branch = (read_rows(encoder, batch) for encoder in self.encoders[-1:])
        features, _ = self._pass(branch, batch, name)
        return Output(features, features[:, :0])

    def branches(self, batch: Batch, taps: bool) -> Iterator[Branch]:
        for encoder in self.encoders:
            yield read_rows(encoder, batch, taps)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for frozen in self.encoders[:-1]:
            frozen.eval()
        return self


class Forked(Model):
    """A trunk (the embeddings and all blocks except the last) with tips (the last block and final LayerNorm, and copies
    of them), and one head over the features of all tips (MEMO). Only the newest tip is trained, with or without the
    trunk."""

    head: WideningHead

    def __init__(self, encoder: Encoder, head: WideningHead, precision: torch.dtype = torch.float32) -> None:
        super().__init__(encoder, head, precision)
        self.others = nn.ModuleList()  # of (block, norm)

    @property
    def tips(self) -> list[nn.ModuleList]:
        first = nn.ModuleList([self.encoder.blocks[-1], self.encoder.norm])
        return [first, *(cast(nn.ModuleList, other) for other in self.others)]

    def add_tip(self) -> None:
        """Add a tip, a copy of the newest one. From now on, the copied one is frozen."""
        newest = self.tips[-1]
        tip = shallow_copy(newest, trained_part(newest))
        newest.requires_grad_(False)
        self.others.append(tip)

    def branches(self, batch: Batch, taps: bool) -> Iterator[Branch]:
        share = Share(batch)
        own = share.batch
        hidden, mask = self.encoder.embed(own.inputs)
        tapped = []
        for block in self.encoder.blocks[:-1]:
            hidden = self.encoder.run_block(block, hidden, mask)
            if taps:
                tapped.append(share.of_all_examples(hidden))
        short = not taps and own.at is None and self.encoder.shortens
        run = self.encoder.run_last if short else self.encoder.run_block
        for block, norm in self.tips:
            end = run(block, hidden, mask)
            rows = share.of_all_rows(self.encoder.rows(norm(end), own.inputs, own.at))
            yield rows, (*tapped, share.of_all_examples(end)) if taps else ()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for frozen in self.tips[:-1]:
            frozen.eval()
        return self


def trained_part(module: nn.Module) -> list[bool]:
    """Which of a module's parameters are trained, in their order."""
    return [p.requires_grad for p in module.parameters()]


def shallow_copy(module: Part, trained: list[bool]) -> Part:
    """A copy that is trained where `trained` says so, and shares the other parameters with its original."""
    shared = {id(p): p for p, own in zip(module.parameters(), trained, strict=True) if not own}
    copied = copy.deepcopy(module, shared)  # deepcopy treats what it finds here as already copied
    for p, own in zip(copied.parameters(), trained, strict=True):
        p.requires_grad_(own)
    return copied
