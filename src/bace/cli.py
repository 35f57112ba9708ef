"""The command line: bace demo | run | compare | report | paper | list | check | predict."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bace.errors import BaceError, ConfigError, Stopped, nearest, printable
from bace.help import PAGES

USAGE = """\
bace - class-incremental learning with pre-trained transformers

  bace demo [--out DIR]                 four methods on the embedded digits, 3 seeds: a table and a page
  bace run --method M [settings]        one run; --out DIR keeps it, --resume DIR continues it
  bace compare --method M M ... [--seeds N] [settings]
                                        several methods and seeds, one table and page; continues where it stopped
  bace report DIR... [--out FILE]       the table and page of finished runs
  bace paper list|run|show|claims       the paper's tables, figures and claims, with your numbers beside the printed
  bace list methods|benchmarks|backbones [--json]
  bace check data [NAME] [--path DIR] [--json]
                                        which public sets are here and complete, and how to get the others
  bace check backbone NAME [--json]     load a backbone; its width, parameters, input and licence
  bace predict RUN FILES... [--json]    classes of pictures, or of the lines of text files; entities of the lines

  bace --version

Settings: --benchmark NAME --method NAME --backbone NAME --memory N --seed N, --studies probing tracking gallery bias,
and all others by their full name (--method.alpha 2, --train.lr 0.01); --config FILE.yaml reads them from a file,
--print_config shows them all, `bace run --method M --help` explains them. M may be your own class:
--method mypackage.MyMethod. `bace COMMAND --help` explains the other commands.
"""


HELP = {"--help": 0, "-h": 0}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], None]] = {
        "demo": demo,
        "run": run_command,
        "compare": compare,
        "report": report,
        "paper": paper,
        "list": list_command,
        "check": check,
        "predict": predict,
    }
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *rest: print(f"bace: warning: {printable(str(text))}", file=sys.stderr)
        return answer(words, commands)


def answer(words: list[str], commands: dict[str, Callable[[list[str]], None]]) -> int:
    """Run the command; the exit status is 2 for what the user can put right."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    try:
        if not words or words[0] in HELP:
            print(USAGE, end="")
        elif HELP.keys() & set(words) and words[0] in PAGES:
            print(PAGES[words[0]], end="")
        elif words[0] == "--version":
            from bace import __version__

            print(__version__)
        elif words[0] not in commands:
            raise ConfigError(f"there is no command '{words[0]}'.{nearest(words[0], commands)}")
        else:
            commands[words[0]](words[1:])
    except Stopped as stopped:
        print(f"bace: {printable(str(stopped))}", file=sys.stderr)
        return 128 + stopped.signal
    except BaceError as error:
        print(f"bace: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except Exception as error:
        print(f"bace: unexpected error: {printable(one_line(error))}. {kept_traceback()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bace: stopped; a run with --out is continued with --resume", file=sys.stderr)
        return 130
    return 0


# -- commands


def run_command(words: list[str]) -> None:
    known = {"--out": 1, "--resume": 1, "--config": 1, "--trust": 0, "--force": 0, "--print_config": 0, **HELP}
    options, flags = split_options(words, known)
    from bace.settings import as_yaml, config_from, flag_values

    given = settings_file(options)
    import_typed(flag_values(flags).get("method.name", ""))
    if HELP.keys() & options.keys():
        return print_settings(given, flags)
    from bace.metrics import MEASURES
    from bace.progress import bar
    from bace.room import in_words as in_bytes
    from bace.runner import read_config, run

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


def demo(words: list[str]) -> None:
    options, flags = split_options(words, {"--out": 1})
    refuse(flags, ["--out"])
    out = options.get("--out", ["demo"])[0]
    compare(["--benchmark", "digits", "--method", "SEQ", "ER", "BaCE", "MTL", "--seeds", "3", "--out", out])


def compare(words: list[str]) -> None:
    known = {"--out": 1, "--config": 1, "--trust": 0, "--seeds": 1, "--seed": 1, "--method": -1}
    options, flags = split_options(words, known)
    from bace.comparing import folder_name, run_or_continue
    from bace.settings import config_from, flag_values, flatten, method_label

    given = flatten(settings_file(options))
    benchmark = {**given, **flag_values(flags)}.get("benchmark.name", "digits")
    seeds = int_option(options, "--seeds", 1, least=1)
    first = int_option(options, "--seed", given.get("seed", 0))
    out = Path(options.get("--out", ["comparison"])[0])
    if "--method" in options:
        asked = methods_asked(options["--method"], benchmark)
        for name, _ in asked:
            import_typed(name)
    elif own := {key[7:]: value for key, value in given.items() if key.startswith("method.")}:
        asked = [(str(own.pop("name", "bace")), own)]
    else:
        raise ConfigError("bace compare needs --method: names, or `all` for every method that takes these data")
    given = {key: value for key, value in given.items() if not key.startswith("method.")}
    configs = [  # every configuration is checked before the first run starts
        config_from({**given, "method": {"name": name, **changes}, "seed": seed}, flags)
        for seed in range(first, first + seeds)
        for name, changes in asked
    ]
    print(f"{len(asked)} methods x {seeds} seeds on {benchmark}: {out}", file=sys.stderr)
    folders = []
    for config in configs:
        label = method_label(config.method)
        folders.append(run_or_continue(out / f"{folder_name(label)}-seed{config.seed}", label, config))
    show_report(folders, out / "report.html", ranked="all" in options.get("--method", []))


def report(words: list[str]) -> None:
    options, folders = split_options(words, {"--out": 1})
    refuse([word for word in folders if word.startswith("-")], ["--out"])
    if not folders:
        raise ConfigError("bace report needs at least one run folder")
    show_report([Path(folder) for folder in folders], Path(options.get("--out", ["report.html"])[0]))


def paper(words: list[str]) -> None:
    from bace.paper.command import paper_command

    paper_command(words)


def show_report(folders: list[Path], page: Path, *, ranked: bool = False) -> None:
    from rich.console import Console

    from bace.report import load_runs, print_table, summary, write_page
    from bace.runner import changed_files

    runs = load_runs(folders)
    for run in runs:
        if changed := changed_files(run.folder) if run.metrics else ():
            warnings.warn(f"'{run.folder}' is not as its run left it: {', '.join(changed)} changed", stacklevel=2)
    rows = summary(runs)
    if ranked:
        rows.sort(key=lambda row: row.A_last.mean if row.A_last else 0.0, reverse=True)
    print_table(rows, Console(width=None if sys.stdout.isatty() else 120))
    if unfinished := [printable(str(run.folder)) for run in runs if run.metrics is None]:
        print(f"not in the table, because unfinished (bace run --resume DIR): {', '.join(unfinished)}")
    print(f"page: {write_page(runs, page)}")


def list_command(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0})
    refuse([word for word in rest if word.startswith("-")], ["--json"])
    kinds = ("methods", "benchmarks", "backbones")
    if len(rest) != 1 or rest[0] not in kinds:
        wrong = f" not '{' '.join(rest)}'.{nearest(rest[0], kinds)}" if rest else ""
        raise ConfigError(f"bace list takes one of {', '.join(kinds)}{',' if rest else '.'}{wrong}")
    from bace.catalogue import KINDS

    rows = KINDS[rest[0]]()
    if "--json" in options:
        print(json.dumps(rows, indent=2))
    else:
        print_rows(list(rows[0]), [[in_words(value) for value in row.values()] for row in rows])


