"""Functions that commands share: settings from a file and from the command line."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bace.config.parse import DEFAULT_NAMES, flatten, import_named_method, read_yaml
from bace.methods import import_method


def method_asked(words: Sequence[str]) -> str:
    """The method that the words or their file name; its settings become options."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--config", nargs="?")
    peek.add_argument("--method", "--method.name", nargs="?")
    asked, _ = peek.parse_known_args(words)
    if asked.method:
        import_typed(asked.method)
        return str(asked.method)
    return str(from_file(asked.config, trust="--trust" in words).get("method.name", DEFAULT_NAMES["method.name"]))


def from_file(path: str | Path | None, *, trust: bool) -> dict[str, Any]:
    """The settings of --config by their full names. With --trust, the method that they name may be imported."""
    given = flatten(read_yaml(path)) if path else {}
    if trust:
        import_named_method(given)
    return given


def import_typed(method: str) -> None:
    """Import a user's own class, as typed after --method. The current folder is searched, too."""
    if "." in method:
        sys.path.append(os.getcwd())
        import_method(method)
