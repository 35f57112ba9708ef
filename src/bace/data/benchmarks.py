"""Benchmarks. Each declares its data, its tasks and its default settings."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bace.data import datasets
from bace.data.datasets import (
    ENTITIES,
    ENTITIES_DESK,
    TOPICS,
    TOPICS_DESK,
    Corpus,
    TaskCorpus,
    check_present,
    locate,
    qualified,
)
from bace.data.digits import load_digits
from bace.data.files import has_split
from bace.data.modalities import find_modality
from bace.data.modality import Table
from bace.data.settings import DataSettings
from bace.data.table import first_of_each, read
from bace.errors import ConfigError, DataError, closest_name
from bace.randomness import generator


@dataclass(frozen=True)
class TaskTables:
    """One task's data before it is numbered. Labels of classes that are not in `classes` are not allowed, except entity
    tags, which become O."""

    name: str
    classes: list[str]
    train: Table
    test: Table


@dataclass(frozen=True)
class Benchmark:
    """A declaration with the text for `bace list benchmarks` and the defaults for `bace run`."""

    name: str
    modality: str
    note: str
    parts: Callable[[DataSettings], list[TaskTables]]
    defaults: dict[str, Any] = field(default_factory=dict)  # by setting: {"memory.size": 20, ...}
    corpora: tuple[Corpus, ...] = ()  # the public sets that it is made of


def shared_out(
    shares: tuple[TaskCorpus, ...], modality: str, *, prefix: bool = True
) -> Callable[[DataSettings], list[TaskTables]]:
    """Several corpora as a stream. They define the tasks, and benchmark.tasks has no effect. With `prefix`, the name of
    the corpus stands before each class, because two corpora may have classes with the same name."""

    def parts(settings: DataSettings) -> list[TaskTables]:
        if settings.class_order is not None:
            raise ConfigError("benchmark.class_order is fixed here: every task is a corpus, or a part of one")
        check_present(shares, settings.path)
        found = []
        for share in shares:
            train, test = read_corpus(share.corpus, modality, settings)
            classes = list(share.classes) or train.names
            if find_modality(modality).one_label:  # all sentences are shown, even those without an entity
                train, test = only(train, classes), only(test, classes)
            if prefix:
                train, test = qualified(share, train), qualified(share, test)
                classes = [f"{share.corpus.folder}.{name}" for name in classes]
            found.append(TaskTables(share.name, classes, train, test))
        return found

    return parts


def one_set(corpus: Corpus) -> Callable[[DataSettings], list[TaskTables]]:
    """A set of pictures, cut into tasks by its classes."""
    return lambda settings: cut_by_class(*read_corpus(corpus, "image", settings, alone=True), settings)


def read_corpus(corpus: Corpus, modality: str, settings: DataSettings, *, alone: bool = False) -> tuple[Table, Table]:
    """The training and test examples of a public set. A warning says if some are missing."""
    source = locate(corpus, settings.path, alone=alone)
    here = isinstance(source, Path)
    held_out = corpus.held_out if corpus.held_out and here and not has_split(source, "test") else 0.0
    options: dict[str, Any] = {
        "input_column": settings.input_column or corpus.columns or None,
        "label_column": settings.label_column or corpus.label,
        "label_names": corpus.names or None,
        "subset": None if here else corpus.subset,
    }
    try:
        train, test = read_both(source, modality, settings, settings.test_fraction or held_out, options)
    except DataError as error:
        if here:
            raise
        raise DataError(f"{error} Or get it from {corpus.terms}; `bace check data` says where to put it.") from error
    whole = (
        settings.train_per_class is settings.test_per_class is settings.train_per_task is settings.test_per_task is None
    )
    if whole and corpus.counts and len(train) + len(test) != corpus.counts.train + corpus.counts.test:
        warnings.warn(
            f"{corpus.folder} has {len(train):,} training and {len(test):,} test examples, but the published set has "
            f"{corpus.counts.train:,} and {corpus.counts.test:,}: the results cannot be compared with published ones",
            stacklevel=2,
        )
    return replace(train, mirror=corpus.mirror), replace(test, mirror=corpus.mirror)


def read_both(
    source: str | Path, modality: str, settings: DataSettings, test_fraction: float, options: dict[str, Any]
) -> tuple[Table, Table]:
    """The training and test tables. The test is a split of the source or is held out. Pictures are not decoded yet."""

    def split(name: str, limit: int | None) -> Table:
        return read(source, split=name, modality=modality, limit_per_class=limit, decode=False, **options)

    if not test_fraction:
        return split("train", settings.train_per_class), split("test", settings.test_per_class)
    train, test = split_off(split("train", None), test_fraction, generator(settings.seed, "test"))
    return first_of_class(train, settings.train_per_class), first_of_class(test, settings.test_per_class)


def cut_by_class(train: Table, test: Table, settings: DataSettings) -> list[TaskTables]:
    """One labelled set as tasks of disjoint classes."""
    if not isinstance(settings.class_order, list):
        check_test_labels(train, test)
    names = order_classes(train.names, settings)
    counts = share_out(len(names), settings.tasks)
    groups = [names[sum(counts[:t]) : sum(counts[: t + 1])] for t in range(len(counts))]
    return [TaskTables(f"task {t + 1}", own, only(train, own), only(test, own)) for t, own in enumerate(groups)]


def check_test_labels(train: Table, test: Table) -> None:
    """A label that only the test has is a misspelling, or cannot be learned."""
    if unknown := [name for name in test.names if name not in train.names]:
        raise DataError(
            f"the test has the label '{unknown[0]}', which no training example has."
            f"{closest_name(unknown[0], train.names)} Correct it, remove it, or list the classes to be learned in "
            "benchmark.class_order."
        )


def order_classes(names: list[str], settings: DataSettings) -> list[str]:
    if settings.class_order is None:
        return names
    if settings.class_order == "shuffled":
        order = torch.randperm(len(names), generator=generator(settings.seed, "class order"))
        return [names[i] for i in order.tolist()]
    if settings.class_order == "numpy":  # folders are numbered in the order of text, where 10 comes before 2
        as_text = sorted(names)
        return [as_text[i] for i in np.random.RandomState(settings.seed).permutation(len(names))]
    wanted = (
        [settings.class_order]
        if isinstance(settings.class_order, str)
        else [str(name) for name in settings.class_order]
    )
    for name in wanted:
        if name not in names:
            raise ConfigError(
                f"benchmark.class_order names a class '{name}' that the data lack.{closest_name(name, names)}"
            )
        if wanted.count(name) > 1:
            raise ConfigError(f"benchmark.class_order names class '{name}' twice: a class belongs to one task")
    return wanted


def share_out(classes: int, tasks: int | list[int]) -> list[int]:
    """The number of classes of each task; the first tasks get the remainder."""
    if isinstance(tasks, list):
        if sum(tasks) > classes or min(tasks, default=0) < 1:
            raise ConfigError(f"benchmark.tasks {tasks} needs {sum(tasks)} classes; the data have {classes}")
        return tasks
    if not 1 <= tasks <= classes:
        raise ConfigError(
            f"benchmark.tasks is {tasks}; with {classes} classes it must lie between 1 and {classes}: "
            f"add --benchmark.tasks {min(classes, 2)}"
        )
    return [classes // tasks + (t < classes % tasks) for t in range(tasks)]


def only(table: Table, classes: list[str]) -> Table:
    """The examples of these classes; sentences that show at least one of these entity types."""
    own = set(classes)
    return table.take([i for i, shown in enumerate(table.shown()) if shown & own])


# -- from parts to a stream


def check_parts(parts: list[TaskTables]) -> None:
    """Check that every class is in one task and has training and test examples, and that labels fit their tasks."""
    owner: dict[str, str] = {}
    for part in parts:
        for name in part.classes:
            if name in owner:
                raise DataError(f"class '{name}' is declared in '{owner[name]}' and in '{part.name}': give it to one")
            owner[name] = part.name
        for split, table in (("training", part.train), ("test", part.test)):
            shown = set().union(*table.shown())
            foreign = sorted(shown - set(part.classes))
            if foreign and table.modality.background is None:
                raise DataError(
                    f"a {split} example of '{part.name}' has the label '{foreign[0]}', which is not a class of "
                    f"the task ({', '.join(part.classes)})"
                )
            if empty := [name for name in part.classes if name not in shown]:
                raise DataError(f"class '{empty[0]}' of '{part.name}' has no {split} example: add some or drop it")


# -- the declarations


def _digits(settings: DataSettings) -> list[TaskTables]:
    train, test = load_digits()
    return cut_by_class(
        first_of_class(train, settings.train_per_class), first_of_class(test, settings.test_per_class), settings
    )


def own_data(modality: str) -> Callable[[DataSettings], list[TaskTables]]:
    """A user's own data, cut into tasks by its classes."""

    def parts(settings: DataSettings) -> list[TaskTables]:
        if not settings.path:
            raise ConfigError("this benchmark reads your own data: say where it is with --benchmark.path")
        source = Path(settings.path) if Path(settings.path).exists() else settings.path
        columns = {"input_column": settings.input_column, "label_column": settings.label_column}
        return cut_by_class(*read_both(source, modality, settings, settings.test_fraction, columns), settings)

    return parts


