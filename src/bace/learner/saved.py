"""state.json of a saved learner: everything that is not a tensor."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bace.experiments.run_folder import check_picture
from bace.learner.auto import CANDIDATES
from bace.models.packing import Packed

FORMAT = 4  # of `Saved`; format 1 has no number (version 0.1), 2 has no `chosen` and `history`, 3 has no `encoder`
VIEWS = ("benchmark.augment", "benchmark.flip")
CHOSEN = {*VIEWS, "train.batch_size", "train.epochs", "train.lr"}  # chosen from the data, if the user leaves them unset


@dataclass(frozen=True)
class Saved:
    """state.json of a saved learner; state.safetensors beside it has the tensors of the method and of `_kept`."""

    given: dict[str, Any]  # settings, as the user gave them
    tasks: Sequence[Sequence[str | None]]  # class names, by task; None: forgotten
    modality: str
    picture: tuple[int, int] | None  # height and width
    numbers: Sequence[str]  # names that are returned as whole numbers
    method: dict[str, Any]  # the parts of the method's state that are not tensors
    train: Sequence[Sequence[int]]  # ids of each task's kept training examples
    complete: bool
    guessed: bool = False  # whether `numbers` were read from a CSV file
    chosen: dict[str, Any] = field(default_factory=dict)  # settings that the user left unset
    auto: dict[str, Any] = field(default_factory=dict)  # the method, if it was chosen
    history: Sequence[dict[str, Any]] = ()
    temperature: float = 1.0  # of `predict_proba`
    encoder: Packed | None = None  # everything about it except the weights; None: it is loaded by its name

    def __post_init__(self) -> None:
        check_picture(self.picture)
        if not all(re.fullmatch("-?[0-9]+", name) for name in self.numbers):
            raise ValueError("'numbers' has entries that are not whole numbers")
        if not CHOSEN.issuperset(self.chosen):
            raise ValueError("'chosen' has settings that are never chosen")
        if self.auto and self.auto not in CANDIDATES.values():
            raise ValueError("'auto' is a method that is never chosen")
