"""How methods mix the memory into their steps."""

from dataclasses import dataclass
from typing import Literal, TypedDict

Mode = Literal["batch", "concat"]
Reduction = Literal["sum", "joint"]


class ReplayOptions(TypedDict, total=False):
    """The settings of a replay policy, which methods take and pass on."""

    mode: Mode
    reduction: Reduction


@dataclass(frozen=True)
class Replay:
    """A replay policy: whether replayed rows come in a separate batch, and over how many means the loss is summed."""

    mode: Mode = "batch"
    reduction: Reduction = "sum"

    def parts(self, new: int, rows: int) -> dict[str, slice]:
        """The rows of each mean in the loss, given `rows` rows of which the first `new` are new. A mean without rows is
        left out."""
        parts = {"new": slice(new), "replay": slice(new, rows)} if self.reduction == "sum" else {"new": slice(rows)}
        return {name: part for name, part in parts.items() if part.stop > (part.start or 0)}

    def count_means(self, new: int, rows: int) -> int:
        """The number of means in the cross-entropy. A published loss has one mean over the batch, and the weights of
        its other terms are relative to it. Each other term that is one mean is therefore multiplied by this number; the
        sum of two means would otherwise halve its weight."""
        return len(self.parts(new, rows))
