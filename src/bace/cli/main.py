"""The command line: bace demo | run | compare | report | paper | list | check | predict."""

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence

from bace.cli.console import kept_traceback, one_line
from bace.cli.options import HELP
from bace.config.explain import PAGES
from bace.errors import BaceError, ConfigError, Stopped, nearest, printable

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

COMMANDS = ("demo", "run", "compare", "report", "paper", "list", "check", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *rest: print(f"bace: warning: {printable(str(text))}", file=sys.stderr)
        return answer(words)


def answer(words: list[str]) -> int:
    """Run the command; the exit status is 2 for what the user can put right."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    try:
        if not words or words[0] in HELP:
            print(USAGE, end="")
        elif HELP.keys() & set(words) and words[0] in PAGES:
            print(PAGES[words[0]], end="")
        elif words[0] == "--version":
            print(importlib.metadata.version("bace-cil"))
        elif words[0] not in COMMANDS:
            raise ConfigError(f"there is no command '{words[0]}'.{nearest(words[0], COMMANDS)}")
        else:  # what a command needs is imported for it alone: `bace list` does not wait for torch
            importlib.import_module(f"bace.cli.{words[0]}").command(words[1:])
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


if __name__ == "__main__":
    sys.exit(main())
