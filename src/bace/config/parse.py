"""Settings from code, YAML files and the command line: defaults < benchmark's defaults < file < command line.

The schema is the annotations of the dataclasses in schema.py, of `DataSettings` and of the method's constructor.
"""

import copy
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

from bace.config.parser import Parser
from bace.config.schema import (
    Backbone,
    Checkpoints,
    Config,
    HeadSettings,
    LoggerName,
    Measures,
    MemoryBudget,
    StudyName,
    Training,
)
from bace.core.method import Method
from bace.data.benchmarks import find_benchmark
from bace.data.settings import DataSettings
from bace.errors import ConfigError, closest_name
from bace.methods import find_method, import_method, plain_name

SECTIONS: dict[str, type] = {
    "backbone": Backbone,
    "head": HeadSettings,
    "memory": MemoryBudget,
    "train": Training,
    "measure": Measures,
    "checkpoint": Checkpoints,
}
SHORT = {"benchmark": "name", "method": "name", "backbone": "name", "memory": "size"}  # `--memory 50`, `method: bace`
DEFAULT_NAMES = {"method.name": "bace", "benchmark.name": "digits"}
MOST_THREADS = 4096  # torch crashes on far more
RANGES: dict[str, tuple[float, float]] = {  # the smallest and the largest value, which a type cannot express
    "benchmark.train_per_class": (1, math.inf),
    "benchmark.test_per_class": (1, math.inf),
    "benchmark.val_fraction": (0, 0.9),
    "benchmark.max_length": (8, math.inf),
    "benchmark.image_size": (1, math.inf),
    "benchmark.views": (0, math.inf),
    "benchmark.test_fraction": (0, 0.9),
    "head.sigma_init": (1e-6, math.inf),
    "backbone.freeze": (0, math.inf),
    "backbone.cache": (0, math.inf),
    "backbone.adapter": (0, math.inf),
    "backbone.image_size": (1, math.inf),
    "memory.size": (0, math.inf),
    "memory.per_class": (0, math.inf),
    "train.epochs": (0, math.inf),
    "train.batch_size": (1, math.inf),
    "train.accumulate": (1, math.inf),
    "train.devices": (1, math.inf),
    "train.replay_ratio": (0, 1),
    "train.lr": (0, math.inf),
    "train.head_lr": (0, math.inf),
    "train.momentum": (0, 0.9999),
    "train.weight_decay": (0, math.inf),
    "train.clip": (0, math.inf),
    "train.early_stop": (0, math.inf),
    "train.eval_batch_size": (1, math.inf),
    "train.prefetch": (0, math.inf),
    "train.warmup": (0, 0.9),
    "train.threads": (0, MOST_THREADS),
    "checkpoint.every": (0, math.inf),
    "checkpoint.minutes": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
}

LARGEST = 2**53  # the largest whole number: torch overflows above 2**63, and other programs' JSON is inexact above this

# Settings of version 0.1 that no longer exist; they did not change results.
RETIRED = frozenset({"method.speedups"})
# Settings that version 0.1 did not have, with the values that it implied, by method; "" stands for all methods.
IN_0_1: dict[str, dict[str, Any]] = {
    "": {"train.replay_o": "label", "checkpoint.minutes": 0.0, "backbone.pooling": "class"},
    "a-gem": {"method.step": "plain"},
    "bace": {"method.kl_direction": "forward"},
    "beef": {"method.fuse_steps": 0},
    "hat": {"method.anneal": "epoch", "method.gate_steps": 0},
    "l2p": {"method.recipe": "cifar100"},
    "more": {"method.anneal": "epoch", "method.gate_steps": 0},
    "pass": {"method.head_rate": 1.0},
    "row": {"method.anneal": "epoch", "method.gate_steps": 0},
}


