"""How a method that mixes the memory into its steps does so."""

from dataclasses import dataclass
from typing import Literal, TypedDict

Mode = Literal["batch", "concat"]
Reduction = Literal["sum", "joint"]


class ReplayOptions(TypedDict, total=False):
    """The settings of a policy, as methods take and pass them on."""

    mode: Mode
    reduction: Reduction


@dataclass(frozen=True)
class Replay:
    """A policy: whether replayed rows come in a batch of their own, and how many means the loss is the sum of."""

    mode: Mode = "batch"
    reduction: Reduction = "sum"

    def parts(self, new: int, rows: int) -> dict[str, slice]:
        """The rows that each term of the loss is a mean over, of `rows` rows of which the first `new` are new. A term
        without rows is left out."""
        parts = {"new": slice(new), "replay": slice(new, rows)} if self.reduction == "sum" else {"new": slice(rows)}
        return {name: part for name, part in parts.items() if part.stop > (part.start or 0)}

    def count_means(self, new: int, rows: int) -> int:
        """How many means the cross-entropy is the sum of. A published loss is one mean over the batch, and the weights
        of its other terms are relative to that: each of these that is one mean, of whatever rows, is multiplied by this
        number, or the sum of two means would halve its weight."""
        return len(self.parts(new, rows))
