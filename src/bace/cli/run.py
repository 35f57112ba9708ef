"""bace run"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bace.config.parser import Parser
from bace.errors import ConfigError


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
    """Learn a benchmark with a method: one run.

    --benchmark NAME, --method NAME, --backbone NAME and --memory N are short for --benchmark.name, --method.name,
    --backbone.name and --memory.size. The defaults below are those of this method on this benchmark.

    Args:
        out: the folder that keeps the run.
        resume: the folder of a run that was stopped; it is continued with its own settings.
        config: a YAML file of settings; those of the command line win.
        trust: a method of your own that the file or folder names may be imported, which runs its code.
        force: resume though run.json was changed.
        print_config: print the settings as YAML and run nothing.
    """
    from bace.cli.settings import from_file
    from bace.config.parse import as_yaml, config_from, flatten
    from bace.core.metrics import MEASURES
    from bace.core.resources import in_words as in_bytes
    from bace.experiments.run import run
    from bace.experiments.run_folder import read_description
    from bace.progress import bar

    if resume:
        if settings or config or out:
            raise ConfigError("--resume continues a run with its own settings: give it alone")
        chosen = read_description(resume).settings(trust=trust)
    else:
        chosen = config_from({**from_file(config, trust=trust), **flatten(settings)})
    if print_config:
        print(as_yaml(chosen), end="")
        return
    with bar(f"{chosen.method['name']} on {chosen.benchmark['name']}, seed {chosen.seed}") as show:
        if resume:
            result = run(resume=resume, force=force, show=show, tell=print)
        else:
            result = run(chosen, out=out, show=show, tell=print)
    kept = result.metrics["kept"]
    print(f"networks and memory held: {in_bytes(kept[0])} after task 1, {in_bytes(kept[-1])} after task {len(kept)}")
    numbers = {key: result.metrics[key] for key in (*MEASURES, "seconds")}
    of = "" if result.metrics["score"] == "accuracy" else f"  (of {result.metrics['score']})"
    print("  ".join(f"{key} {'-' if value is None else f'{value:.2f}'}" for key, value in numbers.items()) + of)
    if result.folder:
        print(f"run folder: {result.folder}")


def prepare(parser: Parser, words: Sequence[str]) -> None:
    """Add the settings; for the help with the values that they have now."""
    from bace.cli.settings import from_file, method_asked
    from bace.config.parse import add_settings, config_from, flatten
    from bace.methods import find_method

    add_settings(parser, find_method(method_asked(words)))
    parser.usage = "bace run [--benchmark NAME] [--method NAME] [options] [settings]\n       bace run --resume DIR"
    if {"-h", "--help"} & set(words):
        typed = parser.parse_args([word for word in words if word not in ("-h", "--help")], defaults=False).as_dict()
        file = from_file(typed.get("config"), trust="trust" in typed)
        given = {key: value for key, value in flatten(typed).items() if "." in key or key in ("seed", "studies")}
        parser.set_defaults(flatten(dataclasses.asdict(config_from({**file, **given}))))
