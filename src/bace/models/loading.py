"""Load an encoder by a name, from a folder or from a file.

`transformers` takes seconds to import, so it is imported where it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bace.errors import ConfigError, DataError
from bace.files import inside
from bace.models import prefix_attention
from bace.models.backbones import backbone_path, find_backbone
from bace.models.bert import BertEncoder, DistilBertEncoder, RobertaEncoder
from bace.models.deberta import DebertaEncoder
from bace.models.encoder import Encoder
from bace.models.image_encoder import IMAGENET_MEAN, IMAGENET_STD, ImageEncoder
from bace.models.modernbert import ModernBertEncoder
from bace.models.plain_vit import ViTConfig
from bace.models.pooling import read_sentence_folder
from bace.models.text_encoder import TextEncoder
from bace.models.vit import ClipEncoder, DeiTEncoder, Dinov2Encoder, ViTEncoder, filled_vit, vit_of_shape
from bace.models.weights import first_line, last_line, read_folder_of_vit, read_json, read_weights

FAMILIES: dict[str, type[ImageEncoder] | type[TextEncoder]] = {  # by the `model_type` of config.json
    "vit": ViTEncoder,
    "deit": DeiTEncoder,
    "dinov2": Dinov2Encoder,
    "clip": ClipEncoder,
    "clip_vision_model": ClipEncoder,
    "bert": BertEncoder,
    "roberta": RobertaEncoder,
    "distilbert": DistilBertEncoder,
    "deberta-v2": DebertaEncoder,  # of DeBERTa-v3 too
    "modernbert": ModernBertEncoder,
}


def load_encoder(name: str, *, image_size: int | None = None) -> Encoder:
    """A pre-trained encoder, in torch's default dtype (float32 unless set otherwise) and eval mode.

    Args:
        name: a name of `bace list backbones`, a hub id, a folder in the layout of transformers, of timm's hub sets or
            of sentence-transformers (whose pooling it then has), or a weights file of a ViT: `.npz` as Google published
            them, `.safetensors` or PyTorch's `.pth` with timm's names.
        image_size: side of the pictures it will be given, if not the one it was made for; images only.
    """
    path = backbone_path(name)
    file, sentence = _weights_file(path), read_sentence_folder(path)
    folder = sentence.transformer if sentence else path
    family, model, preprocessing = _load_file(file, name) if file else _load_folder(folder)
    if issubclass(family, ImageEncoder):
        return family(model, preprocessing, image_size).eval()
    if image_size is not None:
        raise ConfigError(f"backbone '{name}' reads texts: leave out image_size ({image_size}).")
    encoder = family(model).eval()
    if sentence:
        encoder.pooling, encoder.normalised = sentence.pooling, sentence.normalised
    return encoder


def encoder_modality(name: str) -> str | None:
    """What a backbone reads, "image" or "text", found without loading its weights; None if its files do not say."""
    path = backbone_path(name)
    if _weights_file(path):
        return ViTEncoder.modality
    sentence = read_sentence_folder(path)
    config = (sentence.transformer if sentence else path) / "config.json"
    family = FAMILIES.get(str(read_json(config).get("model_type"))) if config.exists() else None
    return family.modality if family else None


def describe_backbone(name: str) -> dict[str, Any]:
    """The output of `bace check backbone`, which loads the backbone and lets it read one example."""
    path = backbone_path(name)
    encoder = load_encoder(name)
    with torch.no_grad():
        features = cast(Tensor, encoder(encoder.example()))
    if not torch.isfinite(features).all():
        raise DataError(f"backbone '{name}' loads but gives numbers that are not finite: its weights are damaged.")
    declared = find_backbone(name)
    return {
        "files": str(path),
        "family": next(key for key, family in FAMILIES.items() if type(encoder) is family),
        "width": encoder.width,
        "layers": len(encoder.blocks),
        "parameters": f"{sum(p.numel() for p in encoder.parameters()):,}",
        **encoder.reads(),
        "classifier": _classifier(path),
        "source": (declared and declared.hub) or "no hub id",
        "terms": declared.terms if declared else "not one of `bace list backbones`: see where you have it from",
        "note": declared.note if declared else "",
    }


def _classifier(path: Path) -> str:
    file = _weights_file(path)
    classes = read_weights(file).classes if file else None
    return "none" if classes is None else f"of {classes} classes, left out"


def _weights_file(path: Path) -> Path | None:
    """The file itself, or that of a folder in timm's layout, whose config.json has no model_type."""
    if path.is_file():
        return path
    config = path / "config.json"
    return path / "model.safetensors" if config.exists() and "architecture" in read_json(config) else None


