"""Sentences for named-entity recognition: every word is a row, read at its first word-piece."""

from typing import Any

import torch
from torch import Tensor

from bace.data.texts import Texts, flat, join
from bace.errors import ConfigError, DataError
from bace.stream import Modality


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
