"""bace list"""

from typing import Any, Literal

from bace.cli.console import in_words, print_json, print_rows


def command(kind: Literal["methods", "benchmarks", "backbones"], *, json: bool = False) -> None:
    """List the methods, benchmarks or backbones that you can name on the command line.

    Args:
        kind: what to list.
        json: print JSON, for programs.
    """
    rows = KINDS[kind]()
    if json:
        print_json(rows)
    else:
        print_rows(list(rows[0]), [[in_words(value) for value in row.values()] for row in rows])


def methods() -> list[dict[str, Any]]:
    from bace.methods import METHODS

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
    from bace.data.benchmarks import BENCHMARKS

    return [{"name": b.name, "modality": b.modality, "note": b.note} for b in BENCHMARKS.values()]


def backbones() -> list[dict[str, Any]]:
    from bace.models.backbones import known_backbones

    return [dict(backbone) for backbone in known_backbones()]


KINDS = {"methods": methods, "benchmarks": benchmarks, "backbones": backbones}
