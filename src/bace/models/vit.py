"""ViT, DeiT, DINOv2 and CLIP's image tower."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from bace.models.image_encoder import CLIP_MEAN, CLIP_STD, ImageEncoder
from bace.models.plain_vit import PlainViT, ViTConfig
from bace.models.weights import Weights


class ViTEncoder(ImageEncoder):
    blocks_at = "layers"
    default_mean = default_std = (0.5, 0.5, 0.5)

    def _embed(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.embeddings(pixels))


class DeiTEncoder(ImageEncoder):
    """DeiT with its distillation token, at position 1. (DeiT without one is stored, and loaded, as a ViT.)"""

    transformers_class = "DeiTModel"
    blocks_at = "layers"


class Dinov2Encoder(ImageEncoder):
    transformers_class = "Dinov2Model"
    has_pooler = False
    mlp_branch = ("norm2", "layer_scale2")
    attention_norm = "norm1"

    def __init__(
        self, model: nn.Module, preprocessing: dict[str, Any] | None = None, image_size: int | None = None
    ) -> None:
        super().__init__(model, preprocessing, image_size)
        if self.config.use_swiglu_ffn:
            self.mlp_end = "mlp.down_proj"
        # For pre-training only; a parameter that never gets a gradient would break training in several processes.
        self.embeddings.register_parameter("mask_token", None)

    def _embed(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.embeddings(pixels))  # always interpolates where it must


class ClipEncoder(ImageEncoder):
    """CLIP's image tower, from a folder of CLIP or of the tower alone. The feature is the class token after the final
    LayerNorm, before the projection into the space shared with texts."""

    transformers_class = "CLIPVisionModel"
    has_pooler = False
    blocks_at = "encoder.layers"
    norm_at = "post_layernorm"
    attention_end = "self_attn.out_proj"
    mlp_branch = ("layer_norm2", "mlp")
    query_and_value = ("self_attn.q_proj", "self_attn.v_proj")
    key = "self_attn.k_proj"
    attention_norm = "layer_norm1"
    default_mean, default_std = CLIP_MEAN, CLIP_STD

    def __init__(
        self, model: nn.Module, preprocessing: dict[str, Any] | None = None, image_size: int | None = None
    ) -> None:
        super().__init__(model, preprocessing, image_size)
        self.embeddings.add_module("norm", model.get_submodule("pre_layrnorm"))

    def _embed(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.embeddings.get_submodule("norm")(super()._embed(pixels)))


def vit_of_shape(weights: Weights) -> PlainViT:
    """A ViT whose shape is taken from its weights."""
    tensors = weights.tensors
    width, channels, patch, _ = tensors["embeddings.patch_embeddings.projection.weight"].shape
    grid = round((tensors["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=len({key.split(".")[1] for key in tensors if key.startswith("layers.")}),
        num_attention_heads=weights.heads,
        intermediate_size=tensors["layers.0.mlp.fc1.weight"].shape[0],
        image_size=grid * patch,
        patch_size=patch,
        num_channels=channels,
        layer_norm_eps=1e-6,  # of both JAX and timm; transformers' default is 1e-12
    )
    model, missing = filled_vit(config, tensors)
    if missing:
        raise ValueError(f"there is no {missing[0]}")
    return model


def filled_vit(config: ViTConfig, tensors: Mapping[str, Tensor]) -> tuple[PlainViT, list[str]]:
    """A ViT filled with those of these tensors that it has, and the names of those that are missing."""
    with torch.device("meta"):  # only shapes, because all values are replaced
        model = PlainViT(config)
    names = model.state_dict().keys() & tensors.keys()
    for name in sorted(names):
        if tensors[name].dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{name} has numbers of type {tensors[name].dtype}: quantised weights are not supported")
    copies = {name: tensors[name].to(torch.get_default_dtype(), copy=True).contiguous() for name in names}
    return model, sorted(model.load_state_dict(copies, strict=False, assign=True).missing_keys)
