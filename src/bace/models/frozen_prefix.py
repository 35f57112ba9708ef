"""A cache for the outputs of frozen blocks, which are computed once instead of in every epoch, teacher and test."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bace.data.batch import Keyed
from bace.data.decode import MEMORY_LIMIT, allocate

AT_ONCE = 32  # number of pictures that an accelerator passes together


class PrefixCache:
    """The outputs of the frozen part of an encoder, example by example.

    Each example is passed alone. In a batch, the last digits would depend on the other examples, and a resumed run
    would differ from one that was never interrupted. Copies of the encoder (teachers) share the cache.

    Args:
        depth: number of frozen blocks.
        room: maximum number of bytes to keep. Outputs that do not fit are computed whenever they are needed.
        half: keep outputs in half precision.
    """

    def __init__(self, depth: int, room: int, half: bool = False) -> None:
        self.depth, self.room, self.half = depth, room, half

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixCache":
        return self

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the examples in these inputs can be found again."""
        raise NotImplementedError

    def read(
        self,
        inputs: dict[str, Tensor],
        compute: Callable[[dict[str, Tensor]], Tensor],  # (examples, tokens, width)
    ) -> Tensor:  # (examples, tokens, width)
        """The input of block `depth`."""
        raise NotImplementedError

    def memory_wanted(self) -> int:
        """The number of bytes of memory that it may still take."""
        return self.room

    def rounded(self, hidden: Tensor) -> Tensor:
        """The values as they are kept, so that computed outputs equal those found later."""
        return hidden.half() if self.half else hidden