def check(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0, "--path": 1})
    refuse([word for word in rest if word.startswith("-")], ["--json", "--path"])
    kinds = {"data": check_data, "backbone": check_backbone}
    if not rest or rest[0] not in kinds or len(rest) > 2:
        wrong = f" not '{' '.join(rest)}'.{nearest(rest[0], kinds)}" if rest else ""
        raise ConfigError(f"bace check takes `data [NAME]` or `backbone NAME`{',' if rest else '.'}{wrong}")
    kinds[rest[0]](rest[1] if len(rest) > 1 else None, options)


def check_data(name: str | None, options: dict[str, list[str]]) -> None:
    from bace.data.checking import check, complain, sets_of

    root = options.get("--path", [None])[0]
    if root and not Path(root).is_dir():
        raise ConfigError(f"--path '{root}' is no folder: give the one that holds a folder for each set")
    findings = [check(corpus, modality, root) for corpus, modality in sets_of(name)]
    header = ["set", "status", "classes", "train", "test", "where, or how to get it"]
    rows = [[found.corpus.folder, found.status, *found.numbers(), found.remark] for found in findings]
    if "--json" in options:
        print(json.dumps([dict(zip(("name", *header[1:5], "remark"), row, strict=True)) for row in rows], indent=2))
    elif rows:
        print_rows(header, rows)
    else:
        print(f"'{name}' needs no public set")
    if name:
        complain(findings, name)


