"""Class-incremental learning with pre-trained transformers: images, texts and named entities in one loop."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Batch", "Learner", "Method", "Stage", "Stream", "Task", "compare", "load", "run"]

if TYPE_CHECKING:
    from bace.core.method import Method
    from bace.core.stage import Stage
    from bace.core.stream import Stream, Task
    from bace.data.batch import Batch
    from bace.experiments.run import run
    from bace.learner import Learner
    from bace.report.comparison import compare

_HOMES = {
    "Batch": "bace.data.batch",
    "Learner": "bace.learner",
    "Method": "bace.core.method",
    "Stage": "bace.core.stage",
    "Stream": "bace.core.stream",
    "Task": "bace.core.stream",
    "compare": "bace.report.comparison",
    "run": "bace.experiments.run",
}


def load(folder: str, *, trust: bool = False, force: bool = False) -> "Learner":
    """The model in a folder, ready to `predict`: of a finished run, of a comparison (its best run) or of a saved
    `Learner`. `trust`: the folder may name a method that is not part of bace, which is then imported. `force`: open a
    run even if its run.json was changed afterwards."""
    from pathlib import Path

    from bace.learner.opening import open_model

    return open_model(Path(folder), trust=trust, force=force)


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed, so that `bace --help` answers at once."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bace' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
