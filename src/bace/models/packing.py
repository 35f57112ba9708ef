"""The parts of an encoder, besides its weights, that a saved model needs: configuration, tokenizer and identity.

The weights of the encoder are among the tensors of the model. With these parts, a model loads on a machine that has
neither the encoder's files nor a network. None of them is code: configurations and tokenizers are JSON, and the class
is one of `FAMILIES`.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from bace.data.modalities.text import KeptTokenizer, tokenizer_of
from bace.errors import CheckpointError
from bace.models.backbones import backbone_path
from bace.models.encoder import Encoder
from bace.models.image_encoder import ImageEncoder
from bace.models.loading import FAMILIES, transformers_options
from bace.models.model import parameter_count
from bace.models.plain_vit import PlainViT, ViTConfig
from bace.models.pooling import Pooling
from bace.models.text_encoder import TextEncoder
from bace.models.vit import ViTEncoder
from bace.models.weights import raw_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MOST_LAYERS, MOST_PIXELS = 1000, 4096  # layers, and pixels of a side, that an encoder in a stranger's file may have
# entries of a configuration that are left out: its origin, and the labels of a classifier, which is not used and could
# take any amount of memory with a forged number of labels
LEFT_OUT = ("_name_or_path", "auto_map", "num_labels", "id2label", "label2id")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An encoder without its weights.

    name, revision, sha256: the identity of the pre-trained encoder: the user's name for it, the hub's commit if it came
        from there, and the hash of its weights.
    config: as in transformers' config.json.
    image_size, mean, std: the preprocessing of pictures.
    pooling, normalised: how the feature of a text is computed.
    tokenizer: the contents of its files.
    """

    name: str
    revision: str | None = None
    sha256: str
    config: dict[str, Any]
    image_size: int | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    pooling: str = "class"
    normalised: bool = False
    tokenizer: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not set(TOKENIZER_FILES).issuperset(self.tokenizer):
            raise ValueError(f"'tokenizer' has other files than {', '.join(TOKENIZER_FILES)}")
        if self.image_size is not None and not 0 < self.image_size <= MOST_PIXELS:
            raise ValueError(f"'image_size' is {self.image_size}: at most {MOST_PIXELS} pixels are read")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"'pooling' is '{self.pooling}', none of {', '.join(get_args(Pooling))}")


def pack(encoder: Encoder, name: str) -> Packed | None:
    """The encoder as loaded from the backbone of this name, before anything is trained or added; None for one that a
    program has made itself (`OWN`)."""
    if type(encoder) not in FAMILIES.values():
        return None
    config = {key: value for key, value in encoder.config.to_dict().items() if key not in LEFT_OUT}
    about: dict[str, Any] = {"name": name, "config": json.loads(json.dumps(config, default=str))}
    about |= {"revision": revision(name), "sha256": weights_hash(encoder)}
    if isinstance(encoder, ImageEncoder):
        about |= {"image_size": encoder.image_size, "mean": encoder.mean, "std": encoder.std}
    if isinstance(encoder, TextEncoder):
        about |= {"pooling": encoder.pooling, "normalised": encoder.normalised}
        about["tokenizer"] = tokenizer_files(tokenizer_of(encoder))
    return Packed(**about)


def unpack(packed: Packed, most: int) -> Encoder:
    """The encoder with at most `most` weights, which are still to be filled in."""
    family = FAMILIES[packed.config["model_type"]]
    about = {key: value for key, value in packed.config.items() if key not in LEFT_OUT}
    config, make = _maker(family, about)
    if not 0 < config.num_hidden_layers <= MOST_LAYERS:
        raise CheckpointError(f"its encoder has {config.num_hidden_layers} layers: at most {MOST_LAYERS} are read")
    with torch.device("meta"):  # parameters are counted before any memory is allocated
        count = parameter_count(make())
    if count > most:
        raise CheckpointError(f"its encoder has {count:,} parameters, but there are {most:,} numbers in the file")
    model = make()
    if issubclass(family, ImageEncoder):
        preparation = {"image_mean": list(packed.mean), "image_std": list(packed.std)}
        return family(model, preparation, packed.image_size).eval()
    encoder = family(model).eval()
    encoder.pooling, encoder.normalised = cast(Pooling, packed.pooling), packed.normalised
    encoder.tokenizer = KeptTokenizer(read_tokenizer(packed.tokenizer))
    return encoder


def _maker(family: type[Encoder], about: dict[str, Any]) -> tuple[Any, Callable[[], nn.Module]]:
    """The configuration of an encoder, and a function that makes its model."""
    if family is ViTEncoder:
        shape = ViTConfig.from_dict(about)
        return shape, lambda: PlainViT(shape)
    import transformers

    kind = getattr(transformers, family.transformers_class)
    config, options = kind.config_class.from_dict(about), transformers_options(family)
    return config, lambda: kind._from_config(config, dtype=torch.get_default_dtype(), **options)


def revision(name: str) -> str | None:
    """The commit of a backbone that came from the hub, read from its place in the cache."""
    found = re.search(r"/snapshots/([0-9a-f]{40})", backbone_path(name).as_posix())
    return found[1] if found else None


def weights_hash(encoder: Encoder) -> str:
    total = hashlib.sha256()
    for name, value in sorted(encoder.state_dict().items()):
        total.update(name.encode())
        total.update(raw_bytes(value))
    return total.hexdigest()


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found = {name: Path(folder, name) for name in TOKENIZER_FILES}
        return {name: path.read_text(encoding="utf-8") for name, path in found.items() if path.exists()}


def read_tokenizer(files: dict[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        return PreTrainedTokenizerFast.from_pretrained(folder)
