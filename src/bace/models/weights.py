"""A ViT's weights from one file: Google's .npz, or .safetensors or PyTorch files with timm's names (also for DeiT)."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bace.errors import ConfigError, DataError
from bace.files import parse_json

_HEADS_OF_WIDTH = {1280: 16, 1408: 16, 1664: 16}  # timm's huge, giant and gigantic; all others have heads of 64
_PYTORCH = (".pth", ".pt", ".bin")
WEIGHTS_SUFFIXES = (".npz", ".safetensors", *_PYTORCH)


@dataclass(frozen=True)
class Weights:
    """A plain ViT.

    tensors: under transformers' names.
    heads: attention heads.
    classes: the number of classes of the file's own classifier, which is left out; None if it has none.
    preprocessing: mean and deviation of its pictures, in the form of a preprocessor_config.json; empty if unknown.
    """

    tensors: dict[str, Tensor]
    heads: int
    classes: int | None
    preprocessing: dict[str, Any]


def read_weights(path: Path) -> Weights:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        found = _read_npz(path)
        tensors, heads = _renamed(_from_jax, found, path)
        classifier = found.get("head/bias")
    elif suffix in WEIGHTS_SUFFIXES:
        found = _read_pytorch(path) if suffix in _PYTORCH else _read_safetensors(path)
        tensors, heads = _renamed(_from_timm, found, path)
        classifier = found.get("head.bias")
    else:
        raise ConfigError(
            f"backbone '{path}' is a file of unknown kind: give a folder, or a file {', '.join(WEIGHTS_SUFFIXES)}."
        )
    return Weights(tensors, heads, None if classifier is None else classifier.numel(), _preprocessing(path.parent))


def _renamed(
    rename: Callable[[dict[str, Tensor], Path], tuple[dict[str, Tensor], int]], tensors: dict[str, Tensor], path: Path
) -> tuple[dict[str, Tensor], int]:
    try:
        return rename(tensors, path)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{path} has a tensor of a shape that no plain ViT has: {first_line(error)}.") from error


def _preprocessing(folder: Path) -> dict[str, Any]:
    """The preprocessing in transformers' preprocessor_config.json or timm's config.json, beside the file."""
    ours, theirs = folder / "preprocessor_config.json", folder / "config.json"
    if ours.exists():
        return read_json(ours)
    timm = read_json(theirs).get("pretrained_cfg", {}) if theirs.exists() else {}
    return {"image_mean": timm["mean"], "image_std": timm["std"]} if "mean" in timm and "std" in timm else {}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}): it is cut short or damaged.") from error
    return found


def _read_pytorch(path: Path) -> dict[str, Tensor]:
    """A state dict, or a training checkpoint that contains one. No code in the file is run."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # DeiT's training options are stored like this
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # errors of zip, pickle and end of file all mean the same to the user
        raise DataError(
            f"{path} cannot be read as weights alone ({type(error).__name__}: {first_line(error)}): it is damaged, or "
            "holds other things. Load it where you trust it and save its state_dict() with torch.save."
        ) from error
    for _ in range(3):  # a checkpoint may hold a model that holds a state dict; the limit stops self-references
        inner = [k for k in ("model", "state_dict") if isinstance(content, dict) and k in content]
        content = content[inner[0]] if inner else content
    tensors = content.items() if isinstance(content, dict) else ()
    found = {str(name).removeprefix("module."): value for name, value in tensors if isinstance(value, Tensor)}
    if not found:
        raise DataError(f"{path} holds no state dict (names and tensors), not even under 'model' or 'state_dict'.")
    return found


def _read_npz(path: Path) -> dict[str, Tensor]:
    import zipfile
    import zlib

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}): it is damaged or holds pickles.") from error


class _Taker:
    """Returns each tensor by name once, so that unused tensors are noticed."""

    def __init__(self, tensors: dict[str, Tensor], path: Path, naming: str) -> None:
        self.tensors, self.path, self.naming = dict(tensors), path, naming

    def __call__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise DataError(
                f"{self.path} has no tensor '{name}': it is not a plain ViT named as in {self.naming}. "
                "For a model saved by transformers give its folder."
            )
        return self.tensors.pop(name)

    def depth(self, block: str) -> int:  # `block`: a pattern whose group is the number
        found = (re.match(block, name) for name in self.tensors)
        return len({match[1] for match in found if match})

    def check_rest(self, *ignored: str) -> None:
        rest = sorted(name for name in self.tensors if not name.startswith(ignored))
        if rest:
            raise DataError(f"{self.path} has tensors that a plain ViT does not have, such as '{rest[0]}'.")


