"""A pool of prompts before a frozen encoder; each input takes those with the nearest keys (L2P, Wang et al., 2022).

Written by the encoder's three parts alone, so it is the same for pictures and texts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.data.batch import Batch
from bace.models.encoders import Encoder, freeze_prefix
from bace.models.heads import Head
from bace.models.model import Model, Output


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


class PromptedModel(Model):
    """Two passes of a frozen encoder: the class token of the first, as it is, is the query; in the second the prompts
    found by it stand before all tokens, and the mean of what becomes of them is the feature.

    Prompts enter the first block, after positions were added to the other tokens; they have none.

    Args:
        top: prompts for each input.
        vote: in training, all inputs of a batch take the prompts that most of them chose. Never in prediction: that
            would depend on what else is in the batch.
    """

    def __init__(
        self, encoder: Encoder, head: Head, pool: PromptPool, top: int, vote: bool, precision: torch.dtype
    ) -> None:
        super().__init__(encoder, head, precision)
        freeze_prefix(encoder, len(encoder.blocks))  # also in train mode it is a fixed function, without dropout
        encoder.requires_grad_(False)
        self.pool, self.top, self.vote = pool, top, vote

    def forward(self, batch: Batch, *, name: str = "main", taps: bool = False, chosen: Tensor | None = None) -> Output:
        """One pass. `chosen`, (top,), are prompts that every input must take; default: those with the nearest keys."""
        device, low = batch.targets.device.type, self.precision != torch.float32
        with torch.autocast(device, self.precision, enabled=low), torch.no_grad():
            hidden, mask = self.encoder.embed(batch.inputs)  # (examples, tokens, width)
            query = self.full(self.encoder.run(hidden, mask)[0][:, 0])
        cosines = self.pool.cosines(query)
        index = self.choose(cosines.detach()) if chosen is None else chosen.expand(len(cosines), -1)
        prompts = self.pool.prompts[index].flatten(1, 2)  # (examples, top * length, width)
        count = prompts.shape[1]
        if mask is not None:  # (examples, 1, 1, tokens), true where a token may be attended to
            mask = F.pad(mask, (count, 0), value=True)
        with torch.autocast(device, self.precision, enabled=low):
            out, tapped = self.encoder.run(torch.cat([prompts.to(hidden.dtype), hidden], 1), mask, taps=taps)
        features = self.full(out[:, :count]).mean(1)
        return Output(features, self.head(features), tuple(tapped), cosines.gather(1, index))

    def full(self, x: Tensor) -> Tensor:
        return x if self.precision == torch.float32 else x.float()

    def choose(
        self,
        cosines: Tensor,  # (examples, size)
    ) -> Tensor:  # (examples, top)
        index = cosines.topk(self.top, dim=1).indices
        if self.vote and self.training:
            votes = torch.bincount(index.flatten(), minlength=cosines.shape[1])
            index = votes.sort(descending=True, stable=True).indices[: self.top].expand(len(cosines), -1)
        return index
