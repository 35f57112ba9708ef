"""A search for hyper-parameters that never sees the data of the evaluation. It uses only training examples of the first
tasks, and holds some of them out. Test splits and later tasks are not part of a trial's stream, and their pictures are
never opened."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from bace.config.parse import as_yaml, config_from, flatten, unknown_setting
from bace.config.schema import Config
from bace.core.method import Method
from bace.core.metrics import summary
from bace.core.resources import check_resources
from bace.core.trainer import Trainer
from bace.data.benchmarks import TaskTables, first_of_table, split_off
from bace.data.settings import data_settings
from bace.errors import BaceError, ConfigError, Stopped
from bace.experiments.assemble import assemble
from bace.experiments.run import stop_signals
from bace.experiments.run_folder import locked
from bace.files import write_whole
from bace.methods import find_method
from bace.models.frozen_prefix import PrefixCaches
from bace.progress import board
from bace.randomness import derive, generator

if TYPE_CHECKING:
    import optuna

SEARCHED = ("train.lr", "train.epochs")  # searched by default, together with the method's own
STUDY, BEST = "study.db", "best.yaml"
Space = dict[str, "optuna.distributions.BaseDistribution"]


@dataclass(frozen=True)
class Search:
    """The settings to search, and the data on which a trial is scored."""

    given: Mapping[str, Any]  # the settings of every trial, by their full names
    wanted: Sequence[str] = ()  # names or name=range; default: all that have a range
    first_tasks: int = 2
    held_out: float = 0.2

    def config(self, values: Mapping[str, Any]) -> Config:
        return config_from({**self.given, **values})

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)


@dataclass(frozen=True)
class Found:
    """The best trial."""

    score: float  # A_avg over the first tasks, on held-out training examples
    trials: int
    values: dict[str, Any]
    file: Path  # the settings of a whole run with these values


def tune(search: Search, out: Path, trials: int) -> Found:
    """Run trials until there are `trials`, and save the best. The same call continues a study."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("bace tune needs Optuna: pip install 'bace-cil[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, caches = space_of(search), PrefixCaches()
    first = trainer_of(search, {}, caches).config  # refuses settings that are wrong for all trials
    with locked(out):
        study = _study(search, out)
        left = trials - len(_over(study))
        with board(trials) as shown, stop_signals() as stopping:
            for trial in _over(study):
                shown.end(f"trial {trial.number}", _said(trial))
            if not study.trials:
                study.enqueue_trial({name: flatten(dataclasses.asdict(first))[name] for name in space})
            for _ in range(left):
                trial = study.ask(space)
                shown.begin(name := f"trial {trial.number}")
                _try(study, trial, search, caches, functools.partial(shown.update, name), stopping)
                shown.end(name, _said(study.trials[trial.number]))
        if not study.best_trials:
            raise ConfigError(f"no trial could be finished: {_said(study.trials[-1])}")
        best = study.best_trial
        about = f"# A_avg {best.value:.2f} over the first {search.first_tasks} tasks, on held-out training examples\n"
        write_whole(out / BEST, about + as_yaml(search.config(best.params)))
        return Found(float(best.value or 0), len(_over(study)), best.params, out / BEST)


def _study(search: Search, out: Path) -> "optuna.Study":
    """The study in the folder. Trials that were cut off (they are still marked as running) are repeated."""
    import optuna
    from optuna.trial import TrialState

    storage = f"sqlite:///{out.absolute() / STUDY}"
    study = optuna.create_study(storage=storage, study_name="bace", direction="maximize", load_if_exists=True)
    if study.user_attrs.get("search", search.as_json()) != search.as_json():
        raise ConfigError(f"'{out}' holds a study with other settings: choose another --out")
    study.set_user_attr("search", search.as_json())
    seed = derive(search.config({}).seed, "tune", len(study.trials))  # of the trials that follow: they are new ones
    study.sampler = optuna.samplers.TPESampler(seed=seed % 2**32)
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _over(study: "optuna.Study") -> list["optuna.trial.FrozenTrial"]:
    from optuna.trial import TrialState

    return list(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))


def _said(trial: "optuna.trial.FrozenTrial") -> str:
    told = ", ".join(f"{name.removeprefix('method.')} {_short(value)}" for name, value in trial.params.items())
    refused = trial.user_attrs.get("refused")
    scored = f"A_avg {trial.value:.2f}" if trial.value is not None else "stopped early"
    return f"{f'not possible: {refused}' if refused else scored} ({told})"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _try(
    study: "optuna.Study",
    trial: "optuna.Trial",
    search: Search,
    caches: PrefixCaches,
    show: Any,
    stopping: Any,
) -> None:
    """Run one trial. Values that are incompatible, or with which training fails, end only this trial."""
    import optuna
    from optuna.trial import TrialState

    try:
        trainer = trainer_of(search, trial.params, caches, show=show, stopping=stopping, log=_judge(trial))
        found = summary(trainer.run().matrix)["A_avg"]
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except Stopped:
        raise
    except BaceError as error:
        trial.set_user_attr("refused", str(error))
        study.tell(trial, state=TrialState.PRUNED)
    else:
        trial.set_user_attr("licences", trainer.stream.licences)
        study.tell(trial, found)


