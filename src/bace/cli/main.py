"""The command line. Each command is a file beside this one. The annotations and the docstring of its function `command`
(or of its several `COMMANDS`) define its options and its help. Only the command that is used imports what it needs."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version

from jsonargparse import set_parsing_settings

from bace.config.parser import Parser
from bace.errors import BaceError, ConfigError, Stopped, kept_traceback, one_line, printable
from bace.progress import launched, tell

BENCHMARKING = ("demo", "run", "compare", "tune", "report", "paper", "list", "check")
NAMES = (*BENCHMARKING, "learn", "forget", "predict", "inspect", "export", "serve")
ABOUT = "Class-incremental learning with pre-trained transformers."
MORE = "`bace run --method NAME --help` explains all settings, with the defaults of that method."


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *rest: tell(f"bace: warning: {printable(str(text))}")
        return answer(words)


def answer(words: list[str]) -> int:
    """Run the command. The exit status is 2 for errors that the user can correct."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        obey(words or ["--help"])
    except SystemExit as end:  # a page was printed
        return int(end.code or 0)
    except Stopped as stopped:
        if not stopped.said:
            print(f"bace: {printable(str(stopped))}", file=sys.stderr)
        return 128 + stopped.signal
    except BaceError as error:
        if not error.said:
            print(f"bace: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except Exception as error:
        if getattr(error, "said", False):
            return 1
        print(f"bace: unexpected error: {printable(one_line(error))}. {kept_traceback()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        how = "`bace run --resume DIR` continues a run; for everything else, give the same command again"
        tell(f"bace: stopped; {how}")
        return 130
    return 0


def obey(words: list[str]) -> None:
    # the namespace holds only what was typed, so the defaults of the function apply
    parsed = make_parser(words).parse_args(words, defaults=False)
    if launched() and parsed.command != "run":
        raise ConfigError(f"torchrun starts one run in several processes: it takes `bace run`, not {parsed.command}")
    module, given = importlib.import_module(f"bace.cli.{parsed.command}"), parsed[parsed.command]
    if hasattr(module, "COMMANDS"):
        module.COMMANDS[given.command](**given[given.command].as_dict())
    else:
        module.command(**given.as_dict())


def make_parser(words: Sequence[str]) -> Parser:
    """A parser of all commands. Only the first word's command has its options; for a completion script, all have."""
    set_parsing_settings(add_print_completion_argument=True)
    parser = Parser(prog="bace", description=ABOUT, epilog=MORE)
    parser.add_argument("--version", action="version", version=version("bace-cil"), help="print the version")
    modules = {name: importlib.import_module(f"bace.cli.{name}") for name in NAMES}
    parser.add_commands({name: getattr(module, "command", module) for name, module in modules.items()})
    for name in NAMES if words[0] == "--print_completion" else {words[0]} & modules.keys():
        module, command = modules[name], parser.commands[name]
        if hasattr(module, "COMMANDS"):
            command.description = module.__doc__
            command.add_commands(module.COMMANDS)
            for inner, function in module.COMMANDS.items():
                command.commands[inner].add_function(function)
        else:
            command.add_function(module.command)
        if hasattr(module, "prepare"):
            module.prepare(command, words[1:])
    return parser