def _from_timm(tensors: dict[str, Tensor], path: Path) -> tuple[dict[str, Tensor], int]:
    """timm's names -> transformers' names, and the number of heads, which a timm file does not contain."""
    take = _Taker(tensors, path, "timm")
    out = {
        "embeddings.cls_token": take("cls_token"),
        "embeddings.position_embeddings": take("pos_embed"),
        "embeddings.patch_embeddings.projection.weight": take("patch_embed.proj.weight"),
        "embeddings.patch_embeddings.projection.bias": take("patch_embed.proj.bias"),
    }
    for end in ("weight", "bias"):
        out[f"layernorm.{end}"] = take(f"norm.{end}")
        for i in range(take.depth(r"blocks\.(\d+)\.")):
            stacked = take(f"blocks.{i}.attn.qkv.{end}")  # query, key and value, one above the other
            for part, rows in zip("qkv", stacked.chunk(3), strict=True):
                out[f"layers.{i}.attention.{part}_proj.{end}"] = rows
            for ours, theirs in _TIMM_BLOCK.items():
                out[f"layers.{i}.{ours}.{end}"] = take(f"blocks.{i}.{theirs}.{end}")
    take.check_rest("head.", "pre_logits.")
    width = out["embeddings.cls_token"].shape[-1]
    if width % 64:
        raise DataError(f"{path} has width {width}, which is not a multiple of 64: it has an unknown number of heads.")
    return out, _HEADS_OF_WIDTH.get(width, width // 64)


_TIMM_BLOCK = {
    "attention.o_proj": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def _from_jax(tensors: dict[str, Tensor], path: Path) -> tuple[dict[str, Tensor], int]:
    """The names of Google's JAX checkpoints -> transformers' names, and the number of heads.

    A JAX kernel is (inputs, outputs), with a separate axis for the heads; a torch weight is (outputs, inputs).
    """
    take = _Taker(tensors, path, "Google's JAX checkpoints")
    out = {
        "embeddings.cls_token": take("cls"),
        "embeddings.position_embeddings": take("Transformer/posembed_input/pos_embedding"),
        "embeddings.patch_embeddings.projection.weight": take("embedding/kernel").permute(3, 2, 0, 1),  # from HWIO
        "embeddings.patch_embeddings.projection.bias": take("embedding/bias"),
        "layernorm.weight": take("Transformer/encoder_norm/scale"),
        "layernorm.bias": take("Transformer/encoder_norm/bias"),
    }
    width, heads = out["embeddings.cls_token"].shape[-1], 0
    for i in range(take.depth(r"Transformer/encoderblock_(\d+)/")):
        ours, theirs = f"layers.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel = take(f"{attention}/{name}/kernel")  # (width, heads, width of a head)
            heads = kernel.shape[1]
            out[f"{ours}.attention.{part}_proj.weight"] = kernel.reshape(width, -1).T
            out[f"{ours}.attention.{part}_proj.bias"] = take(f"{attention}/{name}/bias").flatten()
        out[f"{ours}.attention.o_proj.weight"] = take(f"{attention}/out/kernel").reshape(-1, width).T
        out[f"{ours}.attention.o_proj.bias"] = take(f"{attention}/out/bias")
        for mine, layer in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            out[f"{ours}.mlp.{mine}.weight"] = take(f"{theirs}/MlpBlock_3/{layer}/kernel").T
            out[f"{ours}.mlp.{mine}.bias"] = take(f"{theirs}/MlpBlock_3/{layer}/bias")
        for mine, layer in (("before", "LayerNorm_0"), ("after", "LayerNorm_2")):
            out[f"{ours}.layernorm_{mine}.weight"] = take(f"{theirs}/{layer}/scale")
            out[f"{ours}.layernorm_{mine}.bias"] = take(f"{theirs}/{layer}/bias")
    take.check_rest("head/", "pre_logits/")
    return out, heads


_FOLDER_PARTS = {  # transformers' names in the files of its hub -> in its models since version 5
    "encoder.layer": "layers",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def read_folder_of_vit(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of a ViT that transformers saved, alone or as part of a classifier, in one file or several."""
    found = {}
    for path in files:
        for name, tensor in _read_safetensors(path).items():
            name = name.removeprefix("vit.")
            for theirs, ours in _FOLDER_PARTS.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
    return found


# small things


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not readable as JSON ({first_line(error)}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} should hold a JSON object, but holds a {type(content).__name__}.")
    return content


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in memory, to be hashed."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def last_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[-1].strip()
