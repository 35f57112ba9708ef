"""jsonargparse's parser, with commands made from typed functions and with errors in our words."""

import inspect
import re
import types
from argparse import SUPPRESS, Action
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from bace.errors import ConfigError, closest_name

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class Formatter(DefaultHelpFormatter):
    def _expand_help(self, action: Action) -> str:
        return super()._expand_help(action).replace("<class 'Path'>", "Path")


class Parser(ArgumentParser):
    """A parser whose errors name the thing, the value and what to do."""

    short: Mapping[str, str] = {}  # options that stand for longer ones: {"--memory": "--memory.size"}
    refuse: Callable[[str], str] | None = None  # the hint for an option that does not exist
    words: Sequence[str] = ()  # what was typed

    def __init__(self, **options: Any) -> None:
        super().__init__(print_config=None, allow_abbrev=False, formatter_class=Formatter, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own does not know -1e-3
        self.commands: dict[str, Parser] = {}

    def add_commands(self, documented: Mapping[str, object]) -> None:
        """Commands by name, each with the first sentence of its help. `add_function` fills them."""
        subcommands = self.add_subcommands(dest="command")
        for name, source in documented.items():
            self.commands[name] = command = Parser()
            summary = docstring_parser.parse(source.__doc__ or "").short_description
            subcommands.add_subcommand(name, command, help=summary)
            command.prog = f"{self.prog} {name}"

    def add_function(self, function: Callable[..., None]) -> None:
        """Make a command's options and help from a function's annotations and docstring. Parameters before `*` are
        positional words, and the others are options. A `bool` is an option without a value, a `list` takes all words
        that follow, and a word with a default may be left out. jsonargparse does the rest."""
        about = docstring_parser.parse(function.__doc__ or "")
        self.description = about.description
        hints = get_type_hints(function)
        meanings = {parameter.arg_name: parameter.description for parameter in about.params}
        special: dict[str, dict[str, Any]] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            several = next((kind for kind in (hints[name], *get_args(hints[name])) if get_origin(kind) is list), None)
            if hints[name] is bool:
                special[f"--{name}"] = {"action": "store_true", "default": SUPPRESS}
            elif several:
                special[name if positional else f"--{name}"] = {"type": get_args(several)[0], "nargs": "+"}
            elif positional and parameter.default is not parameter.empty:
                special[name] = {"type": hints[name], "nargs": "?"}
        skipped = {name.lstrip("-") for name in special}
        self.add_function_arguments(function, as_group=False, as_positional=True, skip=skipped)  # type: ignore[arg-type]
        for name, options in special.items():
            self.add_argument(name, help=meanings[name.lstrip("-")], **options)

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Namespace:  # type: ignore[override]
        split = [word.partition("=") for word in args or ()]
        self.words = [self.short.get(name, name) + equals + value for name, equals, value in split]
        if empty := next((name for name, equals, value in split if name.startswith("--") and equals and not value), ""):
            raise ConfigError(f"{empty} needs a value")
        return super().parse_args(self.words, *rest, **options)

    # -- errors

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(self._in_words(message)) from ex

    def _in_words(self, message: str) -> str:
        """The message of jsonargparse or argparse in our words. One that we do not know becomes a single line."""
        if found := re.match(r"argument (\S+): expected (?:at least )?one argument", message):
            return f"{found[1]} needs a value"
        if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
            return self._unexpected(found[1])
        if found := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from", message, re.DOTALL):
            if found[1] == "command":
                return f"there is no command '{self.prog} {found[2]}'.{closest_name(found[2], self.commands)}"
            return f"{found[1]} is '{found[2]}': to complete words in your shell, first `pip install shtab`"
        if found := re.match(r'(?:the following arguments are required: |expected ")([\w.]+)', message):
            return self._missing(found[1])
        if found := re.match(r'Parser key "([^"]+)"', message):
            return self._wrong(found[1], message)
        return " ".join(line.strip() for line in message.splitlines() if line.strip())

    def _unexpected(self, left: str) -> str:
        """The error for words that no option or place takes. It is about the first of them."""
        place = next((i for i, word in enumerate(self.words) if word and left.startswith(word)), 0)
        word = self.words[place]
        if word.startswith("-"):
            option = word.partition("=")[0]
            if self.refuse:
                return self.refuse(option)
            return f"there is no option '{option}' here.{closest_name(option, self._option_string_actions)}"
        behind = f"behind '{' '.join(self.words[max(place - 2, 0) : place])}'" if place else "here"
        return f"'{word}' is not expected {behind}: `{self.prog} --help` says what is; a list is one word, '[2,1,2]'"

    def _missing(self, key: str) -> str:
        command, dot, rest = key.partition(".")
        if dot:
            return self.commands[command]._missing(rest)
        if command == "command":
            return f"{self.prog} needs a command: {', '.join(self.commands)}"
        return f"{self.prog} needs {command.upper()}: {self._action(command).help}"

    def _wrong(self, key: str, message: str) -> str:
        """The error for a value that was refused, with the kind of value that was expected."""
        action = self._action(key)
        name = action.option_strings[0] if self.words and action.option_strings else key
        kind = action._typehint
        if action.nargs == "+" and get_origin(kind) is Union:  # a word, or a list in one word
            kind = get_args(kind)[0]
        value = re.split(r"(?:Got|Given) value: ", message)[-1]
        hint = closest_name(value, map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        return f"{name} is '{value}': it must be {spell(kind)}{'.' + hint if 'Did you mean' in hint else ''}"

    def _action(self, key: str) -> Any:
        return next(action for action in self._actions if action.dest == key)


def spell(kind: Any) -> str:
    """A type in words: 'a whole number', "'sgd' or 'adamw'"."""
    if kind in KINDS:
        return KINDS[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(f"'{value}'" for value in arguments)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(spell(argument) for argument in arguments)
    if get_origin(kind) in (list, tuple):
        return f"a list, each {spell(arguments[0]) if arguments else 'of any kind'}"
    return str(kind)
