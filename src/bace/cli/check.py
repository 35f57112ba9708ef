"""Check which public sets are here and complete, or describe a backbone."""

from pathlib import Path

from bace.cli.console import in_words, print_json, print_rows
from bace.errors import ConfigError


def check_data(name: str | None = None, *, path: Path | None = None, json: bool = False) -> None:
    """Say for each public set whether it is here and complete, and if not how to get it.

    Args:
        name: a set or a benchmark. With a name, the exit status is 2 if a set is missing or if its numbers of examples
            differ from the published ones.
        path: a folder that holds a folder for each set. The folder that the environment variable BACE_DATA names is
            searched, too.
        json: print JSON, for programs.
    """
    from bace.data.check import check, raise_problems, sets_of

    if path and not path.is_dir():
        raise ConfigError(f"--path '{path}' is not a folder: name the folder that holds a folder for each set")
    findings = [check(corpus, modality, str(path) if path else None) for corpus, modality in sets_of(name)]
    header = ["set", "status", "classes", "train", "test", "where, or how to get it"]
    rows = [[found.corpus.folder, found.status, *found.numbers(), found.remark] for found in findings]
    if json:
        print_json([dict(zip(("name", *header[1:5], "remark"), row, strict=True)) for row in rows])
    elif rows:
        print_rows(header, rows)
    else:
        print(f"'{name}' needs no public set")
    if name:
        raise_problems(findings, name)


def check_backbone(name: str, *, json: bool = False) -> None:
    """Load a backbone and print its width, parameters, input and licence.

    Args:
        name: one of `bace list backbones`, a folder, a weights file or a hub id.
        json: print JSON, for programs.
    """
    from bace.models.loading import describe_backbone

    about = describe_backbone(name)
    if json:
        print_json(about)
    else:
        print_rows(["backbone", name], [[key, in_words(value)] for key, value in about.items()])


COMMANDS = {"data": check_data, "backbone": check_backbone}