def config_from(given: Mapping[str, Any]) -> Config:
    """A full configuration of these settings, nested or dotted, with the shorthands of SHORT. A setting that is unknown
    or has the wrong type is refused by name."""
    settings = flatten(given)
    names = {key: str(settings.get(key, default)) for key, default in DEFAULT_NAMES.items()}
    method, benchmark = find_method(names["method.name"]), find_benchmark(names["benchmark.name"])
    usual = default_settings(method)  # type: ignore[arg-type]  # classes are hashable
    for key, value in settings.items():
        if key not in usual:
            raise ConfigError(unknown_setting(key, method))
        if value is None and usual[key] is not None and not _takes_none(method, key):  # jsonargparse lets it pass
            raise ConfigError(f"{key} has no value: give it one, or leave it out")
    given = {**benchmark.defaults, **settings, **names}
    changed = {key: value for key, value in given.items() if not _is_default(value, usual.get(key))}
    try:
        parsed = make_parser(method).parse_object(nest(changed), defaults=False)  # type: ignore[arg-type]
        config = as_config(nest({**copy.deepcopy(usual), **vars(parsed.as_flat())}))
    except (RecursionError, ValueError) as error:  # from the parser of a type
        raise ConfigError(_one_line(error)) from error
    check_ranges(config)
    if config.train.early_stop and not config.benchmark["val_fraction"]:
        raise ConfigError("train.early_stop needs validation data: set benchmark.val_fraction, for example to 0.1")
    return config


def _takes_none(method: type[Method], key: str) -> bool:
    """Whether a setting whose default is a value may have none, which only hyper-parameters may."""
    parameter = method.hyper_parameters().get(key.removeprefix("method.")) if key.startswith("method.") else None
    return parameter is not None and re.search("None|Optional", str(parameter.annotation)) is not None


def current(given: Mapping[str, Any], *, complete: bool = True) -> dict[str, Any]:
    """The settings of a file that an earlier version may have written. `complete` says that it has all settings of its
    version. A setting that is missing is then newer than the file and gets the value that its version implied."""
    settings = {name: value for name, value in flatten(given).items() if name not in RETIRED}
    method = str(settings.get("method.name", DEFAULT_NAMES["method.name"])).lower()
    if not settings.get("method.base_init", True):  # a setting of SLDA, if it was off
        del settings["method.base_init"]
    return {**IN_0_1[""], **IN_0_1.get(method, {}), **settings} if complete else settings


def import_named_method(given: Mapping[str, Any]) -> None:
    """Import the method that these settings name, with the consent of a user who typed them or trusts their source."""
    import_method(str(flatten(given).get("method.name", "bace")))


def check_ranges(config: Config) -> None:
    values = flatten(dataclasses.asdict(config))
    for key, (least, most) in RANGES.items():
        value = values[key]
        if value is not None and not least <= value <= most:  # written so that nan is refused, too
            allowed = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise ConfigError(f"{key} is {value}: it must be {allowed}")
    for key, value in values.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{key} is {value:.3g}: whole numbers may not exceed {LARGEST:,}")


def add_settings(parser: Parser, method: type[Method] | None = None) -> None:
    """All settings as options, in a group for each section. Without a method, there are no hyper-parameters."""
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices but the order of classes")
    parser.add_argument(
        "--studies",
        type=StudyName | list[StudyName],
        nargs="+",
        default=[],
        help="further measurements, which do not influence the run (docs/studies.md)",
    )
    parser.add_argument(
        "--log",
        type=LoggerName | list[LoggerName],
        nargs="+",
        default=[],
        help="loggers for the losses and scores of a run, in addition to its log.jsonl (docs/loggers.md)",
    )
    _add_section(parser, "benchmark", DataSettings, "a name of `bace list benchmarks`")
    if method:
        _add_method(parser, method)
    for name, section in SECTIONS.items():
        _add_section(parser, name, section)
    parser.short = {f"--{k}": f"--{k}.{name}" for k, name in SHORT.items() if method or k != "method"}
    parser.refuse = lambda option: unknown_setting(option[2:], method or find_method(DEFAULT_NAMES["method.name"]))


def _add_section(parser: Parser, name: str, section: type, named: str = "") -> None:
    about = docstring_parser.parse(section.__doc__ or "").short_description or name
    group = parser.add_argument_group(about.rstrip("."))
    if named:
        group.add_argument(f"--{name}.name", type=str, default=DEFAULT_NAMES[f"{name}.name"], help=named)
    group.add_class_arguments(section, name, as_group=False)


