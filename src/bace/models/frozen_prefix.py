"""What frozen blocks make of a text, computed once instead of in every epoch, for every teacher and in every test."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class PrefixCache:
    """What the frozen part of an encoder puts out, text by text.

    Each text is passed alone: in a batch its numbers would depend, in the last digits, on the texts beside it, and a
    resumed run would not be the run that was never interrupted. Copies of the encoder (teachers) share the cache.

    Args:
        depth: how many blocks it stands for.
        room: how many bytes may be kept. When they are taken, what is not kept is computed whenever it is needed.
    """

    def __init__(self, depth: int, room: int) -> None:
        self.depth, self.room = depth, room
        self.kept: dict[bytes, Tensor] = {}  # a text's ids -> (tokens, width)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixCache":
        return self

    def read(
        self,
        inputs: dict[str, Tensor],  # (texts, tokens) each, padded at the end
        compute: Callable[[dict[str, Tensor]], Tensor],  # of one text, not padded: (1, tokens, width)
    ) -> Tensor:  # (texts, tokens, width)
        """What enters block `depth`, with zeros where a text is padded: nothing attends to that."""
        mask = inputs["attention_mask"]
        here = {name: value.cpu().numpy() for name, value in inputs.items()}  # once, not text by text
        device = str(mask.device).encode()
        texts = []
        for i, length in enumerate(here["attention_mask"].sum(1).tolist()):
            key = b" ".join([device, *(value[i, :length].tobytes() for value in here.values())])
            if (text := self.kept.get(key)) is None:
                with torch.no_grad():
                    text = compute({name: value[i : i + 1, :length] for name, value in inputs.items()})[0]
                if text.nbytes <= self.room:
                    self.room -= text.nbytes
                    self.kept[key] = text
            texts.append(text)
        hidden = texts[0].new_zeros(*mask.shape, texts[0].shape[1])
        for row, text in zip(hidden, texts, strict=True):
            row[: len(text)] = text
        return hidden


class PrefixCaches:
    """Owns the caches of a run, or of all runs of a comparison: those with the same frozen blocks share one."""

    def __init__(self) -> None:
        self.newest: dict[tuple[str, int, int], PrefixCache] = {}  # at most one

    def find(self, about: str, frozen: Iterable[Tensor], depth: int, megabytes: int) -> PrefixCache:
        """The cache of the encoder with this description and these frozen weights. Only the newest is held: what
        another backbone made of texts should not stay in memory."""
        digest = hashlib.blake2b(about.encode())
        for weights in frozen:
            digest.update(weights.detach().cpu().numpy().tobytes())
        key = digest.hexdigest(), depth, megabytes
        if key not in self.newest:
            self.newest = {key: PrefixCache(depth, megabytes * 1_000_000)}
        return self.newest[key]
