"""The plain Vision Transformer, the architecture of ViT and of DeiT without a distillation token.

Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale, ICLR 2021.

Its weights have the names of transformers' ViTModel, and it computes the same. transformers has every other family, but
its import takes seconds, almost as long as everything else that happens before the first step of a run on pictures.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.models import prefix_attention
from bace.models.prefix_attention import Prefix


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": functools.partial(F.gelu, approximate="tanh"),
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class ViTConfig:
    """Its shape, under the names of transformers' config.json and with the same defaults."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    layer_norm_eps: float = 1e-12
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True

    model_type: ClassVar[str] = "vit"
    _attn_implementation: ClassVar[str] = prefix_attention.NAME

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            kind, found = type(field.default), type(value)
            if found is not kind and not (kind is float and found is int):
                raise ValueError(f"'{field.name}' should be of type {kind.__name__}, but is {value!r:.50}")
            if kind is int and not value > 0:
                raise ValueError(f"'{field.name}' should be at least 1, but is {value}")
            if kind is float and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"'{field.name}' should be a number from 0, but is {value}")
        if max(self.hidden_dropout_prob, self.attention_probs_dropout_prob) >= 1:
            raise ValueError("a probability of dropout is 1 or more")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"a width of {self.hidden_size} cannot be divided among {self.num_attention_heads} heads")
        if self.image_size < self.patch_size:
            raise ValueError(f"a picture of {self.image_size} pixels has no patch of {self.patch_size}")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"'hidden_act' is '{self.hidden_act:.50}', none of {', '.join(ACTIVATIONS)}")

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """From the content of a config.json. Entries that a plain ViT does not have are left out."""
        if found.get("quantization_config"):
            raise ValueError("its weights are quantised, which is not supported")
        names = {field.name for field in dataclasses.fields(cls)}
        taken = {name: value for name, value in found.items() if name in names}
        for name in ("image_size", "patch_size"):  # may be height and width
            if isinstance(value := taken.get(name), list | tuple) and value and all(v == value[0] for v in value):
                taken[name] = value[0]
        return cls(**taken)

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


class PlainViT(nn.Module):
    """Its parts. `bace.models.vit.ViTEncoder` puts them together."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)


class Embeddings(nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos (equation 1)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.grid = config.hidden_size, config.image_size // config.patch_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, self.grid**2 + 1, width))
        self.patch_embeddings = Patches(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        pixels: Tensor,  # (examples, channels, height, width)
    ) -> Tensor:  # (examples, 1 + patches, width)
        patches = self.patch_embeddings.projection(pixels)  # (examples, width, rows, columns)
        rows, columns = patches.shape[2:]
        hidden = torch.cat([self.cls_token.expand(pixels.shape[0], -1, -1), patches.flatten(2).mT], 1)
        embedded: Tensor = self.dropout(hidden + self.positions(rows, columns))
        return embedded

    def positions(self, rows: int, columns: int) -> Tensor:  # (1, 1 + patches, width)
        """The table, interpolated if the pictures have another size than those that it was learned on."""
        if rows == columns == self.grid:
            return self.position_embeddings
        first, rest = self.position_embeddings[:, :1], self.position_embeddings[:, 1:]
        table = rest.mT.unflatten(2, (self.grid, self.grid))  # (1, width, rows, columns)
        resized = F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([first, resized.flatten(2).mT], 1)


class Patches(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        # in transformers' order, by which saved models number what was added to them
        self.attention = Attention(config)
        self.layernorm_before = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # (examples, tokens, width)
        # equations 2 and 3: z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'
        hidden = self.dropout(self.attention(self.layernorm_before(hidden), mask, prefix)) + hidden
        hidden = self.dropout(self.mlp(self.layernorm_after(hidden))) + hidden
        return hidden


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(width, width, config.qkv_bias)
        self.k_proj = nn.Linear(width, width, config.qkv_bias)
        self.v_proj = nn.Linear(width, width, config.qkv_bias)
        self.o_proj = nn.Linear(width, width)
        self.dropout = config.attention_probs_dropout_prob

    def forward(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # (examples, tokens, width)
        query, key, value = (
            part(hidden).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (examples, heads, tokens, width of a head)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.dropout if self.training else 0.0
        attended, _ = prefix_attention.attend(self, query, key, value, mask, prefix, dropout=dropout)
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:  # (examples, tokens, width) both
        result: Tensor = self.fc2(self.activation(self.fc1(hidden)))
        return result
