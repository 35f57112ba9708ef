"""Texts are stored as flat token ids and padded to the longest text of the batch."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from PIL.Image import Image
from torch import Tensor

from bace.data.batch import NO_IDS, View, moved
from bace.data.decode import IMAGE_SUFFIXES, PictureOptions
from bace.data.files import Raw
from bace.data.modality import Examples, Inputs, Modality, Table, valid
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError

LETTERS = 300  # a text is shown up to this length


class Text(Modality):
    name, plural, encoder, own_data = "text", "texts", "text", "my-texts"
    input_names: tuple[str, ...] = ("text", "content", "sentence", "document", "title", "question")
    input_kinds = ("string",)
    joins = True
    file_suffixes = frozenset({".txt"})

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        cells = zip(rows, raw.values(columns, rows), strict=True)
        return [_text(values, columns, raw.where(row)) for row, values in cells]

    def recognises(self, examples: Any) -> bool:
        return isinstance(examples, list) and isinstance(examples[0], str)

    def empty(self, inputs: Inputs) -> list[int]:
        return [i for i, text in enumerate(cast("list[str]", inputs)) if not text.strip()]

    def encode(self, tables: Sequence[Table], settings: DataSettings, encoder: Any) -> tuple[Examples, list[int]]:
        texts = [text for table in tables for text in cast("list[str]", table.inputs)]
        return tokenize_texts(texts, tokenizer_of(encoder), settings.max_length), [len(table) for table in tables]

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        return Texts(kept.get("ids", NO_IDS), kept.get("start", NO_TEXTS))

    def disturbed(self, inputs: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """The words in another order."""
        mask = inputs["attention_mask"].bool()
        place = torch.rand(mask.shape, generator=rng).to(mask.device).masked_fill(~mask, 2)  # padding stays behind
        place[:, 0] = -1  # and the class token in front
        order = place.argsort(dim=1, stable=True)
        return {**inputs, "inputs_embeds": inputs["inputs_embeds"].take_along_dim(order[:, :, None], 1)}

    def from_files(self, files: Sequence[Path]) -> list[tuple[str, Any]]:
        """The lines of text files."""
        return [found for file in files for found in self.from_lines(_lines(file), str(file))]

    def from_lines(self, lines: Iterable[str], source: str) -> list[tuple[str, Any]]:
        return [(f"{source}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]

    def view(self, data: Any, example: int, row: int, backbone: Callable[[], str]) -> dict[str, Any]:
        ids = data.ids[data.start[example] : data.start[example + 1]].tolist()
        text = str(load_tokenizer(backbone()).decode(ids, skip_special_tokens=True))
        return {"text": text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"}


def _text(values: Sequence[Any], columns: Sequence[str], where: str) -> str:
    for value, column in zip(values, columns, strict=True):
        if not isinstance(value, str):
            picture = isinstance(value, Path | Image) or getattr(value, "ndim", 0) > 1
            hint = " Pictures need a model of pictures." if picture else ""
            raise DataError(f"{where}: '{column}' is {value!r:.80}. Expected a string.{hint}")
    text = " ".join(filter(None, map(str.strip, values))) if len(values) > 1 else cast(str, values[0])
    return valid(text, where)


def _lines(file: Path) -> list[str]:
    if file.suffix.lower() in IMAGE_SUFFIXES:
        raise DataError(f"'{file}' is a picture, and this model takes texts: give it texts, or choose another model")
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' cannot be read as text ({error}): this run's model takes text files") from error


TEXT = Text()
NO_TEXTS = torch.zeros(1, dtype=torch.int64)  # `start` if there are no texts


class Texts:
    """Tokenised texts.

    Args:
        ids: (tokens of all texts,) token ids, special tokens included.
        start: (examples + 1,) where each text starts in `ids`.
        pad: the tokenizer's padding id.
    """

    modality: Modality = TEXT
    row_start: Tensor | None = None  # one row per example
    random_views = False
    positions: Tensor | None = None

    def __init__(self, ids: Tensor, start: Tensor, pad: int = 0) -> None:
        self.ids, self.start, self.pad = ids, start, pad

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def lengths(self) -> Tensor:  # (examples,)
        """Tokens of each text."""
        return self.start.diff()

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        """Padded ids and mask. Texts have no random views: every view is the clean one."""
        start = self.start[examples]
        length = self.start[examples + 1] - start
        column = torch.arange(int(length.max()) if len(length) else 0)
        mask = column < length[:, None]
        ids = torch.where(mask, self.ids[(start[:, None] + column).clamp_(max=max(len(self.ids) - 1, 0))], self.pad)
        return {"input_ids": moved(ids, device), "attention_mask": moved(mask.long(), device)}

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return flat([self.ids[self.start[i] : self.start[i + 1]] for i in examples.tolist()])

    def prepend(self, kept: dict[str, Tensor]) -> None:
        self.ids, self.start = join(kept["ids"], kept["start"], self.ids, self.start)


def flat(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Ragged pieces as one flat tensor, and the start of each piece."""
    length = torch.tensor([0] + [len(piece) for piece in pieces])
    ids = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
    return {"ids": ids, "start": torch.cumsum(length, 0)}


def join(ids: Tensor, start: Tensor, more_ids: Tensor, more_start: Tensor) -> tuple[Tensor, Tensor]:
    """Two flat collections as one."""
    return torch.cat([ids, more_ids]), torch.cat([start, more_start[1:] + start[-1]])


@functools.lru_cache(maxsize=4)  # loading takes longer than predicting a text
def load_tokenizer(name: str) -> Any:
    """The fast tokenizer of a backbone, from a hub id or a local folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; to the user they all mean the same
        raise ConfigError(
            f"backbone '{name}' has no usable tokenizer ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Its folder needs tokenizer.json, or a vocabulary file (vocab.txt, or vocab.json with merges.txt)."
        ) from error
    known = len(tokenizer) - len(set(tokenizer.all_special_tokens))
    if not tokenizer.is_fast or known <= 0:
        raise ConfigError(
            f"the tokenizer of backbone '{name}' has no vocabulary: its folder needs tokenizer.json, or a vocabulary "
            "file (vocab.txt, or vocab.json with merges.txt)."
        )
    return tokenizer


class KeptTokenizer:
    """A tokenizer that an encoder and its copies share."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptTokenizer":
        return self


def tokenizer_of(encoder: Any) -> Any:
    """The tokenizer in the folder that an encoder of texts was loaded from, or in the model that it was saved with."""
    kept = encoder.tokenizer
    return load_tokenizer(encoder.config.name_or_path) if kept is None else kept.tokenizer


def tokenize_texts(texts: list[str], tokenizer: Any, max_length: int) -> Texts:
    """Texts truncated to `max_length` tokens, special tokens included."""
    encoded = tokenizer(texts, truncation=True, max_length=max_length, add_special_tokens=True)["input_ids"]
    return Texts(**flat([torch.tensor(ids, dtype=torch.int64) for ids in encoded]), pad=tokenizer.pad_token_id or 0)
