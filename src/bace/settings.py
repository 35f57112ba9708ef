"""Settings from code, YAML files and flags, in one place: defaults < benchmark's defaults < file < flags.

The schema is the annotations: of the dataclasses in config.py, of the benchmarks' `Cut`, of the method's constructor.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from bace.config import Backbone, Checkpoints, Config, Head, Measures, MemoryBudget, Training
from bace.data.benchmarks import Cut, find_benchmark
from bace.errors import ConfigError, nearest
from bace.methods import find_method

SECTIONS: dict[str, type] = {
    "backbone": Backbone,
    "head": Head,
    "memory": MemoryBudget,
    "train": Training,
    "measure": Measures,
    "checkpoint": Checkpoints,
}
SHORT = {"benchmark": "name", "method": "name", "backbone": "name", "memory": "size"}  # `--memory 50`, `method: bace`


def config_from(given: Mapping[str, Any], flags: Sequence[str] = ()) -> Config:
    """A full configuration; whatever is unknown or of the wrong type is refused by name.

    Args:
        given: settings, nested or dotted, with the shorthands of SHORT.
        flags: command-line flags, which win.
    """
    settings = flatten(given)
    flags = expand_shorthands(flags)
    chosen = {**settings, **dict(itertools.pairwise(flags))}
    names = {
        section: str(chosen.get(f"--{section}.name", chosen.get(f"{section}.name", default)))
        for section, default in (("method", "bace"), ("benchmark", "digits"))
    }
    benchmark = find_benchmark(names["benchmark"])
    parser = make_parser(names["method"], names["benchmark"])
    valid = valid_settings(names["method"])
    for key in [*settings, *(flag[2:] for flag in flags if flag.startswith("--"))]:
        if key not in valid:
            raise ConfigError(f"there is no setting '{key}'.{nearest(key, valid)}")
    try:
        start = parser.parse_object(nest({**benchmark.defaults, **settings}))
        parsed = parser.parse_args(list(flags), namespace=start)
    except Exception as error:  # jsonargparse wraps whatever a type's parser raises
        raise ConfigError(_first_sentence(error)) from error
    return as_config(parsed)


def make_parser(method: str, benchmark: str) -> ArgumentParser:
    parser = ArgumentParser(prog="bace run", exit_on_error=False, add_help=False)
    parser.add_argument("--benchmark.name", default=benchmark, help="a name of `bace list benchmarks`")
    parser.add_class_arguments(Cut, "benchmark")
    parser.add_argument("--method.name", default=method, help="a name of `bace list methods`, or package.Class")
    parser.add_class_arguments(find_method(method), "method")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_argument("--seed", type=int, default=0, help="of everything random; the class order has its own")
    return parser


def valid_settings(method: str) -> list[str]:
    own = [f"method.{name}" for name in find_method(method).hyper_parameters()]
    cut = [f"benchmark.{f.name}" for f in dataclasses.fields(Cut)]
    rest = [f"{name}.{f.name}" for name, section in SECTIONS.items() for f in dataclasses.fields(section)]
    return ["seed", "benchmark.name", "method.name", *own, *cut, *rest]


def as_config(parsed: Namespace) -> Config:
    sections = {name: section(**vars(parsed[name])) for name, section in SECTIONS.items()}
    return Config(vars(parsed["benchmark"]), vars(parsed["method"]), seed=parsed["seed"], **sections)


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config file '{path}' is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config file '{path}' must hold settings such as 'method: bace'")
    return found


def as_yaml(config: Config) -> str:
    plain = dataclasses.asdict(config)
    return yaml.safe_dump(_plain(plain), sort_keys=False)


def flatten(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"method": {"name": "bace", "alpha": 2}} -> {"method.name": "bace", "method.alpha": 2}."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif not prefix and key in SHORT:
            flat[f"{key}.{SHORT[key]}"] = value
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return nested


def expand_shorthands(flags: Sequence[str]) -> list[str]:
    """`--method bace --seed=1` -> `--method.name bace --seed 1`."""
    out: list[str] = []
    for word in flags:
        if not word.startswith("--"):
            out.append(word)
            continue
        flag, equals, value = word.partition("=")
        section = flag[2:]
        out.append(f"--{section}.{SHORT[section]}" if section in SHORT else flag)
        if equals:
            out.append(value)
    return out


def _plain(value: Any) -> Any:
    """What YAML can write: no tuples."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _first_sentence(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def documented(section: type) -> dict[str, str]:
    """What the docstring says of each setting: the text under `Args:`."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(section.__doc__ or "").partition("Args:\n")[2].splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = text
        elif line.strip() and name:
            found[name] += " " + line.strip()
    return found


def explain(config: Config) -> list[tuple[str, str, str]]:
    """Every setting's name, default and meaning."""
    method = find_method(str(config.method["name"]))
    sources: dict[str, type] = {"benchmark": Cut, "method": method, **SECTIONS}
    values = flatten(dataclasses.asdict(config))
    names = ["seed", *(key for key in valid_settings(str(config.method["name"])) if not key.endswith(".name"))]
    meanings = {f"{section}.{k}": v for section, source in sources.items() for k, v in documented(source).items()}
    meanings["seed"] = "of everything random; the class order has its own, benchmark.seed"
    return [(name, str(values.get(name)), meanings.get(name, "")) for name in dict.fromkeys(names)]


def method_label(method: Mapping[str, Any]) -> str:
    """'BaCE (alpha=2.0)': the method's title and the hyper-parameters that are not at their default."""
    found = find_method(str(method["name"]))
    defaults = {name: p.default for name, p in found.hyper_parameters().items()}
    changed = [f"{k}={v}" for k, v in method.items() if k != "name" and _plain(v) != _plain(defaults[k])]
    return found.title + (f" ({', '.join(changed)})" if changed else "")
