"""bace predict: predictions for files, with the model of a finished run."""

from json import dumps
from pathlib import Path
from typing import Any

from bace.cli.console import in_line
from bace.errors import DataError


def command(run: Path, files: list[Path], *, json: bool = False, trust: bool = False, force: bool = False) -> None:
    """Predict with the model of a finished run.

    A line is printed for each picture, or for each line of text files, with its class or its entities.

    Args:
        run: the folder of one run, made by `bace run --out RUN` or in the folder of a comparison.
        files: at least one file: pictures, or texts.
        json: print a JSON object a line; for entities with words, tags and positions.
        trust: a method of your own that RUN names may be imported, which runs its code.
        force: predict though run.json was changed after the run.
    """
    for row in predict_files(run, files, trust=trust, force=force):
        print(dumps(row) if json else "\t".join(map(in_line, row.values())))


def predict_files(folder: Path, files: list[Path], *, trust: bool = False, force: bool = False) -> list[dict[str, Any]]:
    """A row per picture; per line of a text file (a text; or a sentence, whose entities' positions are characters of
    the line)."""
    from bace.data.modalities import find_modality
    from bace.learner import Learner

    learner = Learner.from_run(folder, trust=trust, force=force)
    for file in files:
        if not file.is_file():
            if file.is_dir():
                raise DataError(f"'{file}' is a folder: name the files in it")
            raise DataError(f"there is no file '{file}': check the path")
    found = find_modality(str(learner.modality)).from_files(files)
    described = learner.describe([example for _, example in found]) if found else []
    return [{"where": where, **row} for (where, _), row in zip(found, described, strict=True)]
