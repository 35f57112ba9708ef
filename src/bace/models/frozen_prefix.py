"""What frozen blocks make of a text, computed once instead of in every epoch, for every teacher and in every test."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

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

    off: ClassVar[bool] = False  # see `uncached`

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


@contextmanager
def uncached() -> Iterator[None]:
    """In here every pass goes through all blocks: for texts that are made up for one step and never come again, and for
    tensors whose numbers cannot be looked at (torch.func)."""
    before, PrefixCache.off = PrefixCache.off, True
    try:
        yield
    finally:
        PrefixCache.off = before


def shared_cache(about: str, frozen: Iterable[Tensor], depth: int, megabytes: int) -> PrefixCache:
    """The cache of an encoder with this description and these frozen weights: that of the run before, if it had the
    same. The runs of a comparison so share what the first of them computes."""
    digest = hashlib.blake2b(about.encode())
    for weights in frozen:
        digest.update(weights.detach().cpu().numpy().tobytes())
    return _newest(digest.hexdigest(), depth, megabytes)


@functools.lru_cache(maxsize=1)  # the newest only: what another backbone made of texts should not stay in memory
def _newest(_encoder: str, depth: int, megabytes: int) -> PrefixCache:
    return PrefixCache(depth, megabytes * 1_000_000)
