"""The loss terms of an epoch stay on the device until they are read, so that a step never waits for their values."""

import math

import torch
from torch import Tensor

from bace.errors import TrainingError

READ_EVERY = 100  # steps


class LossLog:
    """Collects the terms of each step, and sums them up when it is read."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, list[str], Tensor]] = []  # where the step was, names and values (terms,)

    def note(self, where: str, terms: dict[str, Tensor]) -> None:
        """`where` describes the step in error messages."""
        self.waiting.append((where, list(terms), torch.cat([term.detach().reshape(1) for term in terms.values()])))

    @property
    def due(self) -> bool:
        return len(self.waiting) >= READ_EVERY

    def read_into(self, sums: dict[str, float]) -> None:
        """Add the noted terms to `sums`, whose "steps" counts the steps. The first term that is not finite raises an
        error."""
        if not self.waiting:
            return
        values = torch.cat([noted for _, _, noted in self.waiting]).tolist()  # the one wait for the device
        steps, self.waiting = self.waiting, []
        for where, names, _ in steps:
            terms, values = dict(zip(names, values, strict=False)), values[len(names) :]
            if not math.isfinite(sum(terms.values())):
                guilty = next((name for name, value in terms.items() if not math.isfinite(value)), names[0])
                raise TrainingError(
                    f"the loss is not finite: term '{guilty}' is {terms[guilty]} in {where}. The last good checkpoint "
                    "is kept; try a lower train.lr, or train.clip 1."
                )
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value
            sums["steps"] = sums.get("steps", 0) + 1
