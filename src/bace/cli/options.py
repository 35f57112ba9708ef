"""The words behind a command."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from bace.errors import ConfigError, nearest

HELP = {"--help": 0, "-h": 0}


def split_options(words: list[str], known: dict[str, int]) -> tuple[dict[str, list[str]], list[str]]:
    """The options of a command with their values (-1: as many as follow), and the other words."""
    options: dict[str, list[str]] = {}
    rest: list[str] = []
    i = 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        i += 1
        if name not in known:
            rest.append(words[i - 1])
            continue
        end = i
        if equals:
            options[name] = [value] if value else []
        else:
            while end < len(words) and not words[end].startswith("--") and (known[name] < 0 or end - i < known[name]):
                end += 1
            options[name] = words[i:end]
        i = end
        if known[name] and not options[name]:
            raise ConfigError(f"{name} needs a value")
    return options, rest


def settings_file(options: dict[str, list[str]]) -> dict[str, Any]:
    """The settings of --config; with --trust the method they name may be imported."""
    from bace.config.parse import import_named_method, read_yaml

    given = read_yaml(options["--config"][0]) if "--config" in options else {}
    if "--trust" in options:
        import_named_method(given)
    return given


def import_typed(method: str) -> None:
    """Import a user's own class, as typed behind --method; the current folder is searched for it too."""
    from bace.methods import import_method

    if "." in method:
        sys.path.append(os.getcwd())
        import_method(method)


def refuse(words: Sequence[str], valid: Sequence[str]) -> None:
    if words:
        raise ConfigError(f"there is no option '{words[0]}' here.{nearest(words[0], valid)}")


def int_option(options: dict[str, list[str]], name: str, default: int, least: int = 0) -> int:
    value = options.get(name, [str(default)])[0]
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name} is '{value}': it must be a whole number, at least {least}")
    return int(value)
