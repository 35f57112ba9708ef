"""Streams made of several public corpora: every task is a corpus, or some of its classes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bace.data.sources import Table, read
from bace.errors import DataError
from bace.stream import Modality


@dataclass(frozen=True)
class Corpus:
    """A public labelled set.

    folder: its folder below benchmark.path (or the environment variable BACE_DATA).
    hub: its hub id, for when there is no such folder; None: the hub has no copy that carries its class names.
    terms: who gives it away, and under which condition.
    columns, label: what to read, where it cannot be found by name.
    """

    folder: str
    hub: str | None
    terms: str
    columns: tuple[str, ...] = ()
    label: str | None = None


@dataclass(frozen=True)
class Share:
    """What one task shows: a corpus, or these classes of it."""

    name: str
    corpus: Corpus
    classes: tuple[str, ...] = ()


AG_NEWS = Corpus("ag_news", "fancyzhx/ag_news", "research use")
DBPEDIA = Corpus("dbpedia_14", "fancyzhx/dbpedia_14", "CC BY-SA", columns=("content",))
YAHOO = Corpus(
    "yahoo_answers_topics",
    "community-datasets/yahoo_answers_topics",
    "Yahoo Webscope L6",
    columns=("question_title", "question_content", "best_answer"),
    label="topic",
)
STACK_OVERFLOW = Corpus("stackoverflow_titles", None, "titles of Stack Overflow, CC BY-SA")
ONTONOTES = Corpus("ontonotes5", None, "LDC2013T19, https://catalog.ldc.upenn.edu; free of charge, with an account")
I2B2 = Corpus(
    "i2b2", None, "2014 de-identification set, https://portal.dbmi.hms.harvard.edu; with a data use agreement"
)
CONLL = Corpus("conll2003", None, "https://www.clips.uantwerpen.be/conll2003/ner; the texts from NIST (Reuters RCV1)")
MIT_MOVIE = Corpus("mit_movie", None, "https://groups.csail.mit.edu/sls/downloads/movie")
MIT_RESTAURANT = Corpus("mit_restaurant", None, "https://groups.csail.mit.edu/sls/downloads/restaurant")
BIONLP = Corpus("bionlp13cg", None, "BioNLP 2013 Cancer Genetics, CC BY 4.0")
WNUT = Corpus("wnut2017", None, "https://noisy-text.github.io/2017, CC BY 4.0")
BTC = Corpus("btc", None, "Broad Twitter Corpus, CC BY 4.0")

_AG_NEWS = Share("AGNews", AG_NEWS, ("World", "Sports", "Business", "Sci/Tech"))
_DBPEDIA = (
    Share(
        "DBPedia1",
        DBPEDIA,
        ("Artist", "Athlete", "OfficeHolder", "MeanOfTransportation", "Building", "NaturalPlace"),
    ),
    Share("DBPedia2", DBPEDIA, ("Village", "Animal", "Plant", "Album", "Film", "WrittenWork")),
)
TOPICS = (  # bace.md 11.1; what overlaps with another corpus is left out
    _AG_NEWS,
    *_DBPEDIA,
    Share("Yahoo1", YAHOO, ("Society & Culture", "Health", "Education & Reference")),
    Share("Yahoo2", YAHOO, ("Computers & Internet", "Family & Relationships", "Politics & Government")),
)
TOPICS_DESK = (
    _AG_NEWS,
    *_DBPEDIA,
    Share(
        "StackOverflow1",
        STACK_OVERFLOW,
        ("wordpress", "oracle", "svn", "apache", "excel", "matlab", "visual-studio", "cocoa", "osx", "bash"),
    ),
    Share(
        "StackOverflow2",
        STACK_OVERFLOW,
        ("spring", "hibernate", "scala", "sharepoint", "ajax", "qt", "drupal", "linq", "haskell", "magento"),
    ),
)
ENTITIES = (  # bace.md 11.2
    Share(
        "OntoNotes5",
        ONTONOTES,  # without PERSON, ORG, GPE and LOC, which CoNLL-2003 has too
        (
            *("CARDINAL", "DATE", "EVENT", "FAC", "LANGUAGE", "LAW", "MONEY"),
            *("NORP", "ORDINAL", "PERCENT", "PRODUCT", "QUANTITY", "TIME", "WORK_OF_ART"),
        ),
    ),
    Share("MIT Movie", MIT_MOVIE),
    Share("I2B2", I2B2),
    Share("MIT Restaurant", MIT_RESTAURANT),
    Share("CoNLL-2003", CONLL),
)
ENTITIES_DESK = (
    Share("BioNLP13CG", BIONLP),
    Share("MIT Movie", MIT_MOVIE),
    Share("WNUT2017", WNUT),
    Share("MIT Restaurant", MIT_RESTAURANT),
    Share("BTC", BTC),
)


def locate(corpus: Corpus, root: str | None) -> Path | str | None:
    """The corpus's folder, else its hub id; None where it has to be fetched by the user."""
    for place in (root, os.environ.get("BACE_DATA")):
        if place and (Path(place) / corpus.folder).exists():
            return Path(place) / corpus.folder
    return corpus.hub


def presence(shares: Sequence[Share], root: str | None) -> dict[Corpus, Path | str | None]:
    """Where each corpus of a stream is (see `locate`), in the order of its tasks."""
    return {share.corpus: locate(share.corpus, root) for share in shares}


def check_present(shares: Sequence[Share], root: str | None) -> None:
    """Say at once all that is missing, and where to get it."""
    found = presence(shares, root)
    absent = [corpus for corpus, place in found.items() if place is None]
    if absent:
        place = Path(root or os.environ.get("BACE_DATA") or "DATA")
        listed = "".join(f"\n  {place / corpus.folder}: {corpus.terms}" for corpus in absent)
        raise DataError(
            f"not all of the {len(found)} corpora of this benchmark are there. Missing:{listed}\n"
            "Put the train and test files (CoNLL, JSONL or Parquet) of each into its folder; benchmark.path, or the "
            "environment variable BACE_DATA, names the folder that holds them."
        )


def read_share(share: Share, split: str, modality: Modality, root: str | None, limit: int | None) -> Table:
    """One split of a task. Entity types take their corpus's name: one name in two corpora is two classes."""
    corpus = share.corpus
    table = read(
        cast("Path | str", locate(corpus, root)),  # see check_present
        split=split,
        modality=modality,
        input_column=corpus.columns or None,
        label_column=corpus.label,
        limit_per_class=limit,
    )
    if modality != "token":
        return table
    labels = cast("list[list[str]]", table.labels)
    tags = [[tag if tag == "O" else f"{tag[:2]}{qualified(share, tag[2:])}" for tag in sentence] for sentence in labels]
    return Table(modality, table.inputs, tags, [qualified(share, name) for name in table.names])


def classes_of(share: Share, table: Table) -> list[str]:
    """Class names in order of arrival."""
    if table.modality == "token":
        return [qualified(share, name) for name in share.classes] or table.names
    return list(share.classes) or table.names


def qualified(share: Share, name: str) -> str:
    return f"{share.corpus.folder}.{name}"
