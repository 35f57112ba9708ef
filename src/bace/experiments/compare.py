"""The notation of comparisons: methods with their settings, and the folders of their runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bace.errors import ConfigError

if TYPE_CHECKING:  # the report takes names from here and needs no torch
    from bace.config.schema import Config
    from bace.experiments.cells import Cell

RUNS = Path("runs")  # the parent of run folders that the user has not named


def parse_method(word: str) -> tuple[str, dict[str, Any]]:
    """The name and the changed settings of `BaCE` or `BaCE (W0=1, alpha=0)`."""
    import yaml

    match = re.fullmatch(r"([^()]+?)\s*(?:\((.*)\))?", word)
    if not match:
        raise ConfigError(f"method '{word}' cannot be read: write BaCE or 'BaCE(W0=1, alpha=0)'")
    changes = {}
    for change in filter(None, re.split(r",\s*(?![^\[]*\])", match[2] or "")):  # commas outside of [...]
        key, equals, value = change.partition("=")
        try:
            changes[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise ConfigError(f"'{change}' in method '{word}' is not of the form setting=value")
    return match[1], changes


def methods_asked(words: Sequence[str], benchmark: str) -> list[tuple[str, dict[str, Any]]]:
    """`all`, or names with changes: BaCE "BaCE(W0=1, alpha=0)"."""
    from bace.data.benchmarks import find_benchmark
    from bace.methods import METHODS

    if list(words) == ["all"]:
        modality = find_benchmark(benchmark).modality
        return [(method.title, {}) for method in METHODS if modality in method.modalities]
    return [parse_method(word) for word in words]


def folder_name(label: str) -> str:
    """A label as a folder's name: 'BaCE (W0=1, alpha=0)' -> 'BaCE-W0=1-alpha=0', 'SEQ*' -> 'SEQstar'."""
    return re.sub(r"[^A-Za-z0-9.=+-]+", "-", label.replace("*", "star")).strip("-")


def default_folder(config: "Config") -> Path:
    """The default folder of a run: runs/digits-BaCE-0."""
    from bace.config.parse import method_label

    named = folder_name(f"{config.benchmark['name']}-{method_label(config.method)}")
    return RUNS / f"{named}-{config.seed}"


def cells_of(
    asked: Sequence[tuple[str, dict[str, Any]]], given: Mapping[str, Any], seeds: int, out: Path | None
) -> tuple[Path, list["Cell"]]:
    """Every method with every seed from the given one on, in folders of `out`, by default runs/<benchmark>. Every
    configuration is checked before the first run starts."""
    from bace.config.parse import config_from, method_label
    from bace.experiments.cells import Cell

    first = config_from({**given, "method": asked[0][0]})
    out = RUNS / folder_name(str(first.benchmark["name"])) if out is None else out
    cells = []
    for seed in range(first.seed, first.seed + seeds):
        for name, changes in asked:
            config = config_from({**given, "method": {"name": name, **changes}, "seed": seed})
            label = method_label(config.method)
            cells.append(Cell(f"{label}, seed {seed}", out / f"{folder_name(label)}-seed{seed}", config))
    return out, cells
