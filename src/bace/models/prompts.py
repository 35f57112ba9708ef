"""Learned tokens before the tokens of a frozen encoder. They are a pool of prompts before its first block, from which
each input takes those with the nearest keys (L2P, Wang et al., 2022), separate prompts for every block (VPT, Jia et
al., 2022), or prefixes of the keys and values of blocks (DualPrompt, Wang et al., 2022).

They use only the encoder's parts, so the same code works for pictures and texts.
"""

import math
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.models.additions import Additions, open_blocks
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.heads import Head
from bace.models.model import Model, Output
from bace.models.prefix_attention import Prefix
from bace.models.share import Share


class PromptPool(nn.Module):
    """`size` prompts of `length` tokens and a key for each; all start uniform in [0, 0.01)."""

    def __init__(self, size: int, length: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.rand(size, length, width, generator=generator) * 0.01)
        self.keys = nn.Parameter(torch.rand(size, width, generator=generator) * 0.01)

    def cosines(
        self,
        query: Tensor,  # (examples, width)
    ) -> Tensor:  # (examples, size)
        return F.normalize(query, dim=1) @ F.normalize(self.keys, dim=1).T


class QueryingModel(Model):
    """Two passes of a frozen encoder: the feature of the first pass is the query that selects an example's prompts for
    the second."""

    def __init__(self, encoder: Encoder, head: Head, precision: torch.dtype) -> None:
        super().__init__(encoder, head, precision)
        freeze_prefix(encoder, len(encoder.blocks))  # a fixed function without dropout, even in train mode
        encoder.requires_grad_(False)

    @torch.no_grad()
    def query(
        self, batch: Batch
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # (examples, tokens, width), mask, (examples, width)
        """The input of the first block, from which the second pass starts, and the query."""
        with self.low_precision(batch):
            hidden, mask = self.encoder.embed(batch.inputs)
            out, _ = self.encoder.run(hidden, mask)
            return hidden, mask, self.full(self.encoder.pool(out, batch.inputs))

    def full(self, x: Tensor) -> Tensor:
        return x if self.precision == torch.float32 else x.float()


class PromptedModel(QueryingModel):
    """The prompts selected by the query come before all tokens in the second pass, and the mean of their outputs is the
    feature.

    Prompts enter the first block without positions, after positions were added to the other tokens.

    Args:
        top: number of prompts for each input.
        vote: in training, all inputs of a batch take the prompts that most of them chose. This never happens in
            prediction, which would then depend on the rest of the batch.
    """

    def __init__(
        self, encoder: Encoder, head: Head, pool: PromptPool, top: int, vote: bool, precision: torch.dtype
    ) -> None:
        super().__init__(encoder, head, precision)
        self.pool, self.top, self.vote = pool, top, vote

    def forward(self, batch: Batch, *, name: str = "main", taps: bool = False, chosen: Tensor | None = None) -> Output:
        """One pass. `chosen`, (top,), are prompts that every input must take; by default those with the nearest
        keys."""
        share = Share(batch)
        hidden, mask, query = self.query(share.batch)
        cosines = self.pool.cosines(share.of_all_examples(query))
        index = self.choose(cosines.detach()) if chosen is None else chosen.expand(len(cosines), -1)
        prompts = self.pool.prompts[share.own(index)].flatten(1, 2)  # (examples, top * length, width)
        count = prompts.shape[1]
        with self.low_precision(batch):
            out, tapped = self.encoder.run(*put_before(prompts, hidden, mask), taps=taps)
        features = share.of_all_examples(self.full(out[:, :count]).mean(1))
        taps_of_all = tuple(share.of_all_examples(tap) for tap in tapped)
        return Output(features, self.head(features), taps_of_all, cosines.gather(1, index))

    def choose(
        self,
        cosines: Tensor,  # (examples, size)
    ) -> Tensor:  # (examples, top)
        index = cosines.topk(self.top, dim=1).indices
        if self.vote and self.training:
            votes = torch.bincount(index.flatten(), minlength=cosines.shape[1])
            index = votes.sort(descending=True, stable=True).indices[: self.top].expand(len(cosines), -1)
        return index


class PrefixPrompts(nn.Module):
    """The prefixes of the keys and values of blocks that an example's query selects."""

    def forward(
        self,
        query: Tensor,  # (examples, width)
    ) -> tuple[dict[int, Prefix], Tensor | None]:  # by block, (examples, chosen)
        """The prefixes, and the cosines between the query and the chosen keys, if any were chosen."""
        raise NotImplementedError


class PrefixedModel(QueryingModel):
    """In the second pass, the prompts selected by the query come before the keys and values of some blocks. The feature
    is read as usual."""

    def __init__(self, encoder: Encoder, head: Head, prompts: PrefixPrompts, precision: torch.dtype) -> None:
        encoder.check_prefixes()
        super().__init__(encoder, head, precision)
        self.prompts = prompts

    def forward(self, batch: Batch, *, name: str = "main", taps: bool = False) -> Output:
        share = Share(batch)
        own = share.batch
        hidden, mask, query = self.query(own)
        prefixes, match = self.prompts(query)
        with self.low_precision(batch):
            out, tapped = self.encoder.run(hidden, mask, taps=taps, prefixes=prefixes)
            features = share.of_all_rows(self.full(self.encoder.rows(out, own.inputs, own.at)))
        taps_of_all = tuple(share.of_all_examples(tap) for tap in tapped)
        match = None if match is None else share.of_all_examples(match)
        return Output(features, self.head(features), taps_of_all, match)


class Prompts(nn.Module):
    """The prompt tokens of one block."""

    def __init__(self, length: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = math.sqrt(3 / width)  # Xavier's for as many inputs as outputs
        self.tokens = nn.Parameter(torch.empty(length, width).uniform_(-bound, bound, generator=generator))


class DeepPrompts(Additions):
    """Sets of prompts for each block, which are removed from the sequence after the block (VPT-deep: Jia et al., Visual
    Prompt Tuning, ECCV 2022). The feature is read as usual.

    Args:
        length: number of prompt tokens before each block.
    """

    def __init__(self, encoder: Encoder, length: int = 5) -> None:
        if length < 1:
            raise ConfigError(f"prompts need a length of at least 1 token, not {length}")
        blocks = open_blocks(encoder)
        super().__init__(encoder, len(blocks))
        self.width, self.length = encoder.width, length
        encoder.whole = True  # prompts come before all tokens of a block
        for site, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, site))
            block.register_forward_hook(self._leave)

    def make(self, site: int, generator: torch.Generator) -> Prompts:
        return Prompts(self.length, self.width, generator)

    def _enter(
        self, site: int, _: nn.Module, inputs: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None] | None:
        if not self.active:
            return None
        hidden, mask = inputs
        tokens = torch.cat([cast(Prompts, part).tokens for part in self.parts(site)])
        return put_before(tokens.expand(len(hidden), -1, -1), hidden, mask)

    def _leave(self, _: nn.Module, __: tuple[Tensor, Tensor | None], output: Tensor) -> Tensor:
        return output[:, self.length * len(self.active) :]


def put_before(
    prompts: Tensor,  # (examples, prompts, width)
    hidden: Tensor,  # (examples, tokens, width)
    mask: Tensor | None,  # (examples, 1, 1, tokens), true where a token may be attended to
) -> tuple[Tensor, Tensor | None]:  # the same of (prompts + tokens)
    """Put prompts before all tokens; all tokens attend to them."""
    mask = None if mask is None else F.pad(mask, (prompts.shape[1], 0), value=True)
    return torch.cat([prompts.to(hidden.dtype), hidden], 1), mask
