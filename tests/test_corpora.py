"""Streams of several corpora."""

import shutil
from pathlib import Path

import pytest
from test_sources import class_label, parquet

from bace.data.benchmarks import TaskTables, find_benchmark
from bace.data.check import count_folder
from bace.data.datasets import (
    CIFAR100,
    DBPEDIA,
    ENTITIES,
    ENTITIES_DESK,
    TOPICS,
    TOPICS_DESK,
    Corpus,
    TaskCorpus,
    locate,
)
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError


def write_conll(folder: Path, types: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    sentence = "\n".join(f"{name.lower()} B-{name}\nof O" for name in types)
    for split in ("train", "test"):
        (folder / f"{split}.conll").write_text(f"{sentence}\n\nnothing O\nhere O\n\n{sentence}\n")


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Small files in the layout of the paper's five corpora."""
    ontonotes = (*ENTITIES[0].classes, "PERSON", "ORG", "GPE", "LOC")
    types = (ontonotes, ("ACTOR", "YEAR"), ("DATE", "ID"), ("Dish", "Price"), ("PER", "LOC", "ORG", "MISC"))
    for share, own in zip(ENTITIES, types, strict=True):
        write_conll(tmp_path / share.corpus.folder, own)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*the published set")
def test_the_papers_entities_are_five_corpora_with_types_of_their_own(corpora: Path) -> None:
    parts = find_benchmark("entities").parts(DataSettings(path=str(corpora)))
    assert [part.name for part in parts] == ["OntoNotes5", "MIT Movie", "I2B2", "MIT Restaurant", "CoNLL-2003"]
    assert [len(part.classes) for part in parts] == [14, 2, 2, 2, 4]
    names = [name for part in parts for name in part.classes]
    assert len(set(names)) == len(names)
    assert "ontonotes5.DATE" in names
    assert "i2b2.DATE" in names
    assert "ontonotes5.PERSON" not in names
    assert len(parts[1].train) == 3  # sentences without an entity are included
    assert "B-mit_movie.ACTOR" in parts[1].train.labels[0]


def test_all_corpora_that_are_missing_are_named_at_once_with_their_terms(
    corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BACE_DATA", raising=False)
    for folder in ("i2b2", "ontonotes5"):
        shutil.rmtree(corpora / folder)
    with pytest.raises(DataError) as refused:
        find_benchmark("entities").parts(DataSettings(path=str(corpora)))
    first, second = str(refused.value).splitlines()
    for line, folder, terms in ((first, "ontonotes5", "LDC2013T19"), (second, "i2b2", "data use agreement")):
        assert line.startswith(f"{corpora / folder} does not exist: get the corpus")
        assert terms in line
        assert "benchmark.path, or BACE_DATA, names the folder" in line


def test_a_corpus_is_taken_from_its_folder_then_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACE_DATA", raising=False)
    corpus = Corpus("ag_news", "fancyzhx/ag_news", "")
    assert locate(corpus, str(tmp_path)) == "fancyzhx/ag_news"
    (tmp_path / "ag_news").mkdir()
    assert locate(corpus, str(tmp_path)) == tmp_path / "ag_news"
    monkeypatch.setenv("BACE_DATA", str(tmp_path))
    assert locate(corpus, None) == tmp_path / "ag_news"


def test_a_set_alone_may_be_named_by_its_own_folder_which_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "cifar100").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("BACE_DATA", str(tmp_path / "data"))
    assert locate(CIFAR100, None, alone=True) == tmp_path / "data" / "cifar100"
    assert locate(CIFAR100, str(tmp_path / "mine"), alone=True) == tmp_path / "mine"
    assert locate(CIFAR100, "someone/cifar", alone=True) == "someone/cifar"
    (tmp_path / "mine" / "cifar-100-python").mkdir()  # as the archive unpacks
    assert locate(CIFAR100, str(tmp_path / "mine"), alone=True) == tmp_path / "mine" / "cifar-100-python"
    (tmp_path / "data" / "cifar100" / "cifar-100-python").mkdir()
    assert locate(CIFAR100, None) == tmp_path / "data" / "cifar100" / "cifar-100-python"


def test_the_papers_topics_are_22_classes_in_five_tasks() -> None:
    """The stream leaves out those of 14 and 10 classes that overlap with another corpus."""
    assert [len(share.classes) for share in TOPICS] == [4, 6, 6, 3, 3]
    kept = {name for share in TOPICS for name in share.classes}
    assert len(kept) == 22
    assert not kept & {"Company", "EducationalInstitution", "Sports & Recreation", "Entertainment & Music"}


def write_topics(folder: Path, *, titles: bool) -> None:
    """A text of every class of the paper's three corpora, in the columns of their copies on the hub."""
    columns: dict[str, tuple[str, dict[str, str]]] = {
        "ag_news": ("label", {"text": "text {}"}),
        "dbpedia_14": ("label", {**({"title": "title {}"} if titles else {}), "content": " content {}"}),
        "yahoo_answers_topics": (
            "topic",
            {"question_title": "title {}", "question_content": "more {}", "best_answer": "answer {}"},
        ),
    }
    for corpus, (label, texts) in columns.items():
        names = [name for share in TOPICS if share.corpus.folder == corpus for name in share.classes]
        rows = {column: [text.format(i) for i in range(len(names))] for column, text in texts.items()}
        if "question_content" in rows:
            rows["question_content"][0] = ""  # some questions have only a title
        for split in ("train", "test"):
            path = folder / corpus / f"{split}-00000-of-00001.parquet"
            parquet(path, {label: list(range(len(names))), **rows}, {label: class_label(*names)})


def read_topics(folder: Path) -> list[TaskTables]:
    return find_benchmark("topics").parts(DataSettings(path=str(folder), train_per_class=1, test_per_class=1))


def test_texts_of_dbpedia_and_yahoo_are_title_and_body(tmp_path: Path) -> None:
    write_topics(tmp_path, titles=True)
    agnews, first, second, yahoo, _ = read_topics(tmp_path)
    assert agnews.train.inputs[:2] == ["text 0", "text 1"]
    assert first.train.inputs[:2] == ["title 0 content 0", "title 1 content 1"]
    assert second.test.inputs[-1] == "title 11 content 11"
    assert yahoo.train.inputs[:2] == ["title 0 answer 0", "title 1 more 1 answer 1"]


def test_a_copy_of_dbpedia_without_titles_is_read_by_its_content(tmp_path: Path) -> None:
    write_topics(tmp_path, titles=False)
    assert read_topics(tmp_path)[1].train.inputs[:2] == [" content 0", " content 1"]
    assert count_folder(DBPEDIA, "text", tmp_path / "dbpedia_14") == (12, 12, 12)


def test_the_order_of_corpora_is_fixed(corpora: Path) -> None:
    with pytest.raises(ConfigError, match="class_order is fixed"):
        find_benchmark("entities").parts(DataSettings(path=str(corpora), class_order="shuffled"))


@pytest.mark.filterwarnings("ignore:.*the published set")
@pytest.mark.parametrize(
    ("name", "shares", "classes", "train", "test"),
    [
        ("topics-desk", TOPICS_DESK, [4, 6, 6, 10, 10], [100 * n for n in (4, 6, 6, 10, 10)], 50),
        ("entities-desk", ENTITIES_DESK, [16, 12, 6, 8, 3], [4000, 4000, 3394, 4000, 4000], None),
    ],
)
def test_desk_streams_are_read_from_the_real_corpora(
    real_data: Path, name: str, shares: tuple[TaskCorpus, ...], classes: list[int], train: list[int], test: int | None
) -> None:
    benchmark = find_benchmark(name)
    limits = {"train_per_class": 100, "test_per_class": 50} if test else {}
    parts = benchmark.parts(DataSettings(path=str(real_data), **limits))  # type: ignore[arg-type]
    assert [part.name for part in parts] == [share.name for share in shares]
    assert [len(part.classes) for part in parts] == classes
    if test:
        assert [len(part.train) for part in parts] == train
        assert [len(part.test) for part in parts] == [test * n for n in classes]
    else:
        assert [len(part.train) for part in parts][1:] == train[1:]
    assert len({name for part in parts for name in part.classes}) == sum(classes)
