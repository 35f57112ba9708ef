"""The command line. A command is a file beside this one: annotations and docstring of its function `command`, or of its
several `COMMANDS`, are its options and its help. Only the command that is asked for imports what it needs."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version

from jsonargparse import set_parsing_settings

from bace.config.parser import Parser
from bace.errors import BaceError, Stopped, kept_traceback, one_line, printable

NAMES = ("demo", "run", "compare", "tune", "report", "paper", "list", "check", "learn", "forget", "predict", "export")
ABOUT = "Class-incremental learning with pre-trained transformers."
MORE = "`bace run --method NAME --help` explains all settings, with the defaults of that method."


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *rest: print(f"bace: warning: {printable(str(text))}", file=sys.stderr)
        return answer(words)


def answer(words: list[str]) -> int:
    """Run the command; the exit status is 2 for what the user can put right."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        obey(words or ["--help"])
    except SystemExit as end:  # a page was printed
        return int(end.code or 0)
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
        how = "a run is continued by `bace run --resume DIR`, everything else by the same command"
        print(f"bace: stopped; {how}", file=sys.stderr)
        return 130
    return 0


def obey(words: list[str]) -> None:
    # what was not typed is not in the namespace: the function's own defaults hold
    parsed = make_parser(words).parse_args(words, defaults=False)
    module, given = importlib.import_module(f"bace.cli.{parsed.command}"), parsed[parsed.command]
    if hasattr(module, "COMMANDS"):
        module.COMMANDS[given.command](**given[given.command].as_dict())
    else:
        module.command(**given.as_dict())


def make_parser(words: Sequence[str]) -> Parser:
    """The commands, of which the first word's (all, if a script of completions is asked for) is ready to parse."""
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
