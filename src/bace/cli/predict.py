"""bace predict: predict files with the model of a run, of a comparison or of a saved learner."""

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bace.cli.console import in_line

if TYPE_CHECKING:
    from bace.learner import Learner

AT_ONCE = 1024  # examples that are read, predicted and printed together


def command(
    model: Path,
    files: list[Path],
    *,
    column: str | None = None,
    reject: float | None = None,
    json: bool = False,
    trust: bool = False,
    force: bool = False,
) -> None:
    """Predict with a model that has been learned.

    The command prints a line for each example, with its place and its class or its entities. Examples are pictures,
    lines of text, sentences of CoNLL files, and rows of CSV, JSONL and Parquet files. Labels are ignored.

    Args:
        model: the folder of a run, of a comparison (its best run is used), or of a saved Learner.
        files: at least one file or folder. `-` reads texts, or the names of pictures, line by line from standard input.
        column: the column of a table that holds the examples. The default is the column that was learned from.
        reject: for pictures and texts, a probability between 0 and 1. An example whose highest probability is lower
            gets the class "unknown".
        json: print a JSON object per line; for entities it has words, tags and positions.
        trust: allow a method of your own that MODEL names to be imported, which runs its code.
        force: predict even if run.json was changed after the run.
    """
    from bace.learner.opening import open_model

    for row in predict_files(open_model(model, trust=trust, force=force), files, column, reject):
        print(dumps(row) if json else "\t".join(map(in_line, row.values())))


def predict_files(
    learner: "Learner", files: list[Path], column: str | None = None, reject: float | None = None
) -> Iterator[dict[str, Any]]:
    """A row per example, with its place in the files."""
    from bace.data.modalities import find_modality
    from bace.data.table import unlabelled

    modality = find_modality(str(learner.modality))
    learned = learner.config.benchmark if learner.config else {}
    inputs: Any = column or learned.get("input_column")
    label: Any = learned.get("label_column")
    found = [example for file in files for example in unlabelled(file, modality, inputs, label)]
    for start in range(0, len(found), AT_ONCE):
        part = found[start : start + AT_ONCE]
        for (where, _), row in zip(part, learner.describe([example for _, example in part], reject), strict=True):
            yield {"where": where, **row}
