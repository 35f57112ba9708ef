"""bace run"""

from pathlib import Path
from typing import Any

from bace.cli.console import print_rows
from bace.cli.options import HELP, import_typed, settings_file, split_options
from bace.errors import ConfigError


def command(words: list[str]) -> None:
    known = {"--out": 1, "--resume": 1, "--config": 1, "--trust": 0, "--force": 0, "--print_config": 0, **HELP}
    options, flags = split_options(words, known)
    from bace.config.parse import as_yaml, config_from, flag_values

    given = settings_file(options)
    import_typed(flag_values(flags).get("method.name", ""))
    if HELP.keys() & options.keys():
        return print_settings(given, flags)
    from bace.core.metrics import MEASURES
    from bace.core.resources import in_words as in_bytes
    from bace.experiments.run import read_config, run
    from bace.progress import bar

    if "--resume" in options:
        if flags or "--config" in options or "--out" in options:
            raise ConfigError("--resume continues a run with its own settings: give it alone")
        folder = Path(options["--resume"][0])
        config = read_config(folder, trust="--trust" in options)
    else:
        config = config_from(given, flags)
    if "--print_config" in options:
        print(as_yaml(config), end="")
        return
    title = f"{config.method['name']} on {config.benchmark['name']}, seed {config.seed}"
    with bar(title) as show:
        if "--resume" in options:
            result = run(resume=folder, force="--force" in options, show=show, tell=print)
        else:
            result = run(config, out=options.get("--out", [None])[0], show=show, tell=print)
    kept = result.metrics["kept"]
    print(f"networks and memory held: {in_bytes(kept[0])} after task 1, {in_bytes(kept[-1])} after task {len(kept)}")
    numbers = {key: result.metrics[key] for key in (*MEASURES, "seconds")}
    of = "" if result.metrics["score"] == "accuracy" else f"  (of {result.metrics['score']})"
    print("  ".join(f"{key} {'-' if value is None else f'{value:.2f}'}" for key, value in numbers.items()) + of)
    if result.folder:
        print(f"run folder: {result.folder}")


def print_settings(given: dict[str, Any], flags: list[str]) -> None:
    """Every setting with its value and meaning."""
    from bace.config.parse import config_from, explain

    config = config_from(given, flags)
    print("bace run --benchmark NAME --method NAME [--backbone NAME] [--memory N] [--config FILE.yaml] [settings]")
    print("         [--out DIR: keep the run] [--print_config: show the settings as YAML]")
    print("         [--trust: a method that --config names may be imported, which runs its code]")
    print("bace run --resume DIR [--trust]: continue a run that was stopped, with its own settings")
    print("         [--force: though its run.json was changed]\n")
    print(f"Settings of {config.method['name']} on {config.benchmark['name']}, with the values they have now:\n")
    print_rows(["setting", "value", "meaning"], [[f"--{name}", *rest] for name, *rest in explain(config)])