def _add_method(parser: Parser, method: type[Method]) -> None:
    """The hyper-parameters. Those that a constructor passes on are declared, and explained, by a class further up."""
    group = parser.add_argument_group(method.title)
    meaning = "a name of `bace list methods`, package.Class, or file.py:Class"
    group.add_argument("--method.name", type=str, default=DEFAULT_NAMES["method.name"], help=meaning)
    names = set(method.hyper_parameters())
    left = set(names)
    for base in method.__mro__:
        declared = set(inspect.signature(base).parameters) if issubclass(base, Method) else set()
        if own := left & declared:
            group.add_class_arguments(base, "method", as_group=False, skip={*((names | declared) - own)})
            left -= own
    for action in group._group_actions:  # docstrings without a summary are not read by jsonargparse
        if not action.help and (said := re.search(rf"^\s*{action.dest[7:]}: (.*)", method.__doc__ or "", re.MULTILINE)):
            action.help = said[1]


@functools.cache  # making one takes longer than parsing with it
def make_parser(method: type[Method]) -> Parser:
    parser = Parser()
    add_settings(parser, method)
    return parser


@functools.cache
def default_settings(method: type[Method]) -> dict[str, Any]:
    """All settings of a method's runs by their dotted names, parsed. The parser takes ten times as long for them as for
    the few that a user changes, so they are parsed once."""
    return {**vars(make_parser(method).parse_object({}).as_flat())}  # type: ignore[arg-type]


def _is_default(value: object, default: object) -> bool:
    """Whether a value need not be parsed, because it is plain and equals the default; True does not equal 1."""
    return isinstance(value, str | int | float | None) and type(value) is type(default) and value == default


def as_config(settings: Mapping[str, Any]) -> Config:
    sections = {name: section(**settings[name]) for name, section in SECTIONS.items()}
    studies, log = (
        [name for part in settings[key] for name in (part if isinstance(part, list) else [part])]
        for key in ("studies", "log")
    )
    method = {**settings["method"]}
    in_order = {name: method.pop(name) for name in find_method(method["name"]).hyper_parameters()}
    own = {**in_order, "name": plain_name(method["name"])}
    return Config(settings["benchmark"], own, studies=studies, log=log, seed=settings["seed"], **sections)


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' is not YAML: {_one_line(error)}") from error
    if not isinstance(found, dict):
        kind = "is empty" if found is None else f"holds a {type(found).__name__}"
        raise ConfigError(f"config file '{path}' {kind}: it must hold settings, such as the line 'method: bace'")
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


def _plain(value: Any) -> Any:
    """The value in a form that YAML can write, without tuples."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def unknown_setting(key: str, method: type[Method]) -> str:
    """The error for a misspelt setting. It suggests the nearest name, in the same section if that section exists."""
    valid = list(default_settings(method))  # type: ignore[arg-type]
    section, dot, name = key.partition(".")
    siblings = [v.partition(".")[2] for v in valid if v.startswith(f"{section}.")] if dot else []
    if not siblings:
        hint = closest_name(key, [*SHORT, *valid])
        if "Did you mean" not in hint:
            hint = closest_name(section, {v.partition(".")[0] for v in valid})
        return f"there is no setting '{key}'.{hint} `bace run --help` explains them all."
    of = f"{method.title} has" if section == "method" else "there is"
    hint = closest_name(name, siblings).replace("you mean '", f"you mean '{section}.")
    return f"{of} no setting '{key}'.{hint}"


def method_label(method: Mapping[str, Any]) -> str:
    """'BaCE (alpha=2.0)': the method's title and the hyper-parameters that are not at their default."""
    found = find_method(str(method["name"]))
    defaults = {name: p.default for name, p in found.hyper_parameters().items()}
    changed = [f"{k}={v}" for k, v in method.items() if k != "name" and _plain(v) != _plain(defaults[k])]
    return found.title + (f" ({', '.join(changed)})" if changed else "")
