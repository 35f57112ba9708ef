"""bace list"""

import json
from collections.abc import Callable
from typing import Any

from bace.cli.console import in_words, print_rows
from bace.cli.options import refuse, split_options
from bace.data.benchmarks import BENCHMARKS
from bace.errors import ConfigError, nearest
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


def command(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0})
    refuse([word for word in rest if word.startswith("-")], ["--json"])
    if len(rest) != 1 or rest[0] not in KINDS:
        wrong = f" not '{' '.join(rest)}'.{nearest(rest[0], KINDS)}" if rest else ""
        raise ConfigError(f"bace list takes one of {', '.join(KINDS)}{',' if rest else '.'}{wrong}")
    rows = KINDS[rest[0]]()
    if "--json" in options:
        print(json.dumps(rows, indent=2))
    else:
        print_rows(list(rows[0]), [[in_words(value) for value in row.values()] for row in rows])