_Loaded = tuple[type[ImageEncoder] | type[TextEncoder], nn.Module, dict[str, Any]]


def _load_file(path: Path, name: str) -> _Loaded:
    weights = read_weights(path)
    try:
        model = vit_of_shape(weights)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:  # torch lists the tensors, one a line
        raise DataError(f"{path} is not a plain ViT with a square grid of positions: {last_line(error)}") from error
    preprocessing = weights.preprocessing
    if not preprocessing and "deit" in f"{name} {path.name}".lower():  # a DeiT file looks like any ViT's
        preprocessing = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    return ViTEncoder, model, preprocessing


def _load_folder(folder: Path) -> _Loaded:
    config_file = folder / "config.json"
    if not config_file.exists():
        raise DataError(f"{folder} has no config.json: give a folder in the layout of transformers (save_pretrained).")
    model_type = read_json(config_file).get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{config_file} has model_type {model_type!r}, which is not supported. Supported: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    weights, parts = _check_weights(folder)
    model, missing = _own_vit(folder, parts) if family is ViTEncoder else _from_transformers(family, folder, weights)
    if missing:
        raise DataError(f"{weights} lacks {len(missing)} tensors of a {model_type} model, such as {missing[0]}.")
    preprocessing = folder / "preprocessor_config.json"
    return family, model, read_json(preprocessing) if preprocessing.exists() else {}


def _own_vit(folder: Path, parts: list[Path]) -> tuple[nn.Module, list[str]]:
    """A model, and the names of the tensors that its files lack."""
    tensors = read_folder_of_vit(parts)
    try:
        return filled_vit(ViTConfig.from_dict(read_json(folder / "config.json")), tensors)
    except ValueError as error:
        raise DataError(f"{folder} is a ViT that cannot be read: {error}.") from error
    except RuntimeError as error:  # torch lists the tensors, one a line
        raise _unfit(parts[0], error, last_line(error)) from error


def _from_transformers(family: type[Encoder], folder: Path, weights: Path) -> tuple[nn.Module, list[str]]:
    """A model, and the names of the tensors that its files lack, which transformers draws at random."""
    import transformers

    with _quiet():
        try:
            model, info = getattr(transformers, family.transformers_class).from_pretrained(
                folder,
                dtype=torch.get_default_dtype(),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **transformers_options(family),
            )
        except Exception as error:  # transformers raises many kinds; to the user they all mean the same
            raise _unfit(weights, error, first_line(error)) from error
    return model, sorted(info["missing_keys"])


def _unfit(weights: Path, error: Exception, reason: str) -> DataError:
    return DataError(
        f"{weights} does not fit {weights.with_name('config.json')} ({type(error).__name__}: {reason:.200}). "
        "Get both from the same model again."
    )


def transformers_options(family: type[Encoder]) -> dict[str, Any]:
    """How a model of this family is made by transformers."""
    attention = prefix_attention.register() if family.takes_prefixes else family.attention
    pooler = {"add_pooling_layer": False} if family.has_pooler else {}
    return {"attn_implementation": attention, **pooler}


def _check_weights(folder: Path) -> tuple[Path, list[Path]]:
    """The file with the weights (or with the index of their parts) and the parts, after a check of every header."""
    from safetensors import SafetensorError, safe_open

    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if weights.exists():
        parts = [weights]
    elif index.exists():
        weights = index
        try:
            parts = [inside(folder, part) for part in sorted(set(read_json(index)["weight_map"].values()))]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{index} is not a list of the parts of a model in its folder ({error}).") from error
    else:
        raise DataError(
            f"{folder} has no model.safetensors. Pickled weights (pytorch_model.bin) are not read: load the model with "
            "transformers and save_pretrained it once."
        )
    for part in parts:
        try:
            with safe_open(part, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DataError(f"{part} cannot be read ({first_line(error)}): it is cut short or damaged.") from error
    return weights, parts


@contextmanager
def _quiet() -> Iterator[None]:
    """Load weights without a progress bar and without a report of ignored heads, then restore both."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
