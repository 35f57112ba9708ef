"""What frozen blocks make of a text, computed once instead of in every epoch, for every teacher and in every test."""

import functools
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
        texts = [
            self._text({name: value[i : i + 1, :length] for name, value in inputs.items()}, compute)
            for i, length in enumerate(mask.sum(1).tolist())
        ]
        hidden = texts[0].new_zeros(*mask.shape, texts[0].shape[1], device=mask.device)
        for row, text in zip(hidden, texts, strict=True):
            row[: len(text)] = text
        return hidden

    @torch.no_grad()
    def _text(
        self, inputs: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], Tensor]
    ) -> Tensor:  # (tokens, width)
        key = b"".join(value.cpu().numpy().tobytes() for value in inputs.values())
        if key not in self.kept:
            hidden = compute(inputs)[0]
            if hidden.nbytes > self.room:
                return hidden
            self.room -= hidden.nbytes
            self.kept[key] = hidden
        return self.kept[key]


def shared_cache(frozen: Iterable[Tensor], depth: int, megabytes: int, precision: torch.dtype) -> PrefixCache:
    """The cache of an encoder with these frozen weights: that of the run before, if it had the same."""
    digest = hashlib.blake2b()
    for weights in frozen:
        digest.update(weights.detach().cpu().numpy().tobytes())
    return _newest(digest.hexdigest(), depth, megabytes, precision)


@functools.lru_cache(maxsize=1)  # runs of a comparison follow each other; of the others nothing should stay in memory
def _newest(_weights: str, depth: int, megabytes: int, _precision: torch.dtype) -> PrefixCache:
    return PrefixCache(depth, megabytes * 1_000_000)