class TextCache(PrefixCache):
    """Finds texts by their tokens."""

    def __init__(self, depth: int, room: int, half: bool = False) -> None:
        super().__init__(depth, room, half)
        self.kept: dict[bytes, Tensor] = {}  # a text's ids -> (tokens, width)

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        return "input_ids" in inputs  # not word vectors

    def read(self, inputs: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Inputs are (texts, tokens) each, padded at the end. The outputs of padding are zeros, and nothing attends to
        them."""
        mask = inputs["attention_mask"]
        here = {name: value.cpu().numpy() for name, value in inputs.items()}  # once, not text by text
        device = str(mask.device).encode()
        texts = []
        for i, length in enumerate(here["attention_mask"].sum(1).tolist()):
            key = b" ".join([device, *(value[i, :length].tobytes() for value in here.values())])
            if (text := self.kept.get(key)) is None:
                with torch.no_grad():
                    text = self.rounded(compute({name: value[i : i + 1, :length] for name, value in inputs.items()})[0])
                if text.nbytes <= self.room:
                    self.room -= text.nbytes
                    self.kept[key] = text
            texts.append(text)
        hidden = texts[0].new_zeros(*mask.shape, texts[0].shape[1], dtype=torch.get_default_dtype())
        for row, text in zip(hidden, texts, strict=True):
            row[: len(text)] = text
        return hidden


class PictureCache(PrefixCache):
    """Finds pictures by their keys (`Keyed`), in one table on the host.

    Views that recur have fixed slots. The rest of the room holds the newest random views, at most one of each picture:
    within an epoch, teacher, student and neighbours see the same view.

    Args:
        fixed: number of views that recur.
        passing: maximum number of random views that are also kept.
        in_memory: maximum number of bytes of a table in memory; a larger table is a memory-mapped file.
    """

    def __init__(
        self, depth: int, room: int, half: bool, fixed: int, passing: int, in_memory: int = MEMORY_LIMIT
    ) -> None:
        super().__init__(depth, room, half)
        self.fixed, self.passing, self.in_memory = fixed, passing, in_memory
        self.kept: Tensor | None = None  # (slots, tokens, width)
        self.slots: dict[int, int] = {}  # key -> slot
        self.key_at: dict[int, int] = {}  # slot -> key, of random views
        self.fixed_taken = self.passing_taken = 0

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        return isinstance(inputs, Keyed)

    def read(self, inputs: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        assert isinstance(inputs, Keyed)
        pixels, keys = inputs["pixel_values"], inputs.keys_of_examples.tolist()
        missing = {key: i for i, key in enumerate(keys) if key not in self.slots}  # one example per key
        if missing:
            hidden = self._read_and_computed(pixels, keys, missing, compute)
        else:
            assert self.kept is not None
            hidden = self.kept[[self.slots[key] for key in keys]]
        return hidden.to(pixels.device, torch.get_default_dtype(), non_blocking=True)

    def _read_and_computed(
        self, pixels: Tensor, keys: list[int], missing: dict[int, int], compute: Callable[[dict[str, Tensor]], Tensor]
    ) -> Tensor:  # (examples, tokens, width)
        new = self._computed(pixels, list(missing.values()), compute)
        row = {key: i for i, key in enumerate(missing)}
        computed = [i for i, key in enumerate(keys) if key in row]
        found = [i for i, key in enumerate(keys) if key not in row]
        hidden = new.new_empty(len(keys), *new.shape[1:])
        hidden[computed] = new[[row[keys[i]] for i in computed]]
        if self.kept is not None and found:
            hidden[found] = self.kept[[self.slots[keys[i]] for i in found]]
        self._keep(list(missing), new)  # comes last, because it may replace what was found
        return hidden

    def memory_wanted(self) -> int:
        if self.kept is None:
            return min(self.room, self.in_memory)
        free = len(self.kept) - self.fixed_taken - min(self.passing_taken, self.passing)
        return 0 if self.kept.nbytes > self.in_memory else self.kept[:free].nbytes

    def _computed(
        self, pixels: Tensor, wanted: list[int], compute: Callable[[dict[str, Tensor]], Tensor]
    ) -> Tensor:  # (wanted, tokens, width) on the host
        """An accelerator passes several at once, but always the same number, so that it does the same operations."""
        size = 1 if pixels.device.type == "cpu" else AT_ONCE
        parts = []
        with torch.no_grad():
            for start in range(0, len(wanted), size):
                some = wanted[start : start + size]
                filled = some + some[-1:] * (size - len(some))
                parts.append(self.rounded(compute({"pixel_values": pixels[filled]})[: len(some)]))
        return torch.cat(parts).cpu()

    def _keep(self, keys: list[int], new: Tensor) -> None:
        if self.kept is None:
            places = self.room // new[0].nbytes
            self.fixed = min(self.fixed, places)
            self.passing = min(self.passing, places - self.fixed)
            with torch.inference_mode(False):
                self.kept = allocate((self.fixed + self.passing, *new.shape[1:]), self.in_memory, new.dtype)
        rows, slots = [], []
        for row, key in enumerate(keys):
            if (slot := self._slot(key)) is not None:
                rows.append(row)
                slots.append(slot)
        if slots:
            self.kept[slots] = new[rows]

    def _slot(self, key: int) -> int | None:
        """A slot for a key that has none; a random view replaces the oldest."""
        if key >= 0:
            if self.fixed_taken == self.fixed:
                return None
            slot = self.fixed_taken
            self.fixed_taken += 1
        else:
            if not self.passing:
                return None
            slot = self.fixed + self.passing_taken % self.passing
            self.passing_taken += 1
            self.slots.pop(self.key_at.get(slot, key), None)
            self.key_at[slot] = key
        self.slots[key] = slot
        return slot


class PrefixCaches:
    """Owns the caches of a run, or of all runs of a comparison. Runs with the same frozen blocks share a cache."""

    def __init__(self) -> None:
        self.newest: dict[str, PrefixCache] = {}  # at most one

    def find(self, about: str, frozen: Iterable[Tensor], make: Callable[[], PrefixCache]) -> PrefixCache:
        """The cache of the encoder with this description and these frozen weights, or a new one. Only the newest cache
        is kept, so that the outputs of another backbone do not stay in memory."""
        digest = hashlib.blake2b(about.encode())
        for weights in frozen:
            digest.update(weights.detach().cpu().numpy().tobytes())
        key = digest.hexdigest()
        if key not in self.newest:
            self.newest = {key: make()}
        return self.newest[key]
