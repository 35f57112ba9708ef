"""The pooling of a text's tokens into its feature, and its settings in a folder of sentence-transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from bace.errors import ConfigError, DataError
from bace.files import inside, parse_json
from bace.models.weights import first_line, read_json

Pooling = Literal["class", "mean", "max"]
_THEIRS: dict[str, Pooling] = {"cls": "class", "mean": "mean", "max": "max"}  # newer files have one word,
_FLAGS = {  # older ones a flag for each kind
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooled(
    hidden: Tensor,  # (texts, tokens, width)
    attention_mask: Tensor,  # (texts, tokens)
    pooling: Pooling,
) -> Tensor:  # (texts, width)
    """The class token, or the mean or maximum over a text's tokens, including special tokens but not padding."""
    if pooling == "class":
        return hidden[:, 0]
    real = attention_mask.bool()[:, :, None]
    if pooling == "max":
        return hidden.masked_fill(~real, -float("inf")).amax(1)
    return hidden.masked_fill(~real, 0.0).sum(1) / real.sum(1)


def unit_length(
    features: Tensor,  # (texts, width)
) -> Tensor:  # (texts, width)
    return F.normalize(features, dim=1)


@dataclass(frozen=True)
class Sentence:
    """A folder of sentence-transformers.

    transformer: the folder of its encoder, in transformers' layout.
    pooling: how tokens become features.
    normalised: whether features are then scaled to unit length.
    """

    transformer: Path
    pooling: Pooling
    normalised: bool


def read_sentence_folder(folder: Path) -> Sentence | None:
    """The content of modules.json and the configuration of the pooling; None for other folders."""
    listed = folder / "modules.json"
    if not listed.exists():
        return None
    try:
        modules = parse_json(listed.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [inside(folder, str(module["path"])) if module["path"] else folder for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{listed} is not a list of modules with type and path ({first_line(error)}).") from error
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{listed} has the modules {', '.join(kinds) or 'none'}; supported are Transformer, Pooling and, if "
            "wanted, Normalize. Give the folder of its transformer without modules.json to use that alone."
        )
    return Sentence(paths[0], _pooling(paths[1] / "config.json"), len(kinds) == 3)


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
    given: Any = config.get("pooling_mode") or [kind for flag, kind in _FLAGS.items() if config.get(flag)] or "mean"
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _THEIRS:
        raise ConfigError(
            f"{file} pools by {' and '.join(map(str, modes))}; supported is one of {', '.join(_THEIRS)}. Remove "
            "modules.json to use the class token, or set backbone.pooling then."
        )
    return _THEIRS[modes[0]]
