"""`bace check data`: which public sets are here, whether they are complete, and how to get the others."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bace.data.benchmarks import BENCHMARKS
from bace.data.datasets import Corpus, Counts, find_folder
from bace.data.files import has_split
from bace.data.table import count
from bace.errors import ConfigError, DataError, closest_name

Status = Literal["present", "subset", "wrong count", "missing"]


@dataclass(frozen=True)
class Finding:
    """What we know about a set on this machine.

    found: the numbers of classes, training and test examples; nothing if the set is missing or cannot be read.
    remark: where it is, what is wrong with it, or how to get it.
    """

    corpus: Corpus
    status: Status
    found: Counts | None
    remark: str

    def numbers(self) -> list[str]:
        """Classes, training and test examples in words: '20,000 of 50,000'."""
        wanted = self.corpus.counts or (None, None, None)
        return [_of(here, there) for here, there in zip(self.found or (None, None, None), wanted, strict=True)]


def sets_of(name: str | None) -> list[tuple[Corpus, str]]:
    """The sets of a benchmark, the set of that name, or all."""
    every = {corpus: benchmark.modality for benchmark in BENCHMARKS.values() for corpus in benchmark.corpora}
    if name is None:
        return list(every.items())
    if name in BENCHMARKS:
        return [(corpus, every[corpus]) for corpus in BENCHMARKS[name].corpora]
    named = {corpus.folder: corpus for corpus in every}
    if name not in named:
        raise ConfigError(f"there is no benchmark and no set '{name}'.{closest_name(name, [*BENCHMARKS, *named])}")
    return [(named[name], every[named[name]])]


def check(corpus: Corpus, modality: str, root: str | None = None) -> Finding:
    """Count what is here, from the lists and headers of the files. No picture is decoded, and nothing is downloaded."""
    folder = find_folder(corpus, root, os.environ.get("BACE_DATA"))
    try:
        if folder:
            found, where = count_folder(corpus, modality, folder), str(folder)
        elif cached := count_cached(corpus):
            found, where = cached, f"in the cache of the hub's sets, {corpus.hub}"
        else:
            return Finding(corpus, "missing", None, how_to_get(corpus, root))
    except DataError as error:
        return Finding(corpus, "wrong count", None, f"{error} Expected: {corpus.layout}.")
    return Finding(corpus, compare(found, corpus.counts), found, where)


def compare(found: Counts, published: Counts | None) -> Status:
    if published is None or found == published:
        return "present"
    less = found.train + found.test < published.train + published.test  # a part may be split in another way
    return "subset" if less and found.classes == published.classes else "wrong count"


def count_folder(corpus: Corpus, modality: str, folder: Path) -> Counts:
    options: dict[str, Any] = {
        "modality": modality,
        "input_column": corpus.columns or None,
        "label_column": corpus.label,
        "label_names": corpus.names or None,
    }
    train, classes = count(folder, split="train", **options)
    if corpus.held_out and not has_split(folder, "test"):
        test = round(corpus.held_out * train)
        return Counts(classes, train - test, test)
    test, of_test = count(folder, split="test", **options)
    return Counts(max(classes, of_test), train, test)


def count_cached(corpus: Corpus) -> Counts | None:
    """The counts that `datasets` recorded when it downloaded a set."""
    try:
        from datasets import config
    except ImportError:
        return None
    if not corpus.hub:
        return None
    folder = Path(config.HF_DATASETS_CACHE) / corpus.hub.replace("/", "___")
    for file in sorted(folder.glob("**/dataset_info.json")):
        about = json.loads(file.read_text(encoding="utf-8"))
        splits = {name: split["num_examples"] for name, split in (about.get("splits") or {}).items()}
        names = [len(feature["names"]) for feature in about.get("features", {}).values() if feature.get("names")]
        test = next((splits[name] for name in ("test", "validation", "valid") if name in splits), 0)
        classes = corpus.counts.classes if corpus.counts and corpus.counts.classes in names else max(names, default=0)
        return Counts(classes, splits.get("train", 0), test)
    return None


def how_to_get(corpus: Corpus, root: str | None) -> str:
    place = Path(root or os.environ.get("BACE_DATA") or "DATA") / corpus.folder
    hub = f"fetched from the hub at first use ({corpus.hub}), or " if corpus.hub else ""
    return f"{hub}from {corpus.terms}; to {place}: {corpus.layout}"


def raise_problems(findings: Sequence[Finding], name: str) -> None:
    """Raise an error if the benchmark cannot run with what is here. A part of a set is enough."""
    bad = [f"{f.corpus.folder} ({f.status})" for f in findings if f.status in ("missing", "wrong count")]
    if bad:
        raise DataError(
            f"{len(bad)} of the {len(findings)} sets of '{name}' are not as they should be: {', '.join(bad)}"
        )


def _of(here: int | None, published: int | None) -> str:
    if here is None:
        return "-" if published is None else f"- of {published:,}"
    if published is None or here == published:
        return f"{here:,}"
    return f"{here:,} of {published:,}" if here < published else f"{here:,} instead of {published:,}"
