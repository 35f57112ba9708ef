"""Settings from code, YAML files and flags, in one place: defaults < benchmark's defaults < file < flags.

The schema is the annotations: of the dataclasses in schema.py, of the benchmarks' `Cut`, of the method's constructor.
"""

import dataclasses
import functools
import inspect
import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from bace.config.schema import Backbone, Checkpoints, Config, Head, Measures, MemoryBudget, StudyName, Training
from bace.core.method import Method
from bace.data.benchmarks import Cut, find_benchmark
from bace.errors import ConfigError, nearest
from bace.methods import find_method, import_method

SECTIONS: dict[str, type] = {
    "backbone": Backbone,
    "head": Head,
    "memory": MemoryBudget,
    "train": Training,
    "measure": Measures,
    "checkpoint": Checkpoints,
}
SHORT = {"benchmark": "name", "method": "name", "backbone": "name", "memory": "size"}  # `--memory 50`, `method: bace`
DEFAULT_NAMES = {"method.name": "bace", "benchmark.name": "digits"}
MANY = {"studies"}  # flags of several words: `--studies probing tracking`
MOST_THREADS = 4096  # torch crashes on far more
RANGES: dict[str, tuple[float, float]] = {  # what a type cannot say: the least and the greatest value
    "benchmark.train_per_class": (1, math.inf),
    "benchmark.test_per_class": (1, math.inf),
    "benchmark.val_fraction": (0, 0.9),
    "benchmark.max_length": (8, math.inf),
    "benchmark.image_size": (1, math.inf),
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
    "train.replay_ratio": (0, 1),
    "train.lr": (0, math.inf),
    "train.head_lr": (0, math.inf),
    "train.momentum": (0, 0.9999),
    "train.weight_decay": (0, math.inf),
    "train.clip": (0, math.inf),
    "train.early_stop": (0, math.inf),
    "train.eval_batch_size": (1, math.inf),
    "train.warmup": (0, 0.9),
    "train.threads": (0, MOST_THREADS),
    "checkpoint.every": (0, math.inf),
    "checkpoint.minutes": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
}

LARGEST = 2**53  # of whole numbers: torch overflows on more than 2**63, and JSON of others is not exact above

# Settings of version 0.1 that no longer exist; they did not change results.
RETIRED = frozenset({"method.speedups"})
# Settings that version 0.1 did not have, as it behaved; of a method, or ("") of all.
IN_0_1: dict[str, dict[str, Any]] = {
    "": {"train.replay_o": "label", "checkpoint.minutes": 0.0},
    "a-gem": {"method.step": "plain"},
    "bace": {"method.kl_direction": "forward"},
    "beef": {"method.fuse_steps": 0},
    "hat": {"method.anneal": "epoch", "method.gate_steps": 0},
    "l2p": {"method.recipe": "cifar100"},
    "more": {"method.anneal": "epoch", "method.gate_steps": 0},
    "pass": {"method.head_rate": 1.0},
    "row": {"method.anneal": "epoch", "method.gate_steps": 0},
}


def config_from(given: Mapping[str, Any], flags: Sequence[str] = ()) -> Config:
    """A full configuration; whatever is unknown or of the wrong type is refused by name.

    Args:
        given: settings, nested or dotted, with the shorthands of SHORT.
        flags: command-line flags, which win.
    """
    settings = flatten(given)
    from_flags = flag_values(flags)
    chosen = {**settings, **from_flags}
    names = {key: str(chosen.get(key, default)) for key, default in DEFAULT_NAMES.items()}
    method, benchmark = names["method.name"], find_benchmark(names["benchmark.name"])
    valid = valid_settings(method)
    for key in chosen:
        if key not in valid:
            raise ConfigError(_unknown_setting(key, valid, method))
    parser = make_parser(find_method(method))  # type: ignore[arg-type]  # classes are hashable
    words = [f"--{key}={value}" for key, value in from_flags.items()]
    try:
        parsed = parser.parse_object(nest({**benchmark.defaults, **settings, **names}))
        if words:
            parsed = parser.parse_args(words, namespace=parsed)
    except Exception as error:  # jsonargparse wraps whatever a type's parser raises
        raise ConfigError(_wrong_value(parser, method, settings, from_flags, error)) from error
    config = as_config(parsed)
    check_ranges(config)
    if config.train.early_stop and not config.benchmark["val_fraction"]:
        raise ConfigError("train.early_stop needs validation data: set benchmark.val_fraction, for example to 0.1")
    return config


