"""The settings of every benchmark."""

from dataclasses import dataclass

from bace.config.schema import Config


@dataclass
class DataSettings:
    """How a benchmark's data are read and cut into tasks; settings of every benchmark.

    Args:
        path: where the data are: a folder or file (Parquet, image folders, CSV, JSONL, CoNLL), or a hub id; for
            benchmarks of several corpora the folder that holds theirs. The embedded benchmark needs none.
        tasks: number of tasks, with the classes shared out equally; or the number of classes of each task.
        class_order: the order in which the classes arrive: names, `shuffled` (by `seed`), or `numpy` (NumPy's own
            permutation by `seed` of the names sorted as text, as RevisitingCIL has it); default: the source's.
        seed: of a shuffled class order, and of what test_fraction holds out.
        train_per_class: only the first so many training examples of each class, in file order.
        test_per_class: the same for the test.
        train_per_task: only the first so many training examples of each task, in file order.
        test_per_task: the same for the test.
        test_fraction: hold out this share of each class (of the sentences) as the test, for data without a test split.
        val_fraction: share of each class's training examples (of a task's sentences) held out for validation.
        augment: random crops (and flips) in training.
        flip: mirror pictures at random; off for digits and letters.
        image_size: side of the squares as which pictures are kept; default: as they are if all have one size, else 256.
        max_length: longest text in tokens; longer texts are cut, longer sentences are windowed.
        input_column: of a table, if not found by itself.
        label_column: of a table, if not found by itself.
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
    flip: bool = True
    image_size: int | None = None
    max_length: int = 128
    input_column: str | None = None
    label_column: str | None = None


def data_settings(config: Config) -> DataSettings:
    return DataSettings(**{k: v for k, v in config.benchmark.items() if k != "name"})  # type: ignore[arg-type]
