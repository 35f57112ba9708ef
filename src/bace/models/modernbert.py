"""ModernBERT."""

from typing import cast

import torch
from torch import Tensor, nn

from bace.models.products import use_fast_products
from bace.models.text_encoder import TextEncoder


class Projections(nn.Module):
    """Query, key and value as separate Linears instead of the original's single one, because LoRA needs them
    separately."""

    def __init__(self, stacked: nn.Linear) -> None:
        super().__init__()
        self.query, self.key, self.value = (_rows(stacked, third) for third in range(3))

    def forward(
        self,
        x: Tensor,  # (..., width)
    ) -> Tensor:  # (..., 3 width)
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


class ModernBertBlock(nn.Module):
    """A block that computes the rotations and the window of its attention itself. Both depend only on the number of
    tokens, so prompts may be inserted. In blocks with a window, a token attends only to tokens (and prompts) near
    it."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, window: int | None) -> None:
        super().__init__()
        self.layer, self.rotary, self.window = layer, rotary, window

    def forward(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor,  # (examples, 1, 1, tokens)
    ) -> Tensor:  # (examples, tokens, width)
        at = torch.arange(hidden.shape[1], device=hidden.device)
        if self.window is not None:
            distance = (at[:, None] - at).abs()
            mask = mask & (distance <= self.window) | (distance == 0)  # padding far from all words attends to itself
        rotations = self.rotary(hidden, at[None], self.layer.attention_type)
        return cast(Tensor, self.layer(hidden, mask, position_embeddings=rotations))


class ModernBertEncoder(TextEncoder):
    transformers_class = "ModernBertModel"
    has_pooler = False
    has_token_types = False
    words_at = "tok_embeddings"
    blocks_at = "layers"
    norm_at = "final_norm"
    attention_end = "layer.attn.Wo"
    mlp_end = "layer.mlp.Wo"
    mlp_branch = ("layer.mlp_norm", "layer.mlp")
    query_and_value = ("layer.attn.Wqkv.query", "layer.attn.Wqkv.value")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        rotary, blocks = model.get_submodule("rotary_emb"), []
        for layer in self.blocks:
            attention = layer.get_submodule("attn")
            attention.add_module("Wqkv", Projections(cast(nn.Linear, attention.get_submodule("Wqkv"))))
            local = layer.attention_type == "sliding_attention"
            blocks.append(ModernBertBlock(layer, rotary, self.config.sliding_window if local else None))
        self.blocks = nn.ModuleList(blocks)
        use_fast_products(self.blocks)  # also the separate projections


def _rows(stacked: nn.Linear, third: int) -> nn.Linear:
    """The Linear that computes one third of the outputs."""
    linear = nn.Linear(stacked.in_features, stacked.out_features // 3, stacked.bias is not None, device="meta")
    linear.weight = nn.Parameter(stacked.weight.detach().chunk(3)[third].clone())
    if stacked.bias is not None:
        linear.bias = nn.Parameter(stacked.bias.detach().chunk(3)[third].clone())
    return linear
