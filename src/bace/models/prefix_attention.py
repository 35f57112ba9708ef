"""Attention with learned keys and values before those of the tokens.

Li and Liang, Prefix-Tuning: Optimizing Continuous Prompts for Generation, ACL 2021.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Prefix = tuple[Tensor, Tensor]  # keys and values, (examples, length, width) each

NAME = "sdpa-with-prefix"


def register() -> str:
    """Register this attention with transformers, whose blocks pass the keyword `prefix` on to it, and return its
    name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: nn.Module,
    query: Tensor,  # (examples, heads, tokens, width of a head)
    key: Tensor,  # the same
    value: Tensor,  # the same
    attention_mask: Tensor | None,  # (examples, 1, 1, tokens), true where a token may be attended to; or with prefix
    prefix: Prefix | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,  # None: 1 / sqrt(d)
    **others: Any,  # options of transformers' other attentions
) -> tuple[Tensor, None]:  # (examples, tokens, heads, width of a head)
    """softmax(Q [P_K ; K]^T / sqrt(d)) [P_V ; V]. The attention is not causal."""
    for name in ("is_causal", "softcap", "position_bias"):
        if isinstance(given := others.get(name), Tensor) or given:
            raise NotImplementedError(f"this attention does not take {name}")
    if prefix is not None and prefix[0].shape[1]:
        key, value = (torch.cat([by_head(p, own), own], 2) for p, own in zip(prefix, (key, value), strict=True))
        if attention_mask is not None:  # every token attends to the whole prefix, unless the mask covers it, too
            attention_mask = F.pad(attention_mask, (key.shape[2] - attention_mask.shape[-1], 0), value=True)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return attended.transpose(1, 2).contiguous(), None


def by_head(
    prefix: Tensor,  # (examples, length, width)
    own: Tensor,  # (examples, heads, tokens, width of a head)
) -> Tensor:  # (examples, heads, length, width of a head)
    examples, heads, _, width = own.shape
    return prefix.reshape(examples, -1, heads, width).transpose(1, 2).to(own.dtype)
