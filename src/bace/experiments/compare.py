"""Cells of a comparison: a method as one writes it down, and a run that is begun, continued or skipped."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bace.config.schema import Config
from bace.errors import ConfigError

if TYPE_CHECKING:  # the report takes names from here and needs no torch
    from bace.models.frozen_prefix import PrefixCaches


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
    """A label as a folder's name: 'BaCE (W0=1, alpha=0)' -> 'BaCE-W0=1-alpha=0', 'SEQ*' -> 'SEQstar'."""
    return re.sub(r"[^A-Za-z0-9.=+-]+", "-", label.replace("*", "star")).strip("-")


def run_or_continue(folder: Path, label: str, config: Config, caches: "PrefixCaches") -> Path:
    """One cell of a comparison: skipped if finished, resumed if begun; refused if it was begun with other settings.
    All cells share `caches`."""
    from bace.experiments.run import run
    from bace.experiments.run_folder import is_begun, is_finished, read_description
    from bace.progress import bar

    begun = is_begun(folder)
    if begun and read_description(folder).settings() != config:
        raise ConfigError(f"'{folder}' holds a run with other settings: choose another --out")
    if not is_finished(folder):
        with bar(f"{label}, seed {config.seed}") as show:
            run(resume=folder, show=show, caches=caches) if begun else run(config, out=folder, show=show, caches=caches)
    return folder
