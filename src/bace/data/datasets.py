"""The public sets, with their origin, their layout on disk and their size; and streams of several of them, in which
every task is a corpus or some of its classes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bace.data.modality import Table
from bace.errors import DataError


class Counts(NamedTuple):
    """The numbers of a set as published: classes (entity types), training examples, test examples."""

    classes: int
    train: int
    test: int


@dataclass(frozen=True)
class Corpus:
    """A public labelled set.

    folder: its folder below benchmark.path (or the environment variable BACE_DATA), and its name for `bace check data`.
    hub: its hub id, if there is no such folder; None if the hub has no copy with class names.
    terms: who distributes it, and under which conditions.
    columns, label: the columns to read, if they cannot be found by name. "?" follows a column that some copies lack.
    title: the name of its task.
    counts: the numbers of the complete set; None if editions differ.
    layout: the files in the folder.
    unpacked: the folder that its archive creates, below `folder` or instead of it.
    subset: the configuration of the hub set.
    names: its classes, in order, for files that do not name them.
    held_out: the share of each class that becomes the test set, if the published files have none.
    mirror: whether a mirrored picture still shows its class; letters and digits do not.
    """

    folder: str
    hub: str | None
    terms: str
    columns: tuple[str, ...] = ()
    label: str | None = None
    title: str = ""
    counts: Counts | None = None
    layout: str = "train and test files (CoNLL, JSONL or Parquet)"
    unpacked: str | None = None
    subset: str | None = None
    names: tuple[str, ...] = ()
    held_out: float = 0.0
    mirror: bool = True


@dataclass(frozen=True)
class TaskCorpus:
    """The data of one task: a corpus, or these classes of it."""

    name: str
    corpus: Corpus
    classes: tuple[str, ...] = ()


# Pictures. The counts come from the paper's table, except that MNIST has 60,000 training pictures, not 50,000.

_CLASS_FOLDERS = "train/<class>/ and test/<class>/ with pictures"
_IDX = "train- and t10k-images-idx3-ubyte, -labels-idx1-ubyte, packed (.gz) or not, or Parquet"
_REVISITING = "with the split of RevisitingCIL (https://github.com/zhoudw-zdw/RevisitingCIL, which links the files)"

CIFAR100 = Corpus(
    "cifar100",
    "uoft-cs/cifar100",
    "https://www.cs.toronto.edu/~kriz/cifar.html, python version; cite Krizhevsky 2009",
    title="CIFAR-100",
    counts=Counts(100, 50_000, 10_000),
    layout="train, test and meta of the python version, or Parquet",
    unpacked="cifar-100-python",
)
CIFAR10 = Corpus(
    "cifar10",
    "uoft-cs/cifar10",
    "https://www.cs.toronto.edu/~kriz/cifar.html, python version; cite Krizhevsky 2009",
    title="CIFAR-10",
    counts=Counts(10, 50_000, 10_000),
    layout="data_batch_1 to _5, test_batch and batches.meta of the python version, or Parquet",
    unpacked="cifar-10-batches-py",
)
SVHN = Corpus(
    "svhn",
    "ufldl-stanford/svhn",
    "http://ufldl.stanford.edu/housenumbers, cropped digits; for non-commercial use",
    title="SVHN",
    counts=Counts(10, 73_257, 26_032),
    layout="train_32x32.mat and test_32x32.mat, or Parquet",
    subset="cropped_digits",
    mirror=False,
)
MNIST = Corpus(
    "mnist",
    "ylecun/mnist",
    "LeCun, Cortes, Burges: MNIST; CC BY-SA 3.0",
    title="MNIST",
    counts=Counts(10, 60_000, 10_000),
    layout=_IDX,
    unpacked="MNIST/raw",
    mirror=False,
)
FASHION_MNIST = Corpus(
    "fashion_mnist",
    "zalando-datasets/fashion_mnist",
    "https://github.com/zalandoresearch/fashion-mnist; MIT",
    title="Fashion-MNIST",
    counts=Counts(10, 60_000, 10_000),
    layout=_IDX,
    unpacked="FashionMNIST/raw",
    names=(
        *("T - shirt / top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
)
NOTMNIST = Corpus(
    "notmnist",
    "anubhavmaity/notMNIST",
    "Bulatov 2011, notMNIST_small; with the paper's split: data/notMNIST.zip of "
    "https://github.com/facebookresearch/Adversarial-Continual-Learning",
    title="notMNIST",
    counts=Counts(10, 18_265, 459),
    layout="Train/<letter>/ and Test/<letter>/, or <letter>/ alone, without its two broken files "
    "(then 459 of 18,724 are held out as the test set)",
    unpacked="notMNIST",
    held_out=459 / 18_724,
    mirror=False,
)
TINY_IMAGENET = Corpus(
    "tiny-imagenet-200",
    "zh-plus/tiny-imagenet",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip; for research, as ImageNet",
    title="Tiny-ImageNet",
    counts=Counts(200, 100_000, 10_000),
    layout="train/<class>/images/, val/images/ with val/val_annotations.txt (which is the test) and words.txt",
    unpacked="tiny-imagenet-200",
)
IMAGENET_R = Corpus(
    "imagenet-r",
    None,
    f"https://github.com/hendrycks/imagenet-r, MIT; {_REVISITING}",
    title="ImageNet-R",
    counts=Counts(200, 24_000, 6_000),
    layout=f"{_CLASS_FOLDERS}, or <class>/ alone (then a fifth is held out as the test set)",
    unpacked="imagenet-r",
    held_out=0.2,
)
IMAGENET_A = Corpus(
    "imagenet-a",
    None,
    f"https://github.com/hendrycks/natural-adv-examples, MIT; {_REVISITING}",
    title="ImageNet-A",
    counts=Counts(200, 5_981, 1_519),
    layout=f"{_CLASS_FOLDERS}, or <class>/ alone (then a fifth is held out as the test set)",
    unpacked="imagenet-a",
    held_out=0.2,
)
CUB = Corpus(
    "cub",
    None,
    f"https://www.vision.caltech.edu/datasets/cub_200_2011, for non-commercial use; {_REVISITING}",
    title="CUB-200",
    counts=Counts(200, 9_430, 2_358),
    layout=f"{_CLASS_FOLDERS}, or <class>/ alone, as in images/ of the original (then a fifth is held out as the test "
    "set, as is usual in this literature; the original split is half and half)",
    unpacked="CUB_200_2011/images",
    held_out=0.2,
)
OBJECTNET = Corpus(
    "objectnet",
    None,
    f"https://objectnet.dev, whose licence reserves it for tests: read it before you train on it; {_REVISITING}",
    title="ObjectNet",
    counts=Counts(200, 26_509, 6_628),
    layout=f"{_CLASS_FOLDERS}: 200 of its 313 classes",
    unpacked="objectnet",
)
OMNIBENCHMARK = Corpus(
    "omnibenchmark",
    None,
    f"https://github.com/ZhangYuanhan-AI/OmniBenchmark, CC BY-NC-ND 4.0; {_REVISITING}",
    title="OmniBenchmark",
    counts=Counts(300, 89_697, 5_985),
    layout=f"{_CLASS_FOLDERS}; classes are numbers, because their names are not published",
    unpacked="omnibenchmark",
)
VTAB = Corpus(
    "vtab",
    None,
    f"https://github.com/google-research/task_adaptation, each set with its own licence; {_REVISITING}",
    title="VTAB",
    counts=Counts(50, 1_796, 8_619),
    layout=f"{_CLASS_FOLDERS}; classes are numbers, ten of each of five sets",
    unpacked="vtab-cil/vtab",
)

# Texts and sentences

AG_NEWS = Corpus("ag_news", "fancyzhx/ag_news", "research use", counts=Counts(4, 120_000, 7_600))
DBPEDIA = Corpus(
    "dbpedia_14",
    "fancyzhx/dbpedia_14",
    "CC BY-SA",
    columns=("title?", "content"),
    counts=Counts(14, 560_000, 70_000),
    layout="train and test files (JSONL or Parquet) with label, title and content; a text is its title and content, or "
    "its content alone in a copy without titles",
)
YAHOO = Corpus(
    "yahoo_answers_topics",
    "community-datasets/yahoo_answers_topics",
    "Yahoo Webscope L6",
    columns=("question_title", "question_content", "best_answer"),
    label="topic",
    counts=Counts(10, 1_400_000, 60_000),
)
STACK_OVERFLOW = Corpus(
    "stackoverflow_titles", None, "titles of Stack Overflow, CC BY-SA", counts=Counts(20, 16_000, 4_000)
)
ONTONOTES = Corpus("ontonotes5", None, "LDC2013T19, https://catalog.ldc.upenn.edu; free of charge, with an account")
I2B2 = Corpus(
    "i2b2", None, "2014 de-identification set, https://portal.dbmi.hms.harvard.edu; with a data use agreement"
)
CONLL = Corpus("conll2003", None, "https://www.clips.uantwerpen.be/conll2003/ner; the texts from NIST (Reuters RCV1)")
MIT_MOVIE = Corpus(
    "mit_movie", None, "https://groups.csail.mit.edu/sls/downloads/movie", counts=Counts(12, 9_775, 2_443)
)
MIT_RESTAURANT = Corpus(
    "mit_restaurant", None, "https://groups.csail.mit.edu/sls/downloads/restaurant", counts=Counts(8, 7_660, 1_521)
)
BIONLP = Corpus("bionlp13cg", None, "BioNLP 2013 Cancer Genetics, CC BY 4.0")
WNUT = Corpus("wnut2017", None, "https://noisy-text.github.io/2017, CC BY 4.0", counts=Counts(6, 3_394, 1_287))
BTC = Corpus("btc", None, "Broad Twitter Corpus, CC BY 4.0")

_AG_NEWS = TaskCorpus("AGNews", AG_NEWS, ("World", "Sports", "Business", "Sci/Tech"))
_DBPEDIA = (
    TaskCorpus(
        "DBPedia1",
        DBPEDIA,
        ("Artist", "Athlete", "OfficeHolder", "MeanOfTransportation", "Building", "NaturalPlace"),
    ),
    TaskCorpus("DBPedia2", DBPEDIA, ("Village", "Animal", "Plant", "Album", "Film", "WrittenWork")),
)
TOPICS = (  # without classes that overlap with another corpus
    _AG_NEWS,
    *_DBPEDIA,
    TaskCorpus("Yahoo1", YAHOO, ("Society & Culture", "Health", "Education & Reference")),
    TaskCorpus("Yahoo2", YAHOO, ("Computers & Internet", "Family & Relationships", "Politics & Government")),
)
TOPICS_DESK = (
    _AG_NEWS,
    *_DBPEDIA,
    TaskCorpus(
        "StackOverflow1",
        STACK_OVERFLOW,
        ("wordpress", "oracle", "svn", "apache", "excel", "matlab", "visual-studio", "cocoa", "osx", "bash"),
    ),
    TaskCorpus(
        "StackOverflow2",
        STACK_OVERFLOW,
        ("spring", "hibernate", "scala", "sharepoint", "ajax", "qt", "drupal", "linq", "haskell", "magento"),
    ),
)
ENTITIES = (
    TaskCorpus(
        "OntoNotes5",
        ONTONOTES,  # without PERSON, ORG, GPE and LOC, which CoNLL-2003 has too
        (
            *("CARDINAL", "DATE", "EVENT", "FAC", "LANGUAGE", "LAW", "MONEY"),
            *("NORP", "ORDINAL", "PERCENT", "PRODUCT", "QUANTITY", "TIME", "WORK_OF_ART"),
        ),
    ),
    TaskCorpus("MIT Movie", MIT_MOVIE),
    TaskCorpus("I2B2", I2B2),
    TaskCorpus("MIT Restaurant", MIT_RESTAURANT),
    TaskCorpus("CoNLL-2003", CONLL),
)
ENTITIES_DESK = (
    TaskCorpus("BioNLP13CG", BIONLP),
    TaskCorpus("MIT Movie", MIT_MOVIE),
    TaskCorpus("WNUT2017", WNUT),
    TaskCorpus("MIT Restaurant", MIT_RESTAURANT),
    TaskCorpus("BTC", BTC),
)


def qualified(share: TaskCorpus, table: Table) -> Table:
    """The table with its corpus's name before every class, because two corpora may use one name for two classes."""

    def full(name: str) -> str:
        return f"{share.corpus.folder}.{name}"

    labels = [table.modality.renamed(label, full) for label in table.labels]
    return replace(table, labels=labels, names=[full(name) for name in table.names])


