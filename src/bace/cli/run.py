"""bace run"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bace.config.parser import Parser
from bace.config.schema import Config
from bace.errors import ConfigError
from bace.progress import bar, is_first, launched, tell


def command(
    *,
    out: Path | None = None,
    resume: Path | None = None,
    config: Path | None = None,
    trust: bool = False,
    force: bool = False,
    print_config: bool = False,
    **settings: Any,
) -> None:
    """Run one method on one benchmark.

    --benchmark NAME, --method NAME, --backbone NAME and --memory N are short for --benchmark.name, --method.name,
    --backbone.name and --memory.size. The defaults below apply to this method on this benchmark.

    Args:
        out: the folder that keeps the run, by default runs/BENCHMARK-METHOD-SEED. The same command continues a run that
            was stopped and shows one that is finished.
        resume: the folder of a run that was stopped. The run continues with its own settings.
        config: a YAML file of settings. Settings on the command line override it.
        trust: allow a method of your own that the file or folder names to be imported, which runs its code.
        force: resume even if run.json was changed.
        print_config: print the settings as YAML and run nothing.
    """
    from bace import ranks
    from bace.cli.settings import from_file
    from bace.config.parse import as_yaml, config_from, flatten
    from bace.experiments.compare import default_folder
    from bace.experiments.run_folder import read_description

    if resume:
        if settings or config or out:
            raise ConfigError("--resume continues a run with its own settings: give it alone")
        chosen = read_description(resume).settings(trust=trust)
    else:
        chosen = config_from({**from_file(config, trust=trust), **flatten(settings)})
    if print_config:
        print(as_yaml(chosen), end="")
        return
    folder = resume or out or default_folder(chosen)
    with ranks.joined(chosen.train.device):
        if launched():
            chosen.train.devices = ranks.size()
        begin_or_continue(chosen, folder, resumed=bool(resume), force=force)
    if is_first():
        show_numbers(folder)


def begin_or_continue(chosen: Config, folder: Path, *, resumed: bool, force: bool) -> None:
    """Run in a folder: continue the run in it, show it if it is finished, or begin one."""
    from bace import ranks
    from bace.config.parse import method_label
    from bace.experiments.cells import Cell, is_done
    from bace.experiments.run import run
    from bace.experiments.run_folder import is_begun

    title = f"{method_label(chosen.method)} on {chosen.benchmark['name']}, seed {chosen.seed}"
    state = ""
    if not resumed and is_first() and is_begun(folder):
        state = ", finished before" if is_done(Cell(title, folder, chosen)) else ", continued"
    state, *_ = ranks.texts(state)  # what the first process has found
    unfinished, begun = state != ", finished before", resumed or bool(state)
    if unfinished and chosen.train.devices > 1 and not launched():
        run_in_processes(chosen, folder, force=force, begun=begun)
    tell(f"{title}, kept in {folder}{state}")
    if unfinished:
        with bar(title) as show:
            if begun:
                run(resume=folder, force=force, show=show, tell=tell)
            else:
                run(chosen, out=folder, show=show, tell=tell)


def run_in_processes(config: Config, folder: Path, *, force: bool, begun: bool) -> NoReturn:
    """Begin or continue the run in as many processes as its settings ask for. These processes do the printing."""
    from bace.config.parse import as_yaml
    from bace.experiments.launch import launch

    flags = ["--force"] if force else []
    if "." in str(config.method["name"]):  # a user's own, and imported here already
        flags.append("--trust")
    with tempfile.TemporaryDirectory(prefix="bace-run-") as beside:
        settings = Path(beside) / "run.yaml"
        settings.write_text(as_yaml(config), encoding="utf-8")
        words = ["--resume", str(folder)] if begun else ["--config", str(settings), "--out", str(folder)]
        status = launch(["run", *words, *flags], config.train.devices)
    sys.exit(status)


def show_numbers(folder: Path) -> None:
    """The scores of a finished run, and the memory that it holds."""
    from bace.core.metrics import MEASURES
    from bace.core.resources import in_words as in_bytes
    from bace.experiments.run_folder import load_run

    found = load_run(folder).metrics
    assert found is not None
    if kept := found.kept:
        first, last = in_bytes(kept[0]), in_bytes(kept[-1])
        print(f"networks and memory held: {first} after task 1, {last} after task {len(kept)}")
    numbers = {key: getattr(found, key) for key in (*MEASURES, "seconds")}
    of = "" if found.score == "accuracy" else f"  (of {found.score})"
    print("  ".join(f"{key} {'-' if value is None else f'{value:.2f}'}" for key, value in numbers.items()) + of)
    print(f"run folder: {folder}")


def prepare(parser: Parser, words: Sequence[str]) -> None:
    """Add the settings. The help page shows their current values."""
    from bace.cli.settings import from_file, method_asked
    from bace.config.parse import add_settings, config_from, flatten
    from bace.methods import find_method

    add_settings(parser, find_method(method_asked(words)))
    parser.usage = "bace run [--benchmark NAME] [--method NAME] [options] [settings]\n       bace run --resume DIR"
    if {"-h", "--help"} & set(words):
        typed = parser.parse_args([word for word in words if word not in ("-h", "--help")], defaults=False).as_dict()
        file = from_file(typed.get("config"), trust="trust" in typed)
        given = {key: value for key, value in flatten(typed).items() if "." in key or key in ("seed", "studies", "log")}
        parser.set_defaults(flatten(dataclasses.asdict(config_from({**file, **given}))))
