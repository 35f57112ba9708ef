"""bace check"""

import json
from pathlib import Path

from bace.cli.console import in_words, print_rows
from bace.cli.options import refuse, split_options
from bace.errors import ConfigError, nearest


def command(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0, "--path": 1})
    refuse([word for word in rest if word.startswith("-")], ["--json", "--path"])
    kinds = {"data": check_data, "backbone": check_backbone}
    if not rest or rest[0] not in kinds or len(rest) > 2:
        wrong = f" not '{' '.join(rest)}'.{nearest(rest[0], kinds)}" if rest else ""
        raise ConfigError(f"bace check takes `data [NAME]` or `backbone NAME`{',' if rest else '.'}{wrong}")
    kinds[rest[0]](rest[1] if len(rest) > 1 else None, options)


def check_data(name: str | None, options: dict[str, list[str]]) -> None:
    from bace.data.check import check, complain, sets_of

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