def current(given: Mapping[str, Any], *, complete: bool = True) -> dict[str, Any]:
    """The settings of a file that an earlier version may have written. `complete`: it wrote all that there were, so
    what is missing is newer than the file, and gets the value that goes with what the file's version did."""
    settings = {name: value for name, value in flatten(given).items() if name not in RETIRED}
    method = str(settings.get("method.name", DEFAULT_NAMES["method.name"])).lower()
    if not settings.get("method.base_init", True):  # SLDA's, where it was off
        del settings["method.base_init"]
    return {**IN_0_1[""], **IN_0_1.get(method, {}), **settings} if complete else settings


def import_named_method(given: Mapping[str, Any]) -> None:
    """Import the method that these settings name, with the consent of a user who typed them or trusts their source."""
    import_method(str(flatten(given).get("method.name", "bace")))


def flag_values(flags: Sequence[str]) -> dict[str, str]:
    """{"seed": "1"} of `--seed 1`; the last of a repeated flag wins."""
    found: dict[str, str] = {}
    words = expand_shorthands(flags)
    before = ""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                f"'{word}' is not expected {before or 'here'}: a setting is written --name value, a list in one word, "
                "'[2,1,2]'"
            )
        before = f"behind '{word} {words[0]}'" if words else ""
        if not words or words[0].startswith("--"):
            raise ConfigError(f"{word} needs a value")
        values = [words.pop(0)]
        while word[2:] in MANY and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        listed = word[2:] in MANY and not values[0].startswith("[")
        found[word[2:]] = f"[{', '.join(values)}]" if listed else " ".join(values)
    return found


def check_ranges(config: Config) -> None:
    values = flatten(dataclasses.asdict(config))
    for key, (least, most) in RANGES.items():
        value = values[key]
        if value is not None and not least <= value <= most:  # so that nan is refused too
            allowed = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise ConfigError(f"{key} is {value}: it must be {allowed}")
    for key, value in values.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{key} is {value:.3g}: whole numbers go up to {LARGEST:,} here")


@functools.cache  # making one takes longer than parsing with it
def make_parser(method: type[Method]) -> ArgumentParser:
    parser = ArgumentParser(prog="bace run", exit_on_error=False, add_help=False)
    parser.add_argument("--benchmark.name", help="a name of `bace list benchmarks`")
    parser.add_class_arguments(Cut, "benchmark")
    parser.add_argument("--method.name", help="a name of `bace list methods`, or package.Class")
    parser.add_class_arguments(method, "method")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_argument("--studies", type=list[StudyName], default=[], help="names of studies: docs/studies.md")
    parser.add_argument("--seed", type=int, default=0, help="of everything random; the class order has its own")
    return parser


def valid_settings(method: str) -> list[str]:
    own = [f"method.{name}" for name in find_method(method).hyper_parameters()]
    cut = [f"benchmark.{f.name}" for f in dataclasses.fields(Cut)]
    rest = [f"{name}.{f.name}" for name, section in SECTIONS.items() for f in dataclasses.fields(section)]
    return ["seed", "studies", "benchmark.name", "method.name", *own, *cut, *rest]


