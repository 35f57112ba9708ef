"""The nine families at width 32 with 3 blocks, random in every weight, made by transformers itself."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

IMAGES = ("vit", "deit", "dinov2", "clip")
TEXTS = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert")
FAMILIES = IMAGES + TEXTS
WIDTH, DEPTH, SIZE, PATCH, PAD = 32, 3, 32, 8, 1


def tiny_model(family: str, **changes: Any) -> Any:
    """A transformers model, with its pooler and in eval mode. Dropout is high, so that unwanted dropout is noticed."""
    image = {"image_size": SIZE, "patch_size": PATCH}
    common = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "hidden_dropout_prob": 0.5}
    text = {"vocab_size": 50, "max_position_embeddings": 24, "pad_token_id": PAD}
    distil = {"dim": WIDTH, "n_layers": DEPTH, "n_heads": 4, "hidden_dim": 48, "dropout": 0.5}
    clip = {k: v for k, v in common.items() if k != "hidden_dropout_prob"} | {"attention_dropout": 0.5}
    far = {"relative_attention": True, "position_buckets": 4, "max_relative_positions": 24, "share_att_key": True}
    v3 = {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}
    v3 |= far | {"norm_rel_ebd": "layer_norm"}
    modern = {"local_attention": 4, "global_attn_every_n_layers": 3, "mlp_dropout": 0.5, "attention_dropout": 0.5}
    special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "vit": ("ViT", common | image | {"intermediate_size": 48}),
        "deit": ("DeiT", common | image | {"intermediate_size": 48}),
        "dinov2": ("Dinov2", common | image | {"mlp_ratio": 2}),
        "bert": ("Bert", common | text | {"intermediate_size": 48}),
        "roberta": ("Roberta", common | text | {"intermediate_size": 48, "type_vocab_size": 2}),
        "distilbert": ("DistilBert", distil | text),
        "clip": ("CLIPVision", clip | image | {"intermediate_size": 48}),
        "deberta-v2": ("DebertaV2", common | text | v3 | {"intermediate_size": 48}),
        "modernbert": ("ModernBert", common | text | modern | special | {"intermediate_size": 48}),
    }
    name, config = settings[family]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**(config | changes)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # transformers initialises biases, class tokens and some position tables with zeros
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def tiny_inputs(family: str, height: int = SIZE, width: int = SIZE) -> dict[str, Tensor]:
    """Two pictures, or three texts of 9, 6 and 2 tokens with padding."""
    generator = torch.Generator().manual_seed(3)
    if family in IMAGES:
        return {"pixel_values": torch.randn(2, 3, height, width, generator=generator)}
    mask = torch.arange(9) < torch.tensor([9, 6, 2])[:, None]
    ids = torch.randint(PAD + 1, 50, (3, 9), generator=generator).where(mask, PAD)
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if family not in ("distilbert", "modernbert"):
        inputs["token_type_ids"] = torch.randint(0, 2, (3, 9), generator=generator)
    return inputs


def reference(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """The output of transformers. DINOv2 interpolates positions by itself, and transformers applies CLIP's final
    LayerNorm only to the first token."""
    if "pixel_values" in inputs and model.config.model_type != "dinov2":
        options["interpolate_pos_encoding"] = True
    with torch.no_grad():
        out = model(**inputs, **options)
        if model.config.model_type == "clip_vision_model":
            out.last_hidden_state = model.post_layernorm(out.last_hidden_state)
            torch.testing.assert_close(out.last_hidden_state[:, 0], out.pooler_output)
    return out
