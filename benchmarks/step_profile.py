"""Where the time of a step goes: the share of each part in an epoch of a second task, as in `bace_cost.py`.

    python benchmarks/step_profile.py [--encoder NAME] [--steps N]

A part's time does not include that of the parts inside it. The search for neighbours and the teacher's pass over the
task happen once an epoch; their time is divided among all steps of the epoch.
"""

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from bace_cost import BATCH, CASES, ENCODERS, EPOCH, EXAMPLES
from common import small_vit, step_times, trained_by_library

from bace.core.stream import Stream
from bace.core.trainer import Trainer
from bace.methods.bace import BaCE
from bace.models.model import Model

PARTS = ("data", "student forward", "backward", "optimiser", "teacher", "neighbours", "search", "rest")
ONCE = ("teacher of the task", "search")  # an epoch
METHODS = {"SEQ": ("SEQ", {}), **{case: CASES[case] for case in ("ER", "BaCE, bank", "BaCE, exact")}}


class Clock:
    """Exclusive seconds by part, of calls inside each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.parts, self.since = ["rest"], time.process_time()

    def switch(self) -> None:
        now = time.process_time()
        self.seconds[self.parts[-1]] += now - self.since
        self.since = now

    def timed(self, function: Callable[..., Any], part: Callable[..., str | None]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            self.switch()
            self.parts.append(part(*arguments) or self.parts[-1])
            try:
                return function(*arguments, **options)
            finally:
                self.switch()
                self.parts.pop()

        return called

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the library's functions. What the tables of an epoch and the neighbours pass belongs to them."""

        def unless_inside(part: str) -> str | None:
            return None if self.parts[-1] in ("neighbours", "teacher of the task") else part

        def of_pass(model: Model, *rest: Any) -> str | None:
            return unless_inside("student forward" if torch.is_grad_enabled() else "teacher")

        watched: list[tuple[Any, str, Callable[..., str | None]]] = [
            (Stream, "batch", lambda *given: unless_inside("data")),
            (Stream, "rows", lambda *given: unless_inside("data")),
            (Model, "forward", of_pass),
            (torch.Tensor, "backward", lambda *given: "backward"),
            (torch.optim.SGD, "step", lambda *given: "optimiser"),
            (BaCE, "beside", lambda *given: "neighbours"),
            (BaCE, "find_neighbours", lambda *given: "search"),
            (BaCE, "before_epoch", lambda *given: "teacher of the task"),
            (Trainer, "step", lambda *given: "rest"),
        ]
        patches = [patch.object(owner, name, self.timed(getattr(owner, name), part)) for owner, name, part in watched]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()


def shares(case: str, shape: dict[str, int], steps: int) -> dict[str, float]:
    """The milliseconds of a step, by part."""
    method, settings = METHODS[case]
    step_times(trained_by_library(method, EXAMPLES, BATCH, small_vit(**shape), **settings), 2)  # warm
    work, clock = trained_by_library(method, EXAMPLES, BATCH, small_vit(**shape), **settings), Clock()
    with clock.watching():
        clock.switch()
        clock.seconds.clear()
        step_times(work, steps)
        clock.switch()
    found = {part: seconds / (EPOCH if part in ONCE else steps) * 1000 for part, seconds in clock.seconds.items()}
    found["teacher"] = found.get("teacher", 0.0) + found.pop("teacher of the task", 0.0)
    return {part: found.get(part, 0.0) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=ENCODERS, default="micro ViT")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {options.encoder}, ms a step | " + " | ".join(PARTS) + " | sum |")
    print("| --- |" + " --- |" * (len(PARTS) + 1))
    for case in METHODS:
        found = shares(case, ENCODERS[options.encoder], options.steps)
        print(f"| {case} | " + " | ".join(f"{ms:.0f}" for ms in found.values()) + f" | {sum(found.values()):.0f} |")


if __name__ == "__main__":
    main()
