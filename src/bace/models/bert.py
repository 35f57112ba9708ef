"""BERT, RoBERTa and DistilBERT."""

from torch import nn

from bace.models.text_encoder import TextEncoder


class BertEncoder(TextEncoder):
    transformers_class = "BertModel"
    attention_end = "attention.output.dense"
    mlp_end = "output.dense"
    mlp_branch = ("intermediate", "output.dense")
    query_and_value = ("attention.self.query", "attention.self.value")
    key = "attention.self.key"
    takes_prefixes = True


class RobertaEncoder(BertEncoder):
    transformers_class = "RobertaModel"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.max_tokens -= self.config.pad_token_id + 1  # RoBERTa counts positions from there


class DistilBertEncoder(TextEncoder):
    transformers_class = "DistilBertModel"
    has_pooler = False
    has_token_types = False
    blocks_at = "transformer.layer"
    attention_end = "attention.out_lin"
    mlp_end = "ffn.lin2"
    mlp_branch = ("ffn", "ffn")
    query_and_value = ("attention.q_lin", "attention.v_lin")
    key = "attention.k_lin"
    takes_prefixes = True
