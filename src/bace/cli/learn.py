"""bace learn"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bace.errors import ConfigError, DataError
from bace.progress import tell

if TYPE_CHECKING:
    from bace.data.modality import Table
    from bace.learner import Learner

COLUMNS = {"benchmark.input_column": "--column", "benchmark.label_column": "--label_column"}  # settings and options


def command(
    model: Path,
    data: str,
    *,
    new: bool = False,
    method: str | None = None,
    backbone: str | None = None,
    memory: int | None = None,
    config: Path | None = None,
    column: str | None = None,
    label_column: str | None = None,
    trust: bool = False,
) -> None:
    """Teach a model the classes of your data.

    The old data are not needed again. MODEL changes only when everything is learned. If the command is killed before
    that, MODEL stays as it was.

    Args:
        model: the folder of a saved learner; with --new, the folder to create.
        data: labelled data: class folders, a CSV, JSONL, Parquet or CoNLL file, a folder with train.csv, or a hub id.
        new: begin a model with these data. The options up to --config belong to --new, and later calls keep them and
            the names of the columns.
        method: a name of `bace list methods`; the default is one that suits the data (docs/learner.md).
        backbone: a name of `bace list backbones`, a folder, a weights file or a hub id.
        memory: the number of examples that the model keeps.
        config: a YAML file with further settings.
        column: the column of a table that holds the examples.
        label_column: the column of a table that holds the labels.
        trust: allow a method of your own that MODEL or the file names to be imported, which runs its code.
    """
    from bace.cli.settings import from_file, import_typed
    from bace.learner import Learner

    typed = {"method.name": method, "backbone.name": backbone, "memory.size": memory}
    given: dict[str, Any] = {key: value for key, value in typed.items() if value is not None}
    named = {setting: name for setting, name in zip(COLUMNS, (column, label_column), strict=True) if name is not None}
    if new:
        check_free(model)
        if method:
            import_typed(method)
        learner = Learner(**{**from_file(config, trust=trust), **given, **named})
    elif given or config:
        raise ConfigError("--method, --backbone, --memory and --config are settings of a new model: add --new")
    elif not model.exists():
        raise ConfigError(f"there is no model '{model}': add --new to begin one")
    else:
        learner = Learner.load(model, trust=trust)
    table = labelled_data(data, learner, named)
    tell(f"learning {len(table)} {table.modality.plural} of {', '.join(table.names)}")
    learner.partial_fit(table)
    if new and "method" in learner.history_[0]:
        tell(f"the method is {learner.history_[0]['method']}")
    call = learner.history_[-1]
    shares = [(call["new"], "new examples"), (call["old"], "old examples in memory")]
    known = " and ".join(f"{share:.0%} of the {what}" for share, what in shares if share is not None)
    if known:
        tell(f"it recognises {known}")
    learner.save(model)
    print(f"{model} knows {len(learner.classes_)} classes: {', '.join(map(str, learner.classes_))}")


def labelled_data(data: str, learner: "Learner", named: dict[str, str]) -> "Table":
    """The data as the learner reads it. The columns are those that were named now or with --new."""
    from bace.config.parse import flatten
    from bace.data.table import read

    inputs, labels = ((flatten(learner.get_params()) | named).get(setting) for setting in COLUMNS)
    kind: dict[str, Any] = {"modality": learner.modality, "image_size": learner.picture}
    try:
        return read(data, input_column=inputs, label_column=labels, **kind).present()
    except DataError as error:
        settings = "|".join(map(re.escape, COLUMNS))
        raise DataError(re.sub(settings, lambda setting: COLUMNS[setting[0]], str(error))) from error


def check_free(model: Path) -> None:
    if (model.is_dir() and any(model.iterdir())) or model.is_file():
        raise ConfigError(f"'{model}' exists already: leave out --new to teach it, or choose another folder")
