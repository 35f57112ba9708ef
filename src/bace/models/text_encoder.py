"""The base class of encoders of texts."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from bace.data.modalities.text import KeptTokenizer
from bace.errors import DataError
from bace.models.encoder import Encoder
from bace.models.pooling import Pooling, pooled, unit_length


class TextEncoder(Encoder):
    """An encoder of texts: `input_ids`, `attention_mask` and optionally `token_type_ids`, each (examples, tokens).
    Instead of ids it also takes word vectors, `inputs_embeds` (examples, tokens, width).

    Attributes:
        max_tokens: the maximum length of a text for its position table, including special tokens.
        pooling: how the tokens become the feature of a text.
        normalised: whether the feature is scaled to unit length.
        tokenizer: its own tokenizer, if it is not the one in the folder of the weights.
    """

    modality = "text"
    movable = "inputs_embeds"
    has_token_types: ClassVar[bool] = True
    words_at: ClassVar[str] = "word_embeddings"  # within the embeddings

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.max_tokens: int = self.config.max_position_embeddings
        self.pooling: Pooling = "class"
        self.normalised = False
        self.tokenizer: KeptTokenizer | None = None

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), (examples, 1, 1, tokens)
        """The mask is true where a token may be attended to; one more token is one more column of it."""
        ids, vectors = inputs.get("input_ids"), inputs.get("inputs_embeds")
        tokens = inputs["attention_mask"].shape[1]
        if tokens > self.max_tokens:
            raise DataError(f"a text of {tokens} tokens is too long: the backbone takes up to {self.max_tokens}.")
        types = {"token_type_ids": inputs["token_type_ids"]} if self._takes_types(inputs) else {}
        hidden: Tensor = self.embeddings(ids, inputs_embeds=vectors, **types)
        return hidden, self.mask(inputs)

    def mask(self, inputs: dict[str, Tensor]) -> Tensor:  # (examples, 1, 1, tokens)
        """A mask that broadcasts over heads and queries. It has the same effect as transformers' square mask, but is
        easier to extend."""
        return inputs["attention_mask"].bool()[:, None, None, :]

    def relax(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Word vectors instead of ids, as `embed` looks them up before positions are added."""
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        with torch.no_grad():
            return {**rest, "inputs_embeds": self.embeddings.get_submodule(self.words_at)(inputs["input_ids"])}

    def pool(
        self,
        hidden: Tensor,  # (examples, tokens, width), finished
        inputs: dict[str, Tensor],
    ) -> Tensor:  # (examples, width)
        features = pooled(hidden, inputs["attention_mask"], self.pooling)
        return unit_length(features) if self.normalised else features

    @property
    def pools_class_token(self) -> bool:
        return self.pooling == "class"

    def example(self) -> dict[str, Tensor]:
        ids = torch.zeros(1, 2, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def reads(self) -> dict[str, str]:
        length = "unit length" if self.normalised else "none"
        return {
            "input": f"texts of up to {self.max_tokens} tokens",
            "pooling": self.pooling,
            "normalisation": length,
        }

    def _takes_types(self, inputs: dict[str, Tensor]) -> bool:
        return self.has_token_types and "token_type_ids" in inputs
