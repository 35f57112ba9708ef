"""bace demo"""

from bace.cli import compare
from bace.cli.options import refuse, split_options


def command(words: list[str]) -> None:
    options, flags = split_options(words, {"--out": 1})
    refuse(flags, ["--out"])
    out = options.get("--out", ["demo"])[0]
    compare.command(["--benchmark", "digits", "--method", "SEQ", "ER", "BaCE", "MTL", "--seeds", "3", "--out", out])
