"""The small memory of old examples: slots of (example id, task, group, rank) and notes of a method about them.

The quota counts groups: classes, or entity types. The memory copies no pixels.
"""

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.data.batch import NO_IDS
from bace.errors import ConfigError

_COLUMNS = ("examples", "task", "group")


class ElasticBuffers(nn.Module):
    """A module whose buffers take the shape they were saved with, so that buffers that grow with the data can be
    loaded."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in self._buffers:
            saved = state_dict.get(prefix + name)
            current = self._buffers[name]
            if saved is not None and (current is None or current.shape != saved.shape):
                self._buffers[name] = torch.empty_like(saved, device=None if current is None else current.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Memory(ElasticBuffers):
    """Exemplars within a budget.

    Args:
        select: how `Method.remember` selects the examples of a finished task: "herding" or "random".
        size: total number of slots, shared equally by the groups seen so far; the quota shrinks as groups arrive.
        per_class: instead of `size`, a fixed number of slots per group that never shrinks.
        allow_missing_classes: with fewer slots than groups, keep one example of a random subset of groups instead of
            raising an error.
    """

    examples: Tensor  # (slots,) ids in the stream
    task: Tensor  # (slots,) index of the task that stored it
    group: Tensor  # (slots,) the group that it represents
    seen: Tensor  # () number of examples offered so far (reservoir)

    def __init__(
        self, size: int = 0, per_class: int = 0, select: str = "herding", allow_missing_classes: bool = False
    ) -> None:
        super().__init__()
        if size < 0 or per_class < 0 or (size and per_class):
            raise ConfigError(f"memory: give a total `size` ({size}) or `per_class` ({per_class}), not both")
        self.size, self.per_class, self.select = size, per_class, select
        self.allow_missing_classes = allow_missing_classes
        for name in _COLUMNS:
            self.register_buffer(name, NO_IDS.clone())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self.examples)

    def quota(self, groups: int) -> int:
        """Slots per group when `groups` groups are known; future groups do not count."""
        if self.per_class or not self.size:
            return self.per_class
        quota = self.size // max(groups, 1)
        if quota == 0 and not self.allow_missing_classes:
            raise ConfigError(
                f"a memory of {self.size} examples cannot hold one of each of {groups} classes (for sentences: entity "
                f"types): make memory.size at least {groups}, or set memory.allow_missing_classes"
            )
        return quota

    # -- slots

    def note(self, name: str, values: Tensor) -> None:
        """Store a value, vector or matrix for each slot. If a later one is larger, the others are padded with NaN."""
        if name not in self._buffers:
            self.register_buffer(name, values)
            self.notes.append(name)
        else:
            setattr(self, name, values)

    def add(self, examples: Tensor, task: int, group: Tensor, **notes: Tensor) -> None:
        """Append slots; notes that are not given are NaN."""
        columns = {"examples": examples, "task": torch.full_like(examples, task), "group": group}
        for name, new in columns.items():
            setattr(self, name, torch.cat([getattr(self, name), new]))
        missing = {name: getattr(self, name) for name in self.notes if name not in notes}
        notes |= {name: old.new_full((len(examples), *old.shape[1:]), math.nan) for name, old in missing.items()}
        for name, new in notes.items():
            old = getattr(self, name).to(new.device) if name in self._buffers else new[:0]
            self.note(name, _cat_wider(old, new))

    def keep(self, slots: Tensor) -> None:
        """Keep only these slots, in this order."""
        for name in (*_COLUMNS, *self.notes):
            setattr(self, name, getattr(self, name)[slots])

    def put(self, slots: Tensor, examples: Tensor, task: int, group: Tensor, **notes: Tensor) -> None:
        """Overwrite these slots; a slot that is given twice takes the later example."""
        self.examples[slots], self.task[slots], self.group[slots] = examples, task, group
        for name, new in notes.items():
            old = getattr(self, name)
            shape = _wider(old, new)
            old = _padded(old.to(new.device, torch.promote_types(old.dtype, new.dtype)), shape)
            old[slots] = _padded(new, shape)  # in place: the logits of a large memory are not copied at every step
            self.note(name, old)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:  # (count,) slots
        """Slots drawn uniformly, with replacement."""
        return torch.randint(len(self), (count,), generator=generator)

    def first(self, count: int) -> dict[int, Tensor]:
        """Up to `count` examples of each group, in the order of selection."""
        return {group: self.examples[self.group == group][:count] for group in torch.unique(self.group).tolist()}

    # -- policies, at the end of a task

    def trim(self, quota: int) -> None:
        """Shrink every group to its first `quota` slots, in the order of selection."""
        self.keep(torch.nonzero(_place_in_group(self.group) < quota).flatten())

    def fill(self, chosen: dict[int, Tensor], task: int, quota: int, generator: torch.Generator) -> None:
        """Trim the old groups to `quota`, then add the new groups' examples, each in order of preference."""
        count = max(quota, 1)  # a quota of 0 (allow_missing_classes): one slot each for a random subset of the groups
        self.trim(count)
        for group, examples in chosen.items():
            self.add(examples[:count], task, torch.full_like(examples[:count], group))
        if quota == 0:
            self.keep(torch.randperm(len(self), generator=generator)[: self.size].sort().values)

    # -- policies, example by example

    def offer_reservoir(
        self, examples: Tensor, task: int, group: Tensor, generator: torch.Generator, **notes: Tensor
    ) -> None:
        """Vitter's reservoir: after n offers each of them is kept with probability size/n. Slots that were forgotten
        are free, and an offer to one of them is appended."""
        count = int(self.seen) + torch.arange(1, len(examples) + 1)  # offers so far, including this one
        chance = torch.rand(len(examples), generator=generator, dtype=torch.float64)
        slot = torch.where(count <= self.size, count - 1, (chance * count).long())
        self.seen += len(examples)
        # if several offers go to one slot, the last wins, as if they had come one at a time
        last: dict[int, int] = {}  # slot -> the offer that it ends with
        before = length = len(self)
        for i in torch.nonzero(slot < self.size).flatten().tolist():
            own = min(int(slot[i]), length)  # the next free one
            last[own], length = i, max(length, own + 1)
        added = torch.tensor([i for own, i in last.items() if own >= before], dtype=torch.int64)
        if len(added) or not before:  # else all notes are there
            self.add(examples[added], task, group[added], **{k: v[added] for k, v in notes.items()})
        old = {own: i for own, i in last.items() if own < before}
        slots, put = (torch.tensor(list(ids), dtype=torch.int64) for ids in (old.keys(), old.values()))
        self.put(slots, examples[put], task, group[put], **{k: v[put] for k, v in notes.items()})

    def offer_ring(self, examples: Tensor, task: int, group: Tensor, quota: int) -> None:
        """First in, first out, with `quota` slots for each group."""
        self.add(examples, task, group)
        from_the_end = _place_in_group(self.group.flip(0)).flip(0)
        self.keep(torch.nonzero(from_the_end < quota).flatten())

    def offer_greedy(self, examples: Tensor, task: int, group: Tensor, generator: torch.Generator) -> None:
        """GDumb's sampler: accept examples of groups under their quota; a full memory drops one of its largest
        group."""
        counts = Counter(self.group.tolist())  # kept up to date: most offers are refused, and to count takes longer
        for i, own in enumerate(group.tolist()):
            quota = self.per_class or max(self.size // (len(counts) + (own not in counts)), 1)
            if counts[own] >= quota:
                continue
            if self.size and len(self) >= self.size:
                fullest = min(counts, key=lambda g: (-counts[g], g))
                largest = torch.nonzero(self.group == fullest).flatten()
                leaves = largest[torch.randint(len(largest), (1,), generator=generator)]
                self.keep(torch.nonzero(torch.arange(len(self)) != leaves).flatten())
                counts[fullest] -= 1
                if not counts[fullest]:
                    del counts[fullest]
            self.add(examples[i : i + 1], task, group[i : i + 1])
            counts[own] += 1


def herd(
    features: Tensor,  # (examples, width) of one class, clean view
    count: int,
) -> Tensor:  # (min(count, examples),) positions, in order, on the CPU
    """iCaRL's herding: each pick moves the mean of the selected unit features closest to the class mean. Of equally
    good ones, the first is picked. Everything is computed where the features are, and all picks are read at once."""
    unit = F.normalize(features, dim=1)
    mean, total = unit.mean(0), torch.zeros_like(unit[:1])
    taken = torch.zeros_like(unit[:, 0], dtype=torch.bool)
    order = [taken.new_zeros(0, dtype=torch.int64)]
    for k in range(1, min(count, len(unit)) + 1):
        distance = (mean - (total + unit) / k).norm(dim=1).masked_fill(taken, math.inf)
        order.append(distance.argmin(0, keepdim=True))
        total = total + unit.index_select(0, order[-1])
        taken.index_fill_(0, order[-1], True)
    return torch.cat(order).cpu()


def draw_balanced(
    labels: Tensor,  # (rows,)
    generator: torch.Generator,
) -> Tensor:  # (drawn,) positions, ascending
    """Equally many rows of each class, as many as the rarest class has, drawn without replacement."""
    shuffle = torch.randperm(len(labels), generator=generator)
    classes, counts = torch.unique(labels, return_counts=True)
    drawn = [shuffle[labels[shuffle] == c][: int(counts.min())] for c in classes]
    return torch.cat([NO_IDS, *drawn]).sort().values


def stack_rows(
    values: Tensor,  # (rows, width)
    owner: Tensor,  # (rows,) the example of each row, ascending
    examples: int,
) -> Tensor:  # (examples, maximum rows of an example, width)
    """Combine values for each row into one note per example, padded with NaN where an example has fewer rows."""
    rank = _rank(owner)
    stacked = values.new_full((examples, int(rank.max()) + 1, values.shape[1]), math.nan)
    stacked[owner, rank] = values
    return stacked


def unstack_rows(
    stacked: Tensor,  # (examples, rows or more, width)
    owner: Tensor,  # (rows,) the example of each row, ascending
) -> Tensor:  # (rows, width)
    """The inverse: the values of each row."""
    return stacked[owner, _rank(owner)]


def _place_in_group(group: Tensor) -> Tensor:  # (slots,) -> (slots,)
    """The index of each slot among the slots of its group."""
    order = torch.argsort(group, stable=True)
    place = torch.empty_like(order)
    place[order] = _rank(group[order])
    return place


def _rank(owner: Tensor) -> Tensor:
    """The index of each row among the rows of its example."""
    owner = owner.contiguous()
    return torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)


def _cat_wider(old: Tensor, new: Tensor) -> Tensor:
    """The slots of `old`, then those of `new`; in every other dimension the smaller is padded with NaN."""
    shape = _wider(old, new)
    return torch.cat([_padded(old, shape), _padded(new, shape)])


def _wider(old: Tensor, new: Tensor) -> list[int]:
    """The larger size of both in every dimension after the first."""
    return [max(sizes) for sizes in zip(old.shape[1:], new.shape[1:], strict=True)]


def _padded(x: Tensor, shape: list[int]) -> Tensor:
    """Padded with NaN to this shape; the same tensor if it has the shape."""
    room = [size - own for own, size in zip(x.shape[1:], shape, strict=True)]
    sides = [side for size in reversed(room) for side in (0, size)]  # last dimension first
    return F.pad(x, sides, value=math.nan) if any(room) else x