def check_backbone(name: str | None, options: dict[str, list[str]]) -> None:
    if name is None or "--path" in options:
        raise ConfigError("bace check backbone takes one name of `bace list backbones`, a folder, a file or a hub id")
    from bace.models.encoders import describe_backbone

    about = describe_backbone(name)
    if "--json" in options:
        print(json.dumps(about, indent=2))
    else:
        print_rows(["backbone", name], [[key, in_words(value)] for key, value in about.items()])


def predict(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0, "--trust": 0, "--force": 0})
    refuse([word for word in rest if word.startswith("-")], ["--json", "--trust", "--force"])
    if len(rest) < 2:
        raise ConfigError("bace predict needs a run folder and at least one file")
    from bace.predicting import predict_files

    trust, force = ("--trust" in options), ("--force" in options)
    rows = predict_files(Path(rest[0]), [Path(file) for file in rest[1:]], trust=trust, force=force)
    for row in rows:
        print(json.dumps(row) if "--json" in options else "\t".join(map(in_line, row.values())))


# -- words of the command line


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def kept_traceback() -> str:
    """Where the traceback of the error being handled was written to."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="bace-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError as error:
        return f"This is a fault of bace; its traceback could not be written ({error.strerror})"
    return f"This is a fault of bace: please report it with {file.name}"


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
    from bace.settings import import_named_method, read_yaml

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


def methods_asked(words: list[str], benchmark: object) -> list[tuple[str, dict[str, Any]]]:
    """`all`, or names with changes: BaCE "BaCE(W0=1, alpha=0)"."""
    from bace.comparing import parse_method
    from bace.data.benchmarks import find_benchmark
    from bace.methods import METHODS

    if words == ["all"]:
        modality = find_benchmark(str(benchmark)).modality
        return [(method.title, {}) for method in METHODS if modality in method.modalities]
    return [parse_method(word) for word in words]


def print_settings(given: dict[str, Any], flags: list[str]) -> None:
    """Every setting with its value and meaning."""
    from bace.settings import config_from, explain

    config = config_from(given, flags)
    print("bace run --benchmark NAME --method NAME [--backbone NAME] [--memory N] [--config FILE.yaml] [settings]")
    print("         [--out DIR: keep the run] [--print_config: show the settings as YAML]")
    print("bace run --resume DIR: continue a run that was stopped, with its own settings\n")
    print(f"Settings of {config.method['name']} on {config.benchmark['name']}, with the values they have now:\n")
    print_rows(["setting", "value", "meaning"], [[f"--{name}", *rest] for name, *rest in explain(config)])


def print_rows(header: list[str], rows: list[list[str]]) -> None:
    """A table as wide as the terminal; names are never shortened, so that they can be copied."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(header[0], no_wrap=True, overflow="ignore", min_width=max(len(row[0]) for row in rows))
    for name in header[1:]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row))  # Text, because a str would be read as markup
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def in_line(value: object) -> str:
    """A value of a prediction: words and tags with spaces, entities as 0-13 person "Angela Merkel"."""
    if not isinstance(value, list):
        return printable(str(value))
    return " ".join(
        printable(item if isinstance(item, str) else f'{item["start"]}-{item["end"]} {item["type"]} "{item["text"]}"')
        for item in value
    )


def in_words(value: object) -> str:
    """A cell: lists and the names of settings with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
