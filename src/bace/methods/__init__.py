"""The methods, under the names that the paper uses. A method is one file here, named like its class in lower case, and
is registered nowhere else. `METHODS` lists them in the order of their files."""

import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from bace.core.method import Method
from bace.errors import ConfigError, closest_name

METHODS: list[type[Method]]  # every method of the package; imported on first use

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
    """`METHODS`, and each method by the name of its class. Only methods that are used are imported."""
    if name == "METHODS":
        return _all()
    if name.lower() in _FILES and _in_file(name.lower()).__name__ == name:
        return _in_file(name.lower())
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def find_method(name: str) -> type[Method]:
    """A method by its name ("BaCE", in any case; "derpp" for "DER++", "seqstar" for "SEQ*"), or a user's class by
    "package.Class" or "folder/file.py:Class".

    This imports only installed plug-ins (entry points of the group `bace.methods`), because the name may come from a
    stranger's file. A user's class is found once `import_method`, or the user, has imported it."""
    if (own := _own(name)) is not None:
        return own
    installed = {point.name.lower(): point for point in entry_points(group="bace.methods")}
    if name.lower() in installed:
        return _as_method(name, installed[name.lower()].load())
    module, attribute = _place(name)
    title, bracket, changes = name.partition("(")
    if bracket and _own(title) is not None:
        first = changes.partition("=")[0].strip(")") or "NAME"
        raise ConfigError(
            f"'{name}' is the form of bace compare. Give hyper-parameters one by one, as in --method {title} "
            f"--method.{first} VALUE (in Python: method={{'name': '{title}', ...}})"
        )
    if not module:
        titles = [method.title for method in _all()]
        raise ConfigError(f"there is no method '{name}'.{closest_name(name, [*titles, *installed])}")
    if module not in sys.modules:
        raise ConfigError(
            f"method '{name}' is not part of bace: using it imports {_source(name)} and so runs its code. If you trust "
            "that, add --trust (in Python: trust=True)"
        )
    return _as_method(name, getattr(sys.modules[module], attribute, None))


def plain_name(name: str) -> str:
    """The title of a method of the package ("er" and "ER" are "ER"); other names are returned as they are."""
    own = _own(name)
    return name if own is None else own.title


def _own(name: str) -> type[Method] | None:
    """The method of the package that this name means."""
    # the file of a title: agem.py for A-GEM, derpp.py for DER++, seqstar.py for SEQ*
    stem = name.lower().replace("-", "").replace("+", "p").replace("*", "star")
    return _in_file(stem) if stem in _FILES and name.lower() in (stem, _in_file(stem).title.lower()) else None


def import_method(name: str) -> type[Method]:
    """`find_method` with the user's consent to import "package.Class" or to run the file of "file.py:Class"."""
    module, attribute = _place(name)
    if _own(name) is None and module:
        try:
            if ".py:" in name and module not in sys.modules:
                _import_file(Path(name.rpartition(":")[0]), module)
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, OSError, SyntaxError) as error:
            remedy = "Check the path and the name" if ".py:" in name else "Name the folder that holds it in PYTHONPATH"
            raise ConfigError(f"method '{name}' cannot be imported: {error}. {remedy}") from error
    return find_method(name)


def _place(name: str) -> tuple[str, str]:
    """The module and the class that a name refers to. A file becomes a module with a unique name."""
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        return f"bace_method_{hashlib.sha256(os.path.abspath(file).encode()).hexdigest()[:16]}", attribute
    module, _, attribute = name.rpartition(".")
    return module, attribute


def _source(name: str) -> str:
    return f"the file '{name.rpartition(':')[0]}'" if ".py:" in name else f"the module '{_place(name)[0]}'"


def _import_file(file: Path, module: str) -> None:
    """Run a file as the module of this name. Like a script, it can import the files in its folder."""
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{file}' is not a Python file")
    sys.path.append(str(file.resolve().parent))
    sys.modules[module] = made = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[module]
        raise


def _as_method(name: str, found: object) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"'{name}' is not a bace.Method: a method is a class derived from bace.Method")
    return found