def hold_out(
    ids: Tensor,  # (examples,)
    classes: Tensor,  # (examples,)
    fraction: float,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Training and validation ids: a share of each class's examples is held out, never all of them."""
    if not 0 <= fraction < 1:
        raise ConfigError(f"benchmark.val_fraction is {fraction}: it must be at least 0 and less than 1")
    held = torch.zeros(len(ids), dtype=torch.bool)
    for c in torch.unique(classes).tolist() if fraction else ():
        own = torch.nonzero(classes == c).flatten()
        count = min(round(fraction * len(own)), len(own) - 1)
        held[own[torch.randperm(len(own), generator=rng)[:count]]] = True
    return ids[~held], ids[held]


def split_off(table: Table, fraction: float, rng: torch.Generator) -> tuple[Table, Table]:
    """Split a table without a test split into training and test."""
    names = {str(label): c for c, label in enumerate(dict.fromkeys(map(str, table.labels)))}
    one = table.modality.one_label  # sentences show several classes, so they are held out as if they had one class
    classes = torch.tensor([names[str(label)] if one else 0 for label in table.labels])
    train, test = hold_out(torch.arange(len(table)), classes, fraction, rng)
    return table.take(train.tolist()), table.take(test.tolist())


def first_of_table(table: Table, limit: int | None) -> Table:
    return table if limit is None or limit >= len(table) else table.take(range(limit))


def first_of_class(table: Table, limit: int | None) -> Table:
    """The first `limit` examples of each class; for sentences, as many of each type as `read` takes."""
    return table if limit is None else table.take(first_of_each(table.shown(), limit))


_TEXT = {
    "backbone.name": "bert-base-cased",
    "train.optimiser": "adamw",
    "train.lr": 3e-5,
    "train.head_lr": 1e-3,
    "train.batch_size": 16,
    "train.epochs": 3,
    "memory.size": 100,
}

_ENTITIES = {**_TEXT, "train.epochs": 5, "benchmark.max_length": 256}
_DESK = {  # small enough for two cores: trains the upper blocks of MiniLM, in batches of similar lengths
    "backbone.name": "minilm",
    "backbone.cache": 1000,
    "backbone.pooling": "class",  # as the results in docs/results.md were measured
    "train.lr": 1e-4,
    "train.bucketing": True,
}

_VIT = {"backbone.name": "vit-b16", "memory.size": 500}
_ADAPTERS = {  # as in ROW
    "backbone.name": "deit-small-611",
    "backbone.adapter": 128,
    "memory.size": 2000,
    "train.batch_size": 64,
    "train.lr": 0.005,
    "train.epochs": 15,
}
_HARD = {
    "backbone.name": "vit-b16-in21k",
    "memory.per_class": 5,
    "benchmark.tasks": 10,
    "benchmark.class_order": "numpy",
    "benchmark.seed": 1993,
}
_PICTURES_DESK = {  # on two cores, a run of 20 tasks takes minutes; joint training at every task takes half an hour
    "backbone.name": "vit-tiny",
    "backbone.image_size": 64,
    "benchmark.train_per_class": 25,
    "benchmark.test_per_class": 10,
    "train.batch_size": 32,
    "train.lr": 0.005,
    "train.epochs": 3,
}
_HARD_DESK = {"benchmark.image_size": 128, "benchmark.train_per_class": 20, "benchmark.test_per_class": 10}


def _pictures(
    name: str, note: str, corpora: tuple[Corpus, ...], defaults: dict[str, Any], desk: dict[str, Any]
) -> tuple[Benchmark, Benchmark]:
    """A benchmark of pictures and its desk version, which differs in numbers only. Each of several sets is a task."""
    alone = len(corpora) == 1
    parts = one_set(corpora[0]) if alone else shared_out(tuple(TaskCorpus(set.title, set) for set in corpora), "image")
    small = {**defaults, **_PICTURES_DESK, **desk}
    return (
        Benchmark(name, "image", note, parts, defaults, corpora),
        Benchmark(f"{name}-desk", "image", f"{note}; few pictures per class, ViT-Tiny", parts, small, corpora),
    )


def _corpora(shares: tuple[TaskCorpus, ...]) -> tuple[Corpus, ...]:
    return tuple(dict.fromkeys(share.corpus for share in shares))


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "digits",
            "image",
            "scikit-learn's 1,797 handwritten digits, 5 tasks of 2 classes; embedded",
            _digits,
            {
                "benchmark.flip": False,
                "benchmark.augment": False,
                "backbone.name": "digits-vit",
                "memory.size": 20,
                "train.batch_size": 32,
                "train.lr": 0.003,  # at 0.01 the matching of few old classes' logits oscillates (curvature ~ sigma^2)
            },
        ),
        *_pictures(
            "cifar100",
            "CIFAR-100, 20 tasks of 5 classes (or 5, 10 tasks: benchmark.tasks)",
            (datasets.CIFAR100,),
            {**_VIT, "benchmark.tasks": 20},
            {"memory.size": 200, "backbone.freeze": 8},
        ),
        *_pictures(
            "cifar10",
            "CIFAR-10, 5 tasks of 2 classes; adapters",
            (datasets.CIFAR10,),
            {**_ADAPTERS, "benchmark.tasks": 5, "backbone.adapter": 64, "memory.size": 200, "train.epochs": 20},
            {"memory.size": 50, "train.lr": 0.005},
        ),
        *_pictures(
            "five-datasets",
            "SVHN, MNIST, CIFAR-10, notMNIST, Fashion-MNIST: 5 tasks of 10 classes",
            (datasets.SVHN, datasets.MNIST, datasets.CIFAR10, datasets.NOTMNIST, datasets.FASHION_MNIST),
            {**_VIT, "benchmark.image_size": 32},
            {"memory.size": 100, "backbone.freeze": 8},
        ),
        _pictures(
            "four-datasets",
            "five-datasets without SVHN",
            (datasets.MNIST, datasets.CIFAR10, datasets.NOTMNIST, datasets.FASHION_MNIST),
            {**_VIT, "benchmark.image_size": 32},
            {"memory.size": 100, "backbone.freeze": 8},
        )[1],
        *_pictures(
            "tiny-imagenet",
            "Tiny-ImageNet, 5 tasks of 40 classes (or 10 tasks: benchmark.tasks); adapters",
            (datasets.TINY_IMAGENET,),
            {**_ADAPTERS, "benchmark.tasks": 5},
            {
                "memory.size": 400,
                "train.lr": 0.005,
                "benchmark.train_per_class": 20,
                "benchmark.test_per_class": 10,
            },
        ),
        *_pictures(
            "imagenet-r",
            "ImageNet-R (renditions), 10 tasks of 20 classes",
            (datasets.IMAGENET_R,),
            {**_HARD, "memory.per_class": 20},
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        *_pictures(
            "objectnet",
            "ObjectNet, 10 tasks of 20 classes",
            (datasets.OBJECTNET,),
            _HARD,
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        *_pictures(
            "imagenet-a",
            "ImageNet-A (natural adversarial examples), 10 tasks of 20 classes",
            (datasets.IMAGENET_A,),
            {**_HARD, "memory.per_class": 20},
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        *_pictures(
            "cub",
            "CUB-200 (birds), 20 tasks of 10 classes",
            (datasets.CUB,),
            {**_HARD, "benchmark.tasks": 20, "memory.per_class": 20},
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        *_pictures(
            "omnibenchmark",
            "OmniBenchmark, 10 tasks of 30 classes",
            (datasets.OMNIBENCHMARK,),
            _HARD,
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        *_pictures(
            "vtab",
            "VTAB, 10 tasks of 5 classes; five domains, in order",
            (datasets.VTAB,),
            {**_HARD, "benchmark.class_order": None},
            {**_HARD_DESK, "memory.per_class": 2},
        ),
        Benchmark(
            "my-images",
            "image",
            "your own pictures: class folders, Parquet or a hub id (--benchmark.path)",
            own_data("image"),
            {"backbone.name": "google/vit-base-patch16-224", "memory.size": 100},
        ),
        Benchmark("my-texts", "text", "your own texts: CSV, JSONL, Parquet or a hub id", own_data("text"), _TEXT),
        Benchmark(
            "my-entities",
            "token",
            "your own tagged sentences: CoNLL, JSONL, Parquet or a hub id; entity types arrive in tasks",
            own_data("token"),
            _ENTITIES,
        ),
        Benchmark(
            "topics",
            "text",
            "AGNews, DBPedia (two tasks), Yahoo Answers (two tasks): 22 topics, as in the paper",
            shared_out(TOPICS, "text", prefix=False),
            {**_TEXT, "benchmark.train_per_class": 28000, "benchmark.test_per_class": 2000},
            _corpora(TOPICS),
        ),
        Benchmark(
            "topics-desk",
            "text",
            "AGNews, DBPedia (two tasks), Stack Overflow (two tasks): 36 topics, MiniLM, 100 texts per class",
            shared_out(TOPICS_DESK, "text", prefix=False),
            {
                **_TEXT,
                **_DESK,
                "benchmark.train_per_class": 100,
                "benchmark.test_per_class": 25,
                "benchmark.max_length": 64,
                "backbone.freeze": 5,
                "train.epochs": 2,
            },
            _corpora(TOPICS_DESK),
        ),
        Benchmark(
            "entities",
            "token",
            "OntoNotes5, MIT Movie, I2B2, MIT Restaurant, CoNLL-2003, as in the paper; some need a licence",
            shared_out(ENTITIES, "token"),
            _ENTITIES,
            _corpora(ENTITIES),
        ),
        Benchmark(
            "entities-desk",
            "token",
            "BioNLP13CG, MIT Movie, WNUT2017, MIT Restaurant, BTC: 45 types, MiniLM, 600 sentences per corpus",
            shared_out(ENTITIES_DESK, "token"),
            {
                **_ENTITIES,
                **_DESK,
                "benchmark.train_per_task": 600,
                "benchmark.test_per_task": 200,
                "backbone.freeze": 4,
                "train.batch_size": 8,
                "train.epochs": 2,
                "train.lr": 3e-4,  # by the training loss, two epochs are too few at 1e-4
            },
            _corpora(ENTITIES_DESK),
        ),
    )
}


def find_benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark '{name}'.{closest_name(name, BENCHMARKS)}")
    return BENCHMARKS[name]
