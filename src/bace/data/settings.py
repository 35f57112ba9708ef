"""The settings of every benchmark."""

from dataclasses import dataclass
from typing import Literal

from bace.config.schema import Config


@dataclass
class DataSettings:
    """How a benchmark's data are read and split into tasks. Every benchmark has these settings.

    Args:
        path: a folder or file (Parquet, image folders, CSV, JSONL, CoNLL), or a hub id. A benchmark of several corpora
            takes the folder that holds their folders. The embedded benchmark needs no path.
        tasks: the number of tasks, which share the classes equally, or the number of classes of each task.
        class_order: the order in which the classes arrive: names, `shuffled` (by `seed`), or `numpy` (NumPy's own
            permutation by `seed` of the names sorted as text, as in RevisitingCIL). The default is the source's order.
        seed: the seed of a shuffled class order, and of the examples that test_fraction holds out.
        train_per_class: use only this many training examples of each class, the first in file order.
        test_per_class: use only this many test examples of each class, the first in file order.
        train_per_task: use only this many training examples of each task, the first in file order.
        test_per_task: use only this many test examples of each task, the first in file order.
        test_fraction: hold out this share of each class (for entities, of the sentences) as the test, if there is none.
        val_fraction: hold out this share of each class's training examples (of a task's sentences) for validation.
        augment: crop (and flip) pictures at random in training.
        crop: how random crops are cut: a window at a random place, as large as the clean view (`window`), or a part of
            5 to 100 % of the area, up to a third wider or higher than square (`area`, as in LAMDA-PILOT). With `area`,
            the clean view of pictures of all sizes is the central window of 7/8.
        flip: mirror pictures at random; this is off for digits and letters.
        views: show only this many random views of each picture, so that the output of frozen blocks for them is
            computed once (backbone.cache). 0 means no limit.
        image_size: the side of the squares that pictures are stored as. By default pictures of one size stay as they
            are, and others become squares of 256.
        max_length: the largest number of tokens. Longer texts are truncated, and longer sentences are split.
        input_column: the column of a table that holds the examples, if it is not found automatically.
        label_column: the column of a table that holds the labels, if it is not found automatically.
    """

    path: str | None = None
    tasks: int | list[int] = 5
    class_order: str | list[str] | None = None
    seed: int = 0
    train_per_class: int | None = None
    test_per_class: int | None = None
    train_per_task: int | None = None
    test_per_task: int | None = None
    test_fraction: float = 0.0
    val_fraction: float = 0.0
    augment: bool = True
    crop: Literal["window", "area"] = "window"
    flip: bool = True
    views: int = 0
    image_size: int | None = None
    max_length: int = 128
    input_column: str | None = None
    label_column: str | None = None


def data_settings(config: Config) -> DataSettings:
    return DataSettings(**{k: v for k, v in config.benchmark.items() if k != "name"})  # type: ignore[arg-type]