def _judge(trial: "optuna.Trial") -> Any:
    """Receives the events of a trial's run, and ends it after a task if it is worse than most."""
    import optuna

    averages: list[float] = []

    def log(event: dict[str, Any]) -> None:
        if event["event"] == "task":
            averages.append(event["A"])
            trial.report(sum(averages) / len(averages), step=len(averages))
            if trial.should_prune():
                raise optuna.TrialPruned

    return log


def trainer_of(search: Search, values: Mapping[str, Any], caches: PrefixCaches, **callbacks: Any) -> Trainer:
    """A run with these values on the data that a search may see."""
    config = search.config({**values, "measure.fwt": False})
    method, stream = assemble(config, caches, functools.partial(visible, search, config))
    check_resources(method, range(len(stream)))
    return Trainer(method, stream, config, **callbacks)


def visible(search: Search, config: Config, parts: list[TaskTables]) -> list[TaskTables]:
    """The part of a benchmark that a search may see: the training examples of its first tasks, some as test data."""
    if not 1 <= search.first_tasks <= len(parts):
        raise ConfigError(f"--first_tasks is {search.first_tasks}: the benchmark has 1 to {len(parts)}")
    if not 0 < search.held_out < 1:
        raise ConfigError(f"--held_out is {search.held_out}: it must lie between 0 and 1")
    shown = []
    for t, part in enumerate(parts[: search.first_tasks]):
        table = first_of_table(part.train, data_settings(config).train_per_task)
        train, held = split_off(table, search.held_out, generator(config.seed, "held out by tune", t))
        shown.append(dataclasses.replace(part, train=train, test=held))
    return shown


# -- the space


def space_of(search: Search) -> Space:
    """The range of each searched setting: the named ones, or all hyper-parameters of the method that have a range
    (`range_around`), with the learning rate and the number of epochs."""
    config = search.config({})
    values = flatten(dataclasses.asdict(config))
    method = find_method(str(config.method["name"]))
    own = [f"method.{name}" for name in method.hyper_parameters()]
    if not search.wanted:
        around = {name: range_around(values[name], annotation(method, name)) for name in (*SEARCHED, *own)}
        return {name: found for name, found in around.items() if found is not None}
    space: Space = {}
    for word in search.wanted:
        short, _, between = word.partition("=")
        name = f"method.{short}" if f"method.{short}" in own else short
        if name not in values:
            raise ConfigError(unknown_setting(name, method))
        found = typed_range(word, between) if between else range_around(values[name], annotation(method, name))
        if found is None:
            raise ConfigError(f"there is no range around {name} {values[name]}: write {short}=LOW:HIGH or {short}=A,B")
        space[name] = found
    return space


def annotation(method: type[Method], name: str) -> Any:
    """The type of a setting, if it is a parameter of the method's constructor."""
    for base in method.__mro__:
        hints = get_type_hints(base.__init__) if "__init__" in vars(base) and issubclass(base, Method) else {}
        if name.removeprefix("method.") in hints and name.startswith("method."):
            return hints[name.removeprefix("method.")]
    return None


def range_around(value: object, kind: Any) -> "optuna.distributions.BaseDistribution | None":
    """The range around a value: every choice of an annotation; for numbers a factor of ten (four for integers) in both
    directions, on a logarithmic scale. A number up to 1 stays at most 1, because it may be a share. None, the integer 0
    (which switches something off), texts and lists are not searched."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if get_origin(kind) is Literal:
        return CategoricalDistribution(get_args(kind))
    if isinstance(value, bool):
        return CategoricalDistribution((False, True))
    if isinstance(value, int) and value > 0:
        return IntDistribution(max(1, value // 4), 4 * value, log=True)
    if isinstance(value, float) and value > 0:
        return FloatDistribution(value / 10, min(10 * value, 1.0) if value <= 1 else 10 * value, log=True)
    if isinstance(value, float) and value == 0:
        return FloatDistribution(0.0, 1.0)
    return None


def typed_range(word: str, between: str) -> "optuna.distributions.BaseDistribution":
    """LOW:HIGH, logarithmic where both are positive, or A,B,C."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, colon, high = between.partition(":")
    if not colon:
        return CategoricalDistribution([yaml.safe_load(choice) for choice in between.split(",")])
    try:
        ends = [int(end) if end.strip().isdigit() else float(end) for end in (low, high)]
        if all(isinstance(end, int) for end in ends):
            return IntDistribution(int(ends[0]), int(ends[1]), log=ends[0] > 0)
        return FloatDistribution(*ends, log=ends[0] > 0)
    except ValueError as error:
        raise ConfigError(f"'{word}' is not of the form name=LOW:HIGH or name=A,B") from error
