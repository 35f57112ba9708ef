"""Sentences for named-entity recognition: every word is a row, read at its first word-piece."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bace.data.batch import Modality
from bace.data.modalities.text import Texts, flat, join
from bace.errors import ConfigError, DataError


class Entities(Texts):
    """Tokenised sentences; `positions` and `row_start` say where each word's first piece is (see Stream)."""

    modality: Modality = "token"
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


def tokenize_sentences(sentences: list[list[str]], tokenizer: Any, max_length: int) -> tuple[Entities, list[range]]:
    """Sentences as word-pieces; one over `max_length` is cut at words into several examples, so no word is lost.

    Returns the examples and, for each sentence, which of them are its pieces.
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
    """An entity where it stands in its text: `text` is the text's [start:end]."""

    start: int
    end: int
    type: str
    text: str


_OPENING, _CLOSING = "\"'“”‘’«([{", "\"'“”‘’»)]},;:!?.…"  # what may stand before and after a word
_INITIALS = re.compile(r"(?:[^\W\d_]{1,3}\.)*[^\W\d_]")  # U.S, Ph.D, J: the full stop that follows is theirs


def split_words(text: str) -> list[tuple[int, int]]:  # start and end of each word
    """Where the words of a text are: what white space separates, but quotes, brackets and punctuation at the ends of a
    word are words of their own, as in tagged corpora. Text that is split like that already stays as it is."""
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
    """A sentence of words as a text, with a space between them, and where each of them is in it."""
    ends, end = [], -1
    for word in words:
        end += 1 + len(word)
        ends.append(end)
    return " ".join(words), [(end - len(word), end) for word, end in zip(words, ends, strict=True)]


def spans(text: str, words: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Span]:
    """The entities of a tagged sentence as pieces of its text, by the strict reading of its tags that scores take."""
    found = [(words[first][0], words[end - 1][1], kind) for first, end, kind in sorted(entities(tags))]
    return [Span(start, end, kind, text[start:end]) for start, end, kind in found]


def _pieces_by_word(ids: list[int], word_ids: list[int | None], words: int, tokenizer: Any) -> list[list[int]]:
    """Each word's pieces; a word the tokenizer drops (a lone control character) becomes the unknown token."""
    pieces: list[list[int]] = [[] for _ in range(words)]
    for token, word in zip(ids, word_ids, strict=True):
        if word is not None:
            pieces[word].append(token)
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else 0
    return [word or [unknown] for word in pieces]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a sentence, read off one word."""
    probe = tokenizer([["a"]], is_split_into_words=True)
    ids, words = probe["input_ids"][0], probe.word_ids(0)
    inside = [i for i, word in enumerate(words) if word is not None]
    return ids[: inside[0]], ids[inside[-1] + 1 :]


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The (start, end, type) of every entity of a sentence tagged in IOB2; `end` is the word after the last.

    Strict, as seqeval's strict mode: an entity is a B- tag and the I- tags of its type that follow it; an I- tag that
    continues nothing is no entity.
    """
    found = set()
    start, kind = 0, None  # the open entity
    for position, tag in enumerate(tags):
        prefix, _, name = tag.partition("-")
        if tag != "O" and not (prefix in ("B", "I") and name):
            raise DataError(f"tag '{tag}' of word {position} is not IOB2: use O, B-type or I-type.")
        if prefix == "I" and name == kind:
            continue
        if kind is not None:
            found.add((start, position, kind))
        start, kind = position, name if prefix == "B" else None
    if kind is not None:
        found.add((start, len(tags), kind))
    return found
