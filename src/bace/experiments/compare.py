"""How the methods of a comparison are written down, and how their folders are named."""

import re
from typing import Any

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
    """A label as a folder's name: 'BaCE (W0=1, alpha=0)' -> 'BaCE-W0=1-alpha=0', 'SEQ*' -> 'SEQstar'."""
    return re.sub(r"[^A-Za-z0-9.=+-]+", "-", label.replace("*", "star")).strip("-")