def as_config(parsed: Namespace) -> Config:
    sections = {name: section(**vars(parsed[name])) for name, section in SECTIONS.items()}
    rest = {name: parsed[name] for name in ("studies", "seed")}
    method = vars(parsed["method"])
    defaults = {name: p.default for name, p in find_method(method["name"]).hyper_parameters().items()}
    return Config(vars(parsed["benchmark"]), {**defaults, **method}, **rest, **sections)


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


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _unknown_setting(key: str, valid: Sequence[str], method: str) -> str:
    """The refusal of a misspelt setting, with the nearest one: of the same section, if there is such a section."""
    section, dot, name = key.partition(".")
    siblings = [v.partition(".")[2] for v in valid if v.startswith(f"{section}.")] if dot else []
    if not siblings:
        hint = nearest(key, [*SHORT, *valid])
        if "Did you mean" not in hint:
            hint = nearest(section, {v.partition(".")[0] for v in valid})
        return f"there is no setting '{key}'.{hint} `bace run --help` explains them all."
    of = f"{find_method(method).title} has" if section == "method" else "there is"
    hint = nearest(name, siblings).replace("you mean '", f"you mean '{section}.")
    return f"{of} no setting '{key}'.{hint}"


def _wrong_value(
    parser: ArgumentParser, method: str, settings: Mapping[str, Any], flags: Mapping[str, str], error: Exception
) -> str:
    """Which value was refused and what was expected, found by offering each value alone."""
    annotations = setting_types(method)
    for key, value in (*settings.items(), *flags.items()):
        try:
            parser.parse_args([f"--{key}={value}"]) if key in flags else parser.parse_object(nest({key: value}))
        except Exception as alone:
            if key in str(alone):  # otherwise it is about something else, that is missing
                return f"{key} is '{value}': it must be {_spell(annotations.get(key, str))}"
    return _one_line(error)


def setting_types(method: str) -> dict[str, Any]:
    """The annotation of every setting."""
    inits = [vars(base)["__init__"] for base in reversed(find_method(method).__mro__) if "__init__" in vars(base)]
    sources: list[tuple[str, Any]] = [("benchmark", Cut), *(("method", init) for init in inits), *SECTIONS.items()]
    hints = {f"{section}.{k}": v for section, source in sources for k, v in get_type_hints(source).items()}
    return {**hints, "seed": int, "studies": list[StudyName]}


def _spell(annotation: Any) -> str:
    """A type in words: 'a whole number', "'sgd' or 'adamw'"."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in words:
        return words[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"'{value}'" for value in arguments)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_spell(argument) for argument in arguments)
    if get_origin(annotation) in (list, tuple):
        kind = _spell(arguments[0]) if arguments else "values"
        return f"a list, each {kind}"
    return str(annotation)


def documented(section: type) -> dict[str, str]:
    """What the docstring says of each setting: the text under `Args:`."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc((section.__doc__ or "").partition("Args:\n")[2]).splitlines():
        if line[:1].strip():  # not indented: the next setting
            name, _, text = line.partition(": ")
            found[name] = text
        elif line.strip() and name:
            found[name] += " " + line.strip()
    return found


def explain(config: Config) -> list[tuple[str, str, str]]:
    """Every setting's name, default and meaning."""
    method = find_method(str(config.method["name"]))
    bases = [("method", base) for base in reversed(method.__mro__)]
    sources: list[tuple[str, type]] = [("benchmark", Cut), *bases, *SECTIONS.items()]
    values = flatten(dataclasses.asdict(config))
    names = ["seed", *(key for key in valid_settings(str(config.method["name"])) if not key.endswith(".name"))]
    meanings = {f"{section}.{k}": v for section, source in sources for k, v in documented(source).items()}
    meanings["seed"] = "of everything random; the class order has its own, benchmark.seed"
    meanings["studies"] = (
        f"what is observed beside the measures, any of {', '.join(get_args(StudyName))}; feeds nothing back"
    )
    return [(name, _as_typed(values.get(name)), meanings.get(name, "")) for name in dict.fromkeys(names)]


def _as_typed(value: Any) -> str:
    """A value as one would type it: null, true, [2,1,2]."""
    return value if isinstance(value, str) else json.dumps(_plain(value))


def method_label(method: Mapping[str, Any]) -> str:
    """'BaCE (alpha=2.0)': the method's title and the hyper-parameters that are not at their default."""
    found = find_method(str(method["name"]))
    defaults = {name: p.default for name, p in found.hyper_parameters().items()}
    changed = [f"{k}={v}" for k, v in method.items() if k != "name" and _plain(v) != _plain(defaults[k])]
    return found.title + (f" ({', '.join(changed)})" if changed else "")
