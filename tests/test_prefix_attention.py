"""Prefixes of the keys and values of a block, in every family, are compared with attention written out for one query at
a time in float64."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import IMAGES, TEXTS, WIDTH, save, tiny_inputs, tiny_model
from torch import Tensor
from vectors import VectorEncoder

from bace.errors import ConfigError
from bace.models.encoder import Encoder
from bace.models.loading import load_encoder

HEADS, LENGTH = 4, 3
FAMILIES = (*IMAGES, "bert", "roberta", "distilbert")
QUERY_KEY_VALUE = {
    "distilbert": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    **dict.fromkeys(IMAGES, ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    "clip": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    **dict.fromkeys(("bert", "roberta"), tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    torch.set_default_dtype(torch.float64)
    found = {family: load_encoder(save(tiny_model(family), tmp_path_factory.mktemp(family))) for family in FAMILIES}
    torch.set_default_dtype(torch.float32)
    return found


def inputs_of(family: str) -> dict[str, Tensor]:
    return {key: x.double() if x.is_floating_point() else x for key, x in tiny_inputs(family).items()}


def prefix_for(examples: int, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A prefix for each example."""
    rng = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(examples, length, WIDTH, generator=rng, dtype=torch.float64) for _ in range(2))
    return keys, values


def attention_by_hand(family: str, block: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of one example without padding: (tokens, WIDTH), (LENGTH, WIDTH) twice -> (tokens, WIDTH), before
    the last projection."""
    maps = [block.get_submodule(path) for path in QUERY_KEY_VALUE[family]]
    q, k, v = (x.numpy() @ m.weight.numpy().T + m.bias.numpy() for m in maps)
    k, v = np.concatenate([keys.numpy(), k]), np.concatenate([values.numpy(), v])
    size, out = WIDTH // HEADS, np.zeros((len(x), WIDTH))
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        for token in range(len(x)):
            powers = np.exp(k[:, own] @ q[token, own] / np.sqrt(size))
            out[token, own] = powers / powers.sum() @ v[:, own]
    return torch.from_numpy(out)


def block_by_hand(family: str, block: Any, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    def attended(x: Tensor) -> Tensor:
        return attention_by_hand(family, block, x, keys, values)

    if family in ("vit", "deit"):
        x = hidden + block.attention.o_proj(attended(block.layernorm_before(hidden)))
        return x + block.mlp(block.layernorm_after(x))
    if family == "clip":
        x = hidden + block.self_attn.out_proj(attended(block.layer_norm1(hidden)))
        return x + block.mlp(block.layer_norm2(x))
    if family == "dinov2":
        x = hidden + block.layer_scale1(block.attention.o_proj(attended(block.norm1(hidden))))
        return x + block.layer_scale2(block.mlp(block.norm2(x)))
    if family == "distilbert":
        x = block.sa_layer_norm(hidden + block.attention.out_lin(attended(hidden)))
        return block.output_layer_norm(x + block.ffn(x))
    end = block.attention.output
    x = end.LayerNorm(hidden + end.dense(attended(hidden)))
    return block.output.LayerNorm(x + block.output.dense(block.intermediate(x)))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_attends_to_the_prefix_of_its_example_beside_the_tokens(
    encoders: dict[str, Encoder], family: str
) -> None:
    encoder, inputs = encoders[family], inputs_of(family)
    hidden, mask = encoder.embed(inputs)
    prefix = prefix_for(len(hidden))
    found = encoder.run_block(1, hidden, mask, prefix)
    assert found.shape == hidden.shape
    lengths = inputs["attention_mask"].sum(1).tolist() if family in TEXTS else [hidden.shape[1]] * len(hidden)
    for i, length in enumerate(lengths):
        expected = block_by_hand(family, encoder.blocks[1], hidden[i, :length], prefix[0][i], prefix[1][i])
        torch.testing.assert_close(found[i, :length], expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_of_length_zero_is_the_plain_block(encoders: dict[str, Encoder], family: str) -> None:
    hidden, mask = encoders[family].embed(inputs_of(family))
    plain = encoders[family].run_block(0, hidden, mask)
    assert torch.equal(encoders[family].run_block(0, hidden, mask, prefix_for(len(hidden), 0)), plain)
    assert (encoders[family].run_block(0, hidden, mask, prefix_for(len(hidden))) - plain).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_of_the_tokens_own_keys_and_values_changes_nothing(encoders: dict[str, Encoder], family: str) -> None:
    """A prefix only adds keys and values, after their projections. If it repeats the existing ones, every weight is
    halved, and the sums stay the same."""
    encoder, block = encoders[family], encoders[family].blocks[2]
    inputs = {key: value[:1] for key, value in inputs_of(family).items()}
    hidden, mask = encoder.embed(inputs)
    seen = {"vit": "layernorm_before", "deit": "layernorm_before", "dinov2": "norm1", "clip": "layer_norm1"}.get(family)
    x = block.get_submodule(seen)(hidden) if seen else hidden
    _, key, value = (block.get_submodule(path)(x) for path in QUERY_KEY_VALUE[family])
    plain = encoder.run_block(2, hidden, mask)
    torch.testing.assert_close(encoder.run_block(2, hidden, mask, (key, value)), plain, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_the_prefix_of_each_example(encoders: dict[str, Encoder], family: str) -> None:
    """Gradients equal differences of the output; an example's output does not depend on another example's prefix."""
    encoder = copy.deepcopy(encoders[family]).requires_grad_(False)
    hidden, mask = encoder.embed(inputs_of(family))
    keys, values = (p.requires_grad_() for p in prefix_for(len(hidden)))
    weigh = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)

    def out(keys: Tensor, values: Tensor) -> Tensor:
        return (encoder.run(hidden, mask, prefixes={1: (keys, values)})[0][0, 0] * weigh).sum()

    gradients = torch.autograd.grad(out(keys, values), (keys, values))
    assert not any(p.requires_grad for p in encoder.parameters())
    for which, gradient in enumerate(gradients):
        assert gradient[0].abs().min() > 0
        assert not gradient[1:].any()
        moved, step = [keys.detach().clone(), values.detach().clone()], 1e-6
        moved[which][0, 1, 5] += step
        slope = (out(*moved) - out(keys, values)) / step
        assert float(slope) == pytest.approx(float(gradient[0, 1, 5]), rel=1e-3, abs=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_run_gives_each_block_the_prefix_of_its_number(encoders: dict[str, Encoder], family: str) -> None:
    encoder = encoders[family]
    hidden, mask = encoder.embed(inputs_of(family))
    prefixes = {0: prefix_for(len(hidden), 2, 1), 2: prefix_for(len(hidden), 5, 2)}
    found, taps = encoder.run(hidden, mask, taps=True, prefixes=prefixes)
    for block in range(3):
        hidden = encoder.run_block(block, hidden, mask, prefixes.get(block))
        assert torch.equal(taps[block], hidden)
    assert torch.equal(found, encoder.finish(hidden))
    total = encoder.passes.total
    encoder.run(hidden, mask, prefixes=prefixes)
    assert encoder.passes.total == pytest.approx(total + len(hidden))


@torch.no_grad()
def test_a_prefix_takes_the_precision_of_the_pass(encoders: dict[str, Encoder]) -> None:
    encoder = copy.deepcopy(encoders["bert"]).float()
    hidden, mask = encoder.embed(tiny_inputs("bert"))
    prefix = prefix_for(len(hidden))
    single = encoder.run_block(0, hidden, mask, (prefix[0].float(), prefix[1].float()))
    assert torch.equal(encoder.run_block(0, hidden, mask, prefix), single)


@pytest.mark.parametrize("family", ["deberta-v2", "modernbert"])
def test_families_whose_attention_is_their_own_take_no_prefix(tmp_path: Path, family: str) -> None:
    encoder = load_encoder(save(tiny_model(family), tmp_path))
    hidden, mask = encoder.embed(tiny_inputs(family))
    with pytest.raises(ConfigError, match="takes no keys and values"):
        encoder.run_block(0, hidden, mask, (hidden, hidden))


def test_a_family_that_takes_no_prefix_refuses_by_name() -> None:
    encoder = VectorEncoder()
    hidden, mask = encoder.embed({"vector": torch.zeros(2, 6)})
    encoder.run_block(0, hidden, mask)
    with pytest.raises(ConfigError, match="VectorEncoder takes no keys and values"):
        encoder.run_block(0, hidden, mask, (hidden, hidden))


# -- the last block for the class token alone


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_pooled_needs_the_class_token_of_the_last_block_alone(
    encoders: dict[str, Encoder], family: str
) -> None:
    encoder, inputs = encoders[family], inputs_of(family)
    hidden, before = encoder(inputs), encoder.passes.total
    short = encoder(inputs, pooled=True)
    assert short.shape == (len(hidden), 1, WIDTH)
    assert encoder.passes.total - before == pytest.approx(3 * len(hidden))  # counts as a pass like any other
    torch.testing.assert_close(short[:, 0], hidden[:, 0], atol=1e-10, rtol=0)
    torch.testing.assert_close(encoder.pool(short, inputs), encoder.pool(hidden, inputs), atol=1e-10, rtol=0)
    weights = list(encoder.parameters())
    whole, alone = (torch.autograd.grad(x[:, 0].sin().sum(), weights, allow_unused=True) for x in (hidden, short))
    for a, b in zip(whole, alone, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_all_tokens_go_through_the_last_block_where_more_is_asked_for(
    encoders: dict[str, Encoder], family: str
) -> None:
    encoder, inputs = copy.copy(encoders[family]), inputs_of(family)
    hidden = encoder(inputs)
    tapped, _ = encoder(inputs, taps=True, pooled=True)
    assert torch.equal(tapped, hidden)
    encoder.whole = True
    assert torch.equal(encoder(inputs, pooled=True), hidden)
    encoder.whole = False
    if family == "bert":
        encoder.pooling = "mean"
        assert torch.equal(encoder(inputs, pooled=True), hidden)
