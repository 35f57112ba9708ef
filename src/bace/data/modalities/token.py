"""Sentences for named-entity recognition. Every word is a row, which is read at the first piece of the word."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from bace.data.batch import NO_IDS
from bace.data.decode import PictureOptions
from bace.data.files import CONLL_SUFFIXES, TAG, Raw, conll_sentences, not_iob
from bace.data.modalities.text import NO_TEXTS, TEXT, Text, Texts, flat, join, load_tokenizer, tokenizer_of
from bace.data.modality import (
    Examples,
    InMemory,
    Inputs,
    Labels,
    Modality,
    Predicted,
    Scorer,
    Table,
    in_order,
    listed,
    valid,
)
from bace.data.scores import entities, entity_scores
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError


class Token(Text):
    """Sentences, whose classes are IOB2 tags: O, which hides the types of other tasks, then B- and I- of each type."""

    name, plural, own_data = "token", "sentences", "my-entities"
    input_names = ("tokens", "words")
    input_kinds = ("strings",)
    label_names = ("ner_tags", "tags", "labels", "ner", "label")
    label_kinds = ("classes", "strings", "integers")
    joins = False
    conll = True
    one_label = False
    background = 0
    measure = "seqeval macro F1"
    file_suffixes = frozenset({*CONLL_SUFFIXES})

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        return [_words(value, raw.where(row)) for row, (value,) in zip(rows, raw.values(columns, rows), strict=True)]

    def recognises(self, examples: Any) -> bool:
        first = examples[0] if isinstance(examples, list) else None
        return isinstance(first, list | tuple) or (isinstance(first, np.ndarray) and first.dtype.kind in "UO")

    def labels(
        self, values: Sequence[Any], names: list[str] | None, where: Callable[[int], str]
    ) -> tuple[Labels, list[str]]:
        """The IOB2 tags of each sentence, and the entity types in order."""
        for name in names or []:
            if not TAG.fullmatch(name):
                raise DataError(not_iob("the list of tag names", name))
        for i, value in enumerate(values):
            if not isinstance(value, list | tuple | np.ndarray):
                raise DataError(f"{where(i)}: the tags are {value!r}. Expected a list with one tag per word.")
        owner = [i for i, value in enumerate(values) for _ in value]
        tags, _ = super().labels([tag for value in values for tag in value], names, lambda word: where(owner[word]))
        for word, tag in enumerate(cast("list[str]", tags)):
            if not TAG.fullmatch(tag):
                raise DataError(not_iob(where(owner[word]), tag))
        words = iter(cast("list[str]", tags))
        sentences = [iob2(islice(words, len(value))) for value in values]
        if names is not None:
            return sentences, self.own_names(names)
        return sentences, in_order(kind for tags in sentences for kind in self.shows(tags))

    def check_labels(self, inputs: Inputs, labels: Labels, where: Callable[[int], str]) -> None:
        for i, (words, tags) in enumerate(zip(cast("list[list[str]]", inputs), labels, strict=True)):
            if len(words) != len(tags):
                raise DataError(f"{where(i)}: {len(words)} words but {len(tags)} tags. Give each word one tag.")

    def empty(self, inputs: Inputs) -> list[int]:
        return [i for i, words in enumerate(cast("list[list[str]]", inputs)) if not words]

    # -- classes

    def shows(self, label: Any) -> set[str]:
        return {entity_type(tag) for tag in label if tag != "O"}

    def renamed(self, label: Any, rename: Callable[[str], str]) -> Any:
        return [tag if tag == "O" else f"{tag[:2]}{rename(entity_type(tag))}" for tag in label]

    def class_names(self, tasks: Sequence[Sequence[str]]) -> list[str]:
        return ["O", *(f"{prefix}-{name}" for own in tasks for name in own for prefix in "BI")]

    def own_names(self, classes: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(entity_type(tag) for tag in classes if tag != "O"))

    def targets(self, labels: Labels, own: Sequence[str], number: dict[str, int]) -> Tensor:  # (rows,)
        """A task labels only its own types; everything else is O."""
        types = set(own)
        tags = (tag if entity_type(tag) in types else "O" for sentence in labels for tag in sentence)
        return torch.tensor([number[tag] for tag in tags], dtype=torch.int64)

    def groups(self, names: Sequence[str]) -> list[int]:
        """A memory keeps sentences of each entity type."""
        types = self.own_names(names)
        return [-1 if name == "O" else types.index(entity_type(name)) for name in names]

    # -- encode

    def encode(self, tables: Sequence[Table], settings: DataSettings, encoder: Any) -> tuple[Examples, list[int]]:
        sentences = [words for table in tables for words in cast("list[list[str]]", table.inputs)]
        examples, windows = tokenize_sentences(sentences, tokenizer_of(encoder), settings.max_length)
        counts, first = [], 0
        for table in tables:
            counts.append(sum(len(window) for window in windows[first : first + len(table)]))
            first += len(table)
        return examples, counts

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        words = kept.get("positions", NO_IDS), kept.get("row_start", NO_TEXTS)
        return Entities(kept.get("ids", NO_IDS), kept.get("start", NO_TEXTS), *words)

    # -- score

    def score(self, rows: Predicted, own: Sequence[str], *, lenient: bool) -> dict[str, Any]:
        """seqeval's macro F1, in which a predicted type of another task counts with F1 0 unless `lenient`."""
        lengths = torch.unique_consecutive(rows.examples, return_counts=True)[1].tolist()
        gold, guess = (
            [[rows.names[c] for c in sentence.tolist()] for sentence in classes.split(lengths)]
            for classes in (rows.targets, rows.predicted)
        )
        result = entity_scores(gold, guess, self.own_names(own), foreign="outside" if lenient else "error")
        return {"score": result.macro_f1, **dataclasses.asdict(result)}

    def details(self, rows: Predicted, scores: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        """The scores of each task, and the F1 of each type on the sentences of its own task."""
        by_task = [score.pop("per_type") for score in scores]
        return {"scores": scores, "per_type": {kind: f1 for own in by_task for kind, f1 in own.items()}}

    # -- show

    def by_example(self, scores: Tensor, inputs: InMemory) -> list[Tensor]:
        return list(scores.split([len(words) for words in inputs]))

    def show(self, examples: Any, scores: Scorer, names: Sequence[Any]) -> list[Any]:
        """The tags of the words if sentences are lists of words, or the entities if they are strings."""
        sentences = listed(examples)
        if any(isinstance(sentence, str) for sentence in sentences):
            return self.entities(sentences, scores, names)
        return [[names[c] for c in rows.argmax(1).tolist()] for rows in scores(sentences)]

    def entities(self, sentences: Sequence[Any], scores: Scorer, names: Sequence[Any]) -> list[list["Span"]]:
        """The entities of each sentence, which is a string or a list of words that are joined by spaces."""
        return [spans(text, places, tags) for text, places, _, tags in self._tagged(sentences, scores, names)]

    def _tagged(
        self, sentences: Any, scores: Scorer, names: Sequence[Any]
    ) -> Iterator[tuple[str, list[tuple[int, int]], list[str], list[Any]]]:
        """The text of each sentence, the places of its words, the words, and their tags."""
        items = listed(sentences)
        words = [[s[i:j] for i, j in split_words(s)] if isinstance(s, str) else s for s in items]
        tags = self.show(words, scores, names)  # says what is wrong with a list of words
        for sentence, own, own_tags in zip(items, words, tags, strict=True):
            text, places = (sentence, split_words(sentence)) if isinstance(sentence, str) else joined(sentence)
            yield text, places, list(own), own_tags

    def from_lines(self, lines: Iterable[str], source: str) -> list[tuple[str, Any]]:
        """One sentence per line or, in CoNLL's layout, one word per line, whose tag is ignored."""
        every = list(lines)
        if source.endswith(tuple(CONLL_SUFFIXES - {".txt"})) or _are_tagged(every):
            return [(f"{source}:{n}", words) for n, words, _ in conll_sentences(every)]
        return super().from_lines(every, source)

    def from_rows(self, raw: Raw, columns: Sequence[str]) -> list[tuple[str, Any]]:
        whole = raw.columns[columns[0]] == "string"
        return TEXT.from_rows(raw, columns) if whole else super().from_rows(raw, columns)

    def input_columns(self, found: dict[str, str], given: list[str], label: str | None) -> list[str]:
        """Columns of lists of words or, if there are none, of texts, each a sentence."""
        return super().input_columns(found, given, label) or TEXT.input_columns(found, given, label)

    def describe(self, examples: Sequence[Any], scores: Scorer, names: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"words": words, "tags": tags, "entities": [span._asdict() for span in spans(text, places, tags)]}
            for text, places, words, tags in self._tagged(examples, scores, names)
        ]

    def view(self, data: Any, example: int, row: int, backbone: Callable[[], str]) -> dict[str, Any]:
        """The sentence's words with a space between them, and the start and end of the row's word."""
        tokenizer = load_tokenizer(backbone())
        ids = data.ids[data.start[example] : data.start[example + 1]].tolist()
        first = int(data.row_start[example])
        starts = data.positions[first : int(data.row_start[example + 1])].tolist()
        pieces = [ids[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        # an unknown word decodes to a special token, like the tokens at both ends; others may start with a space
        decoded = (str(tokenizer.decode(piece, skip_special_tokens=True)).strip() for piece in pieces)
        words = [word or str(tokenizer.unk_token) for word in decoded]
        begin = sum(len(word) + 1 for word in words[: row - first])
        return {"text": " ".join(words), "word": [begin, begin + len(words[row - first])]}


def _are_tagged(lines: Sequence[str]) -> bool:
    """Whether these are lines of a word and its tag, as in CoNLL's files, and not sentences."""
    fields = [line.split() for line in lines if line.strip() and not line.startswith("-DOCSTART-")]
    return bool(fields) and all(len(own) > 1 and TAG.fullmatch(own[-1]) for own in fields)


def entity_type(tag: str) -> str:
    """'B-person' -> 'person'."""
    return tag[2:]


def iob2(tags: Iterable[str]) -> list[str]:
    """Convert IOB1 or careless IOB2 to IOB2: an I- that continues no entity of its type begins one."""
    result: list[str] = []
    before = "O"
    for tag in tags:
        before = "B-" + tag[2:] if tag.startswith("I-") and before[2:] != tag[2:] else tag
        result.append(before)
    return result


def _words(value: Any, where: str) -> list[str]:
    if not isinstance(value, list | tuple | np.ndarray) or not all(isinstance(word, str) for word in value):
        raise DataError(f"{where}: expected a list of words, got {str(value)[:80]!r}.")
    return [valid(str(word), where) for word in value]


TOKEN = Token()


class Entities(Texts):
    """Tokenised sentences; `positions` and `row_start` give the place of each word's first piece (see Stream)."""

    modality: Modality = TOKEN
    row_start: Tensor
    positions: Tensor

    def __init__(self, ids: Tensor, start: Tensor, positions: Tensor, row_start: Tensor, pad: int = 0) -> None:
        super().__init__(ids, start, pad)
        self.positions, self.row_start = positions, row_start

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        words = flat([self.positions[self.row_start[i] : self.row_start[i + 1]] for i in examples.tolist()])
        return {**super().take(examples), "positions": words["ids"], "row_start": words["start"]}

    def prepend(self, kept: dict[str, Tensor]) -> None:
        super().prepend(kept)
        self.positions, self.row_start = join(kept["positions"], kept["row_start"], self.positions, self.row_start)


def for_words(tokenizer: Any) -> Any:
    """The tokenizer for sentences that are lists of words.

    To a byte-level tokenizer (RoBERTa, ModernBERT) the space before a word is a part of it. Words have none, so this
    tokenizer adds it; otherwise every word would be read as a continuation of the word before it. (transformers'
    `add_prefix_space` does the same for some classes of tokenizers, and is ignored by others.)"""
    from tokenizers import normalizers, pre_tokenizers

    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    parts = list(cast(Any, splitter)) if isinstance(splitter, pre_tokenizers.Sequence) else [splitter]
    if not any(isinstance(part, pre_tokenizers.ByteLevel) for part in parts):
        return tokenizer
    spaced = copy.deepcopy(tokenizer)  # texts share the original
    own = [spaced.backend_tokenizer.normalizer] if spaced.backend_tokenizer.normalizer is not None else []
    spaced.backend_tokenizer.normalizer = normalizers.Sequence([*own, normalizers.Prepend(" ")])
    return spaced


def tokenize_sentences(sentences: list[list[str]], tokenizer: Any, max_length: int) -> tuple[Entities, list[range]]:
    """Split sentences into word-pieces. A sentence longer than `max_length` is cut between words into several examples,
    so no word is lost.

    Returns the examples and, for each sentence, the range of its examples.
    """
    if not sentences:
        raise DataError("there is no sentence to tokenize")
    encoded = tokenizer(sentences, is_split_into_words=True, add_special_tokens=False)
    lead, tail = _special_tokens(tokenizer)
    room = max_length - len(lead) - len(tail)
    if room < 1:
        raise ConfigError(f"max_length {max_length} leaves no room for a word: use at least {max_length - room + 1}")
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    pieces: list[range] = []

    def close(window: list[int], first: list[int]) -> None:
        ids.append(torch.tensor([*lead, *window, *tail], dtype=torch.int64))
        positions.append(torch.tensor(first, dtype=torch.int64) + len(lead))

    for index, sentence in enumerate(sentences):
        before = len(ids)
        window: list[int] = []
        first: list[int] = []  # where each word of the window starts
        for word in _pieces_by_word(encoded["input_ids"][index], encoded.word_ids(index), len(sentence), tokenizer):
            if window and len(window) + len(word) > room:
                close(window, first)
                window, first = [], []
            first.append(len(window))
            window.extend(word[:room])
        close(window, first)
        pieces.append(range(before, len(ids)))
    tokens, rows = flat(ids), flat(positions)
    pad = tokenizer.pad_token_id or 0
    return Entities(tokens["ids"], tokens["start"], rows["ids"], rows["start"], pad), pieces


class Span(NamedTuple):
    """An entity with its place: `text` is [start:end] of the sentence."""

    start: int
    end: int
    type: str
    text: str


_OPENING, _CLOSING = "\"'“”‘’«([{", "\"'“”‘’»)]},;:!?.…"  # characters that may precede and follow a word
_INITIALS = re.compile(r"(?:[^\W\d_]{1,3}\.)*[^\W\d_]")  # U.S, Ph.D, J: the full stop that follows belongs to them


def split_words(text: str) -> list[tuple[int, int]]:  # start and end of each word
    """The places of the words of a text. White space separates words; quotes, brackets and punctuation at either end of
    a word are separate words, as in tagged corpora. A text that is already split in this way does not change."""
    words: list[tuple[int, int]] = []
    for chunk in re.finditer(r"\S+", text):
        opened = chunk[0].lstrip(_OPENING)
        word = opened.rstrip(_CLOSING)
        if not word:  # a smiley, three full stops: one word
            words.append(chunk.span())
            continue
        start = chunk.end() - len(opened)
        end = start + len(word)
        if text[end : end + 1] == "." and _INITIALS.fullmatch(word):
            end += 1
        words += [(i, i + 1) for i in range(chunk.start(), start)]
        words.append((start, end))
        words += [(i, i + 1) for i in range(end, chunk.end())]
    return words


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The words of a sentence joined by spaces, and the place of each word in this text."""
    ends, end = [], -1
    for word in words:
        end += 1 + len(word)
        ends.append(end)
    return " ".join(words), [(end - len(word), end) for word, end in zip(words, ends, strict=True)]


def spans(text: str, words: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Span]:
    """The entities of a tagged sentence as pieces of its text. Tags are read strictly, as for scores."""
    found = [(words[first][0], words[end - 1][1], kind) for first, end, kind in sorted(entities(tags))]
    return [Span(start, end, kind, text[start:end]) for start, end, kind in found]


def _pieces_by_word(ids: list[int], word_ids: list[int | None], words: int, tokenizer: Any) -> list[list[int]]:
    """The pieces of each word; a word that the tokenizer drops (a lone control character) becomes the unknown token."""
    pieces: list[list[int]] = [[] for _ in range(words)]
    for token, word in zip(ids, word_ids, strict=True):
        if word is not None:
            pieces[word].append(token)
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else 0
    return [word or [unknown] for word in pieces]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a sentence, as seen with a sentence of one word."""
    probe = tokenizer([["a"]], is_split_into_words=True)
    ids, words = probe["input_ids"][0], probe.word_ids(0)
    inside = [i for i, word in enumerate(words) if word is not None]
    return ids[: inside[0]], ids[inside[-1] + 1 :]
