"""The model that answers requests; the server replaces it when its folder changes."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bace.data.modalities import MODALITIES
from bace.data.modality import Modality
from bace.errors import BaceError, one_line
from bace.learner import UNKNOWN, Learner
from bace.progress import tell

FILES = {"state.json", "state.safetensors", "sha256.json", "run.json", "metrics.json"}  # watched for changes
ROUNDED = 6  # digits of a probability


@dataclass(frozen=True, eq=False)
class Served:
    """A learner that answers requests; `version` counts the models that the server has had."""

    learner: Learner
    version: int
    loaded: str  # when

    @property
    def modality(self) -> Modality:
        return MODALITIES[str(self.learner.modality)]

    @property
    def facts(self) -> dict[str, Any]:
        method = self.learner.method
        assert method is not None
        return {"modality": self.modality.name, "method": method.title, "version": self.version, "loaded": self.loaded}

    def predict(self, examples: list[Any]) -> Sequence[Any]:
        """A row of probabilities for each example; for a sentence, the output of `Learner.describe`."""
        if not self.modality.one_label:
            return self.learner.describe(examples)
        pictures = self.modality.picture_input and isinstance(examples[0], np.ndarray)
        return list(self.learner.predict_proba(np.stack(examples) if pictures else examples))

    def answer(self, found: Any, reject: float | None, top: int) -> dict[str, Any]:
        """The answer for an example, from the output of `predict`."""
        if not self.modality.one_label:
            return dict(found)
        names, best = self.learner.classes_, np.argsort(-found, kind="stable")[:top].tolist()
        share = float(found[best[0]])
        return {
            "class": UNKNOWN if reject is not None and share < reject else names[best[0]],
            "probability": round(share, ROUNDED),
            "top": [{"class": names[c], "probability": round(float(found[c]), ROUNDED)} for c in best],
        }


class Watched:
    """The newest model of a folder. When the folder changes, the new model is opened while the old one still answers.
    If the new one cannot be opened, the old one stays.

    Args:
        folder: the folder of the model.
        open: opens the learner in it.
        every: seconds between two checks of the folder; 0 means no checks.
    """

    def __init__(self, folder: Path, open: Callable[[], Learner], every: float = 2.0) -> None:
        self.folder, self.open, self.every = folder, open, every
        self.seen = fingerprint(folder)
        self.model = self._opened(1)
        self.problem: str | None = None  # why a changed folder could not be opened
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        if every:
            self.thread.start()

    def close(self) -> None:
        self.closed.set()

    def look(self) -> None:
        """Replace the model if its folder has changed."""
        found = fingerprint(self.folder)
        if found == self.seen:
            return
        self.seen = found  # taken before opening, so that a change during opening is noticed next time
        try:
            self.model, self.problem = self._opened(self.model.version + 1), None
        except Exception as error:  # whatever is in the folder now must not stop the server
            self.problem = str(error) if isinstance(error, BaceError) else one_line(error)
            tell(f"{self.folder} has changed but cannot be opened; the old model stays in use: {self.problem}")
        else:
            tell(f"{self.folder} has changed: version {self.model.version}, {len(self.model.learner.classes_)} classes")

    def _opened(self, version: int) -> Served:
        return Served(self.open(), version, datetime.now(UTC).isoformat(timespec="seconds"))

    def _watch(self) -> None:
        while not self.closed.wait(self.every):
            with contextlib.suppress(OSError):  # the reader of the server's messages may be gone
                self.look()


def fingerprint(folder: Path) -> list[tuple[str, int, int, int]]:
    """The name, inode, time and size of each file of a model, which differ if a file has changed."""
    found = []
    for place, _, names in os.walk(folder):
        for name in FILES.intersection(names):
            try:
                about = os.stat(path := os.path.join(place, name))
            except OSError:
                continue  # being replaced, or unreachable for a moment
            found.append((path, about.st_ino, about.st_mtime_ns, about.st_size))
    return sorted(found)
