"""What `bace list` shows."""

from collections.abc import Callable
from typing import Any

from bace.data.benchmarks import BENCHMARKS
from bace.methods import METHODS
from bace.models.backbones import known_backbones


def methods() -> list[dict[str, Any]]:
    return [
        {
            "name": method.title,
            "paper": method.paper,
            "memory": method.uses_memory,
            "modalities": sorted(method.modalities),
            "settings": {name: p.default for name, p in method.hyper_parameters().items()},
        }
        for method in METHODS
    ]


def benchmarks() -> list[dict[str, Any]]:
    return [{"name": b.name, "modality": b.modality, "note": b.note} for b in BENCHMARKS.values()]


def backbones() -> list[dict[str, Any]]:
    return [dict(backbone) for backbone in known_backbones()]


KINDS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": methods,
    "benchmarks": benchmarks,
    "backbones": backbones,
}
