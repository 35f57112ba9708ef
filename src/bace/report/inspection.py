"""The content of a model's folder as plain JSON: its classes or tasks, how well it knows them, and its inputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bace.core import checkpoint
from bace.core.metrics import average_accuracy, forgetting
from bace.core.resources import bytes_kept
from bace.experiments.run_folder import COLUMNS, Run
from bace.learner import Learner
from bace.learner.history import held_out


def inspect_learner(learner: Learner, folder: Path) -> dict[str, Any]:
    """A saved learner: its classes, its calls, its memory."""
    assert learner.method is not None
    assert learner.config is not None
    with checkpoint.understood(f"the history of the learner in '{folder}'"):
        classes = [_class(name, held, learner.history_) for name, held in learner.memory_.items()]
        calls = [_call(n, learner.history_) for n in range(1, len(learner.history_) + 1)]
    return {
        "kind": "learner",
        "method": learner.method.title,
        "backbone": learner.config.backbone.name,
        "modality": learner.modality,
        "classes": classes,
        "calls": calls,
        "memory": {"examples": sum(learner.memory_.values()), "bytes": learner.memory_bytes_},
        "bytes_of_method": bytes_kept(learner.method),
        "bytes_on_disk": bytes_on_disk(folder),
    }


def _class(name: Any, held: int, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A class, from the records of the calls that mention it. Records of older versions have no dates and counts."""
    own = str(name)
    brought = [call for call in history if own in call["classes"]]
    counts = [call["counts"][own] for call in brought if "counts" in call]
    shares = _shares(own, history)
    return {
        "name": name,
        "call": next((n for n, call in enumerate(history, 1) if own in call["classes"]), None),
        "learned": brought[0].get("date") if brought else None,
        "examples": sum(counts) if len(counts) == len(brought) > 0 else None,
        "in_memory": held,
        "known": shares[-1] if shares else None,
        "forgotten": _lost(shares),
    }


def _shares(name: str, history: Sequence[dict[str, Any]]) -> list[float]:
    """How much of a class was known after each call that measured it."""
    return [float(call["per_class"][name]) for call in history if name in call.get("per_class", {})]


def _lost(shares: Sequence[float]) -> float | None:
    """How much less is known than after an earlier call; negative if more."""
    return max(shares[:-1]) - shares[-1] if len(shares) > 1 else None


def _call(number: int, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A call; `forgetting` is the mean over the classes of earlier calls, as far as they were measured."""
    call, so_far = history[number - 1], history[:number]
    asked = [_shares(name, so_far) for name in call.get("per_class", {})]
    lost = [share for share in map(_lost, asked) if share is not None]
    return {
        "call": number,
        "date": call.get("date"),
        "classes": call["classes"],
        "more_of": call["known"],
        "examples": call["examples"],
        "new": call["new"],
        "old": call["old"],
        "held_out": held_out(call),
        "forgetting": sum(lost) / len(lost) if lost else None,
        "calibration_error": call["ece"][1] if "ece" in call else None,
    }


def inspect_run(run: Run) -> dict[str, Any]:
    """A run folder: its tasks, with their scores after learning and now, and its measures."""
    done, last = len(run.matrix), run.matrix[-1] if run.matrix else ()
    kept = (run.metrics and run.metrics.kept) or ()
    tasks = [
        {
            "task": t,
            "name": task.name,
            "classes": list(task.classes),
            "score": run.matrix[t - 1][t - 1] if t <= done else None,
            "score_now": last[t - 1] if t <= done else None,
            "average": average_accuracy(run.matrix[t - 1]) if t <= done else None,
            "forgetting": forgetting(run.matrix[:t]) if t <= done else None,
            "bytes_of_method": kept[t - 1] if t <= len(kept) else None,
        }
        for t, task in enumerate(run.tasks, 1)
    ]
    return {
        "kind": "run",
        "folder": str(run.folder),
        "method": run.method,
        "benchmark": run.benchmark,
        "seed": run.seed,
        "finished": run.metrics is not None,
        "score": run.metrics.score if run.metrics else None,
        "measures": {name: getattr(run.metrics, name) for name in COLUMNS} if run.metrics else {},
        "tasks": tasks,
        "changed": list(run.changed),
        "bytes_on_disk": bytes_on_disk(run.folder),
    }


def bytes_on_disk(folder: Path) -> int:
    """The size of all files in a folder; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
