"""The methods, by the names the paper gives them. A method is one file here, named as its class in lower case; nothing
else has to be told of it. They are listed in the order of their files (`METHODS`)."""

import functools
import importlib
import pkgutil
import sys
from importlib.metadata import entry_points
from typing import Any

from bace.core.method import Method
from bace.errors import ConfigError, closest_name

METHODS: list[type[Method]]  # every method of the package; imported when it is asked for

_FILES = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}


@functools.cache
def _in_file(stem: str) -> type[Method]:
    module = importlib.import_module(f"{__name__}.{_FILES[stem]}")
    return next(
        found
        for name, found in vars(module).items()
        if name.lower() == stem and isinstance(found, type) and issubclass(found, Method)
    )


def _all() -> list[type[Method]]:
    return [_in_file(stem) for stem in _FILES]


def __getattr__(name: str) -> Any:
    """`METHODS`, and each method by its class's name, so that only those that are used are imported."""
    if name == "METHODS":
        return _all()
    if name.lower() in _FILES and _in_file(name.lower()).__name__ == name:
        return _in_file(name.lower())
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def find_method(name: str) -> type[Method]:
    """A method by its name ("BaCE", in any case; "derpp" for "DER++"), or a user's class by "package.Class".

    Nothing is imported here but installed plug-ins (entry points of the group `bace.methods`), because the name may
    come from a stranger's file. A user's class is found once `import_method`, or the user, has imported it."""
    stem = name.lower().replace("-", "").replace("+", "p")  # a title's file: A-GEM's is agem.py, DER++'s derpp.py
    if stem in _FILES and name.lower() in (stem, _in_file(stem).title.lower()):
        return _in_file(stem)
    installed = {point.name.lower(): point for point in entry_points(group="bace.methods")}
    if name.lower() in installed:
        return _as_method(name, installed[name.lower()].load())
    module, _, attribute = name.rpartition(".")
    if not module:
        titles = [method.title for method in _all()]
        raise ConfigError(f"there is no method '{name}'.{closest_name(name, [*titles, *installed])}")
    if module not in sys.modules:
        raise ConfigError(
            f"method '{name}' is not part of bace: using it imports the module '{module}' and so runs its code. If you "
            "trust that, add --trust (in Python: trust=True)"
        )
    return _as_method(name, getattr(sys.modules[module], attribute, None))


def import_method(name: str) -> type[Method]:
    """`find_method` with the user's consent to import "package.Class"."""
    module, _, attribute = name.rpartition(".")
    if module:
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"method '{name}' cannot be imported: {error}. Name the folder that holds it in PYTHONPATH"
            ) from error
    return find_method(name)


def _as_method(name: str, found: object) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"'{name}' is not a bace.Method: a method is a class derived from bace.Method")
    return found
