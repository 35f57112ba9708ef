"""Errors for the user: each names the thing, the value, and what to do about it."""

import difflib
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path


class BaceError(Exception):
    """An error that the user can correct. The command line prints it without a traceback."""

    said = False  # whether another process of the run prints it


class ConfigError(BaceError):
    """A setting, name or flag that cannot be used."""


class InUse(ConfigError):
    """A run folder is in use by another process."""


class DataError(BaceError):
    """A file, label or picture that cannot be used."""


class StreamRefused(BaceError):
    """A method asked for an example that the current task may not see."""


class CheckpointError(BaceError):
    """No usable checkpoint, or one could not be written."""


class TrainingError(BaceError):
    """Training cannot go on, for example because the loss is not finite."""


class RankLost(TrainingError):
    """Another process of the run has ended."""


class RanksDiffer(TrainingError):
    """The processes of a run do not hold the same state."""


class Stopped(BaceError):
    """A signal has asked the run to stop; its state is saved."""

    def __init__(self, signal: int, folder: Path | None = None) -> None:
        how = f"continue with `bace run --resume {folder}`" if folder else "the same command continues"
        super().__init__(f"stopped by signal {signal} after a checkpoint: {how}")
        self.signal = signal


def printable(text: str) -> str:
    """Escape control characters, which could rewrite the terminal, as Python does."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def closest_name(name: str, valid: Iterable[str]) -> str:
    """' Did you mean X?' for the valid name nearest to `name`, or a list of all of them."""
    names = list(valid)
    close = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    if close:
        return f" Did you mean '{next(n for n in names if n.lower() == close[0])}'?"
    return f" Valid: {', '.join(sorted(names))}." if names else ""


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def kept_traceback() -> str:
    """Write the traceback of the current error to a file, and say where it is."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="bace-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError as error:
        return f"This is a fault of bace; its traceback could not be written ({error.strerror})"
    return f"This is a fault of bace: please report it with {file.name}"
