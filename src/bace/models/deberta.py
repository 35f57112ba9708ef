"""DeBERTa-v2 and -v3."""

from typing import cast

from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.text_encoder import TextEncoder


class DebertaBlock(nn.Module):
    """A block that returns only its hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor,  # (examples, 1, 1, tokens)
        rel_embeddings: Tensor,  # (distances, width)
    ) -> Tensor:  # (examples, tokens, width)
        """The distances between tokens depend only on their number, so prompts may be inserted."""
        return cast(Tensor, self.layer(hidden, mask, rel_embeddings=rel_embeddings)[0])


class DebertaEncoder(TextEncoder):
    """Tokens attend by their content and by their distance from each other. All blocks share the vectors of the
    distances, which belong to the embeddings and are frozen with them."""

    transformers_class = "DebertaV2Model"
    has_pooler = False
    attention = "eager"  # it has no other
    attention_end = "layer.attention.output.dense"
    mlp_end = "layer.output.dense"
    mlp_branch = ("layer.intermediate", "layer.output.dense")
    query_and_value = ("layer.attention.self.query_proj", "layer.attention.self.value_proj")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        encoder = model.get_submodule("encoder")
        if not self.config.relative_attention or encoder.conv is not None:
            raise ConfigError(
                "this DeBERTa has no relative positions, or a convolution behind its first block, as the largest of "
                "version 2 have: use DeBERTa-v3, or version 2 without (conv_kernel_size 0)."
            )
        self.blocks = nn.ModuleList(DebertaBlock(block) for block in self.blocks)
        self.embeddings.add_module("relative", encoder.get_submodule("rel_embeddings"))
        normed = "layer_norm" in self.config.norm_rel_ebd
        self.embeddings.add_module("relative_norm", encoder.get_submodule("LayerNorm") if normed else nn.Identity())

    def shared(self) -> dict[str, Tensor]:
        vectors = cast(nn.Embedding, self.embeddings.get_submodule("relative")).weight
        return {"rel_embeddings": self.embeddings.get_submodule("relative_norm")(vectors)}
