"""Cells of a comparison: a method as one writes it down, and a run that is begun, continued or skipped."""

import re
from pathlib import Path
from typing import Any

from bace.config.schema import Config
from bace.errors import ConfigError


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


def folder_name(label: str) -> str:
    """A label as a folder's name: 'BaCE (W0=1, alpha=0)' -> 'BaCE-W0=1-alpha=0'."""
    return re.sub(r"[^A-Za-z0-9.=+-]+", "-", label).strip("-")


def run_or_continue(folder: Path, label: str, config: Config) -> Path:
    """One cell of a comparison: skipped if finished, resumed if begun; refused if it was begun with other settings."""
    from bace.experiments.run import read_config, run
    from bace.progress import bar

    begun = (folder / "run.json").exists()
    if begun and read_config(folder) != config:
        raise ConfigError(f"'{folder}' holds a run with other settings: choose another --out")
    if not (folder / "metrics.json").exists():
        with bar(f"{label}, seed {config.seed}") as show:
            run(resume=folder, show=show) if begun else run(config, out=folder, show=show)
    return folder
