"""Texts: token ids kept flat, padded to the longest of the batch."""

import functools
from typing import Any

import torch
from torch import Tensor

from bace.data.batch import Modality, View
from bace.errors import ConfigError


class Texts:
    """Tokenised texts.

    Args:
        ids: (tokens of all texts,) token ids, special tokens included.
        start: (examples + 1,) where each text starts in `ids`.
        pad: the tokenizer's padding id.
    """

    modality: Modality = "text"
    row_start: Tensor | None = None  # a row an example
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
        """Padded ids and mask; texts have no random views, every view is the clean one."""
        start = self.start[examples]
        length = self.start[examples + 1] - start
        column = torch.arange(int(length.max()) if len(length) else 0)
        mask = column < length[:, None]
        ids = torch.where(mask, self.ids[(start[:, None] + column).clamp_(max=max(len(self.ids) - 1, 0))], self.pad)
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return flat([self.ids[self.start[i] : self.start[i + 1]] for i in examples.tolist()])

    def prepend(self, kept: dict[str, Tensor]) -> None:
        self.ids, self.start = join(kept["ids"], kept["start"], self.ids, self.start)


def flat(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Ragged pieces as one flat tensor and where each starts."""
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


def tokenize_texts(texts: list[str], tokenizer: Any, max_length: int) -> Texts:
    """Texts cut to `max_length` tokens, special tokens included."""
    encoded = tokenizer(texts, truncation=True, max_length=max_length, add_special_tokens=True)["input_ids"]
    return Texts(**flat([torch.tensor(ids, dtype=torch.int64) for ids in encoded]), pad=tokenizer.pad_token_id or 0)