def locate(corpus: Corpus, root: str | None, *, alone: bool = False) -> Path | str:
    """The corpus's folder, or its hub id.

    root: the folder that holds the folders of the corpora; if the corpus is `alone`, also its own folder, a file, or a
        hub id.
    """
    if alone and root:
        return find_folder(corpus, root) or (Path(root) if Path(root).exists() else root)
    if found := find_folder(corpus, root, os.environ.get("BACE_DATA")):
        return found
    if corpus.hub:
        return corpus.hub
    where = Path(root or os.environ.get("BACE_DATA") or "DATA") / corpus.folder
    raise DataError(
        f"{where} does not exist: get the corpus ({corpus.terms}) and put its {corpus.layout} there; "
        f"benchmark.path, or BACE_DATA, names the folder that holds '{corpus.folder}'."
    )


def check_present(shares: Sequence[TaskCorpus], root: str | None) -> None:
    """Before anything is read, name all missing corpora and where to get each."""
    problems = []
    for corpus in dict.fromkeys(share.corpus for share in shares):
        try:
            locate(corpus, root)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))


def find_folder(corpus: Corpus, *places: str | None) -> Path | None:
    """The place of the corpus below one of these: its folder, or the folder that its archive creates."""
    names = [corpus.folder]
    if corpus.unpacked:
        names = [f"{corpus.folder}/{corpus.unpacked}", corpus.folder, corpus.unpacked]
    folders = (Path(place).expanduser() / name for place in places if place for name in names)
    return next((folder for folder in folders if folder.is_dir()), None)
