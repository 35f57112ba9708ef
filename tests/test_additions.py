"""Additions to a frozen encoder, in every family. Blocks computed part by part show where an addition sits. It does not
change the outputs at first, and a pass uses the sets that are chosen for it."""

import copy
from typing import Any

import pytest
import torch
from tiny_encoders import DEPTH, FAMILIES, TEXTS, WIDTH, save, tiny_inputs, tiny_model
from torch import Tensor, nn

from bace.errors import ConfigError
from bace.models.additions import Additions
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.loading import load_encoder
from bace.models.lora import LoRA, LowRank
from bace.models.parallel_adapters import ParallelAdapter, ParallelAdapters
from bace.models.prompts import DeepPrompts
from bace.models.scale_shift import ScalesAndShifts, ScaleShift

CPU = torch.device("cpu")
KINDS: dict[str, Any] = {
    "adapters": lambda encoder: ParallelAdapters(encoder, 5),
    "lora": lambda encoder: LoRA(encoder, 3),
    "prompts": lambda encoder: DeepPrompts(encoder, 4),
    "scale and shift": ScalesAndShifts,
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    return {family: load_encoder(save(tiny_model(family), tmp_path_factory.mktemp(family))) for family in FAMILIES}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_sets(encoder: Encoder, kind: str = "adapters", sets: int = 2) -> tuple[Encoder, Additions]:
    """A copy of the encoder with sets that are far from their initial values."""
    encoder = copy.deepcopy(encoder)
    additions: Additions = KINDS[kind](encoder)
    for index in range(sets):
        additions.grow(seeded(index), CPU)
    with torch.no_grad():
        for p in additions.sets.parameters():
            p += 0.3 * torch.randn(p.shape, generator=seeded(7))
    return encoder.eval(), additions


# -- every kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_set_a_pass_is_that_of_the_frozen_encoder_bit_for_bit(
    encoders: dict[str, Encoder], family: str, kind: str
) -> None:
    inputs = tiny_inputs(family)
    plain = encoders[family](inputs)
    encoder, additions = with_sets(encoders[family], kind)
    with additions.of():
        assert torch.equal(encoder(inputs), plain)
    assert (encoder(inputs) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_goes_through_the_set_that_is_chosen_and_else_through_the_default(
    encoders: dict[str, Encoder], kind: str
) -> None:
    encoder, additions = with_sets(encoders["vit"], kind)
    inputs, default = tiny_inputs("vit"), additions.active
    unchosen = encoder(inputs)
    with additions.of(0):
        first = encoder(inputs)
        with additions.of(1):
            second = encoder(inputs)
        assert torch.equal(encoder(inputs), first)  # the outer choice applies again
    assert not torch.equal(first, second)
    with additions.of(*default):
        assert torch.equal(encoder(inputs), unchosen)
    with pytest.raises(RuntimeError, match="inside"), additions.of(0):
        raise RuntimeError("inside")
    assert additions.active == default


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_gives_gradients_to_every_parameter_of_its_set_and_to_nothing_else(
    encoders: dict[str, Encoder], family: str, kind: str
) -> None:
    encoder, additions = with_sets(encoders[family], kind)
    with additions.of(1):
        (encoder(tiny_inputs(family)) * torch.arange(WIDTH)).sum().backward()
    own = {id(p) for p in additions.parameters_of(1)}
    assert own
    for name, p in encoder.named_parameters():
        assert (p.grad is not None) == (id(p) in own), name
        assert p.requires_grad == ("additions" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_encoder_uses_its_own_sets(encoders: dict[str, Encoder], kind: str) -> None:
    encoder, additions = with_sets(encoders["vit"], kind)
    inputs = tiny_inputs("vit")
    before = encoder(inputs)
    other = copy.deepcopy(encoder)
    with torch.no_grad():
        for p in additions.sets.parameters():
            p += 1.0
    assert torch.equal(other(inputs), before)
    with additions.of():
        assert torch.equal(other(inputs), before)


@pytest.mark.parametrize("kind", KINDS)
def test_sets_are_drawn_from_the_given_generator_only_and_their_size_is_known_before(
    encoders: dict[str, Encoder], kind: str
) -> None:
    additions: Additions = KINDS[kind](copy.deepcopy(encoders["vit"]))
    size, state = additions.size, torch.get_rng_state()
    for seed in (1, 1, 2):
        additions.grow(seeded(seed), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (torch.cat([p.flatten() for p in additions.parameters_of(i)]) for i in range(3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_a_frozen_prefix_stays_as_it_is(encoders: dict[str, Encoder], family: str, kind: str) -> None:
    encoder = copy.deepcopy(encoders[family])
    freeze_prefix(encoder, 1)
    encoder, additions = with_sets(encoder, kind)
    inputs = tiny_inputs(family)
    _, taps = encoder(inputs, taps=True)
    with additions.of():
        _, plain = encoder(inputs, taps=True)
    assert torch.equal(taps[0], plain[0])
    assert not torch.equal(taps[1], plain[1])
    freeze_prefix(encoder, DEPTH)
    with pytest.raises(ConfigError, match=r"backbone\.freeze"):
        KINDS[kind](encoder)


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_does_not_see_the_padding_of_a_text(encoders: dict[str, Encoder], family: str, kind: str) -> None:
    encoder, _ = with_sets(encoders[family], kind)
    inputs = tiny_inputs(family)
    alone = {key: value[1:2, :6] for key, value in inputs.items()}
    torch.testing.assert_close(encoder(inputs)[1, :6], encoder(alone)[0], atol=1e-5, rtol=1e-4)


# -- parallel adapters


def test_a_parallel_adapter_computes_its_formula() -> None:
    # s W2 relu(W1 x + b1) + s b2 with W1 = [1 -2], b1 = 1, W2 = [3 4]^T, b2 = (0, 1), s = 1/2.
    adapter = ParallelAdapter(2, 1, 0.5, 0.0, seeded())
    with torch.no_grad():
        adapter.down.weight.copy_(torch.tensor([[1.0, -2.0]]))
        adapter.down.bias.fill_(1.0)
        adapter.up.weight.copy_(torch.tensor([[3.0], [4.0]]))
        adapter.up.bias.copy_(torch.tensor([0.0, 1.0]))
    x = torch.tensor([[1.0, 0.5], [0.0, 5.0]])  # W1 x + b1 = 1 and -9
    assert adapter(x).tolist() == [[1.5, 2.5], [0.0, 0.5]]


def test_a_parallel_adapter_starts_with_a_kaiming_uniform_down_and_zeros() -> None:
    adapter = ParallelAdapter(400, 100, 0.1, 0.1, seeded())
    bound = 400**-0.5  # sqrt(6 / ((1 + a^2) fan_in)) with a^2 = 5
    assert float(adapter.down.weight.abs().max()) == pytest.approx(bound, rel=1e-3)
    assert float(adapter.down.weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not any(p.any() for p in (adapter.down.bias, adapter.up.weight, adapter.up.bias))


def test_a_parallel_adapter_drops_units_of_its_bottleneck_in_training_only() -> None:
    adapter = ParallelAdapter(3, 1000, 1.0, 0.1, seeded())
    with torch.no_grad():
        adapter.down.bias.fill_(1.0)
        adapter.down.weight.zero_()
        adapter.up.weight.fill_(1.0)
    x = torch.zeros(1, 3)
    torch.manual_seed(0)
    kept = adapter.train()(x)[0, 0] * 0.9 / 1000  # kept values are scaled by 1 / 0.9
    assert float(kept) == pytest.approx(0.9, abs=0.04)
    assert float(kept) != 0.9
    assert float(adapter.eval()(x)[0, 0]) == pytest.approx(1000)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_and_adapters_of_scale_zero_change_no_bit(encoders: dict[str, Encoder], family: str) -> None:
    inputs = tiny_inputs(family)
    plain = encoders[family](inputs)
    encoder = copy.deepcopy(encoders[family])
    ParallelAdapters(encoder, 5).grow(seeded(), CPU)
    assert torch.equal(encoder(inputs), plain)
    encoder, additions = with_sets(encoders[family])
    for adapter in additions.sets.modules():
        if isinstance(adapter, ParallelAdapter):
            adapter.scale = 0.0
    assert torch.equal(encoder(inputs), plain)


def block_by_parts(family: str, block: Any, hidden: Tensor, mask: Tensor | None, added: Any, shared: Any) -> Tensor:
    """A block from its modules, where `added(x)` joins the MLP branch; x is the input of that branch."""
    if family == "clip":
        x = hidden + block.self_attn(block.layer_norm1(hidden), mask)[0]
        return x + block.mlp(block.layer_norm2(x)) + added(x)
    if family == "modernbert":
        layer, at = block.layer, torch.arange(hidden.shape[1])
        if layer.attention_type == "sliding_attention":
            mask = mask & ((at[:, None] - at).abs() <= 2) | torch.eye(len(at)).bool()
        turned = block.rotary(hidden, at[None], layer.attention_type)
        x = hidden + layer.attn(layer.attn_norm(hidden), turned, mask)[0]
        return x + layer.mlp(layer.mlp_norm(x)) + added(x)
    if family == "deberta-v2":
        block = block.layer
    if family in ("vit", "deit"):
        attended = block.attention(block.layernorm_before(hidden), mask)
        x = hidden + (attended if family == "vit" else attended[0])
        return x + block.mlp(block.layernorm_after(x)) + added(x)
    if family == "dinov2":
        x = hidden + block.layer_scale1(block.attention(block.norm1(hidden), attention_mask=mask)[0])
        return x + block.layer_scale2(block.mlp(block.norm2(x))) + added(x)
    if family == "distilbert":
        x = block.sa_layer_norm(hidden + block.attention(hidden, attention_mask=mask)[0])
        return block.output_layer_norm(x + block.ffn(x) + added(x))
    x = block.attention(hidden, mask, **shared)[0]
    return block.output.LayerNorm(x + block.output.dense(block.intermediate(x)) + added(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_stand_beside_the_mlp_of_every_block(encoders: dict[str, Encoder], family: str) -> None:
    inputs = tiny_inputs(family)
    encoder, additions = with_sets(encoders[family])
    hidden, mask = encoders[family].embed(inputs)
    for site, block in enumerate(encoders[family].blocks):
        adapter = additions.sets[1][site]

        def added(x: Tensor, adapter: nn.Module = adapter) -> Tensor:
            down, up = adapter.down, adapter.up
            return 0.1 * ((x @ down.weight.T + down.bias).relu() @ up.weight.T + up.bias)

        hidden = block_by_parts(family, block, hidden, mask, added, encoder.shared())
    torch.testing.assert_close(encoder(inputs), encoders[family].finish(hidden), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ParallelAdapters, {"hidden": 0}),
        (ParallelAdapters, {"dropout": 1.0}),
        (ParallelAdapters, {"dropout": -0.1}),
        (LoRA, {"rank": 0}),
        (DeepPrompts, {"length": 0}),
    ],
)
def test_impossible_additions_are_refused(encoders: dict[str, Encoder], kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(copy.deepcopy(encoders["vit"]), **wrong)


# -- LoRA


def test_a_low_rank_change_computes_its_formula_and_starts_at_zero() -> None:
    change = LowRank(2, 3, 1, seeded())
    x = torch.tensor([[1.0, 0.5], [0.0, 5.0]])
    assert not change(x).any()
    with torch.no_grad():
        change.A.copy_(torch.tensor([[1.0, -2.0]]))
        change.B.copy_(torch.tensor([[3.0], [4.0], [-1.0]]))
    assert change(x).tolist() == [[0.0, 0.0, 0.0], [-30.0, -40.0, 10.0]]
    drawn = LowRank(400, 7, 100, seeded())
    assert float(drawn.A.abs().max()) == pytest.approx(400**-0.5, rel=1e-3)
    assert float(drawn.A.std()) == pytest.approx(400**-0.5 / 3**0.5, rel=0.02)


PROJECTIONS = {
    "vit": ("attention.q_proj", "attention.v_proj"),
    "deit": ("attention.q_proj", "attention.v_proj"),
    "dinov2": ("attention.q_proj", "attention.v_proj"),
    "bert": ("attention.self.query", "attention.self.value"),
    "roberta": ("attention.self.query", "attention.self.value"),
    "distilbert": ("attention.q_lin", "attention.v_lin"),
    "clip": ("self_attn.q_proj", "self_attn.v_proj"),
    "deberta-v2": ("layer.attention.self.query_proj", "layer.attention.self.value_proj"),
    "modernbert": ("layer.attn.Wqkv.query", "layer.attn.Wqkv.value"),
}


@pytest.mark.parametrize("sets", [(0,), (1,), (0, 1), None])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adds_the_products_of_its_chosen_sets_to_the_weights_of_query_and_value(
    encoders: dict[str, Encoder], family: str, sets: tuple[int, ...] | None
) -> None:
    """Merging the sets into the weights gives the same output; if none is chosen, all sets apply."""
    inputs = tiny_inputs(family)
    encoder, additions = with_sets(encoders[family], "lora")
    merged = copy.deepcopy(encoders[family])
    with torch.no_grad():
        for index in (0, 1) if sets is None else sets:
            sites = iter(additions.sets[index])
            for block in merged.blocks:
                for path in PROJECTIONS[family]:
                    change = next(sites)
                    block.get_submodule(path).weight += change.B @ change.A
    expected = merged(inputs)
    if sets is None:
        torch.testing.assert_close(encoder(inputs), expected, atol=1e-4, rtol=1e-3)
    else:
        with additions.of(*sets):
            torch.testing.assert_close(encoder(inputs), expected, atol=1e-4, rtol=1e-3)


# -- scale and shift


def test_a_scale_and_shift_computes_its_formula_and_starts_near_the_identity() -> None:
    part = ScaleShift(2, seeded())
    with torch.no_grad():
        part.scale.copy_(torch.tensor([2.0, -1.0]))
        part.shift.copy_(torch.tensor([0.0, 3.0]))
    assert part(torch.tensor([[1.0, 1.0], [0.5, 0.0]])).tolist() == [[2.0, 2.0], [1.0, 3.0]]
    drawn = ScaleShift(10000, seeded())
    assert float(drawn.scale.mean()) == pytest.approx(1, abs=1e-3)
    assert float(drawn.shift.mean()) == pytest.approx(0, abs=1e-3)
    assert [float(p.std()) for p in drawn.parameters()] == pytest.approx([0.02, 0.02], rel=0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_and_shifts_can_be_folded_into_every_linear_map_and_norm(
    encoders: dict[str, Encoder], family: str
) -> None:
    """gamma (W x + b) + beta = (gamma W) x + (gamma b + beta), as the authors merge them after training."""
    inputs = tiny_inputs(family)
    encoder, additions = with_sets(encoders[family], "scale and shift")
    folded = copy.deepcopy(encoders[family])
    scaled = [m for m in folded.modules() if isinstance(m, nn.Linear | nn.LayerNorm | nn.Conv2d)]
    beside = {"clip": 3, "deberta-v2": 2}.get(family, 1 if family in TEXTS else 2)  # for embeddings and final norm
    assert len(scaled) == additions.sites == DEPTH * 8 + beside
    with torch.no_grad():
        for module, part in zip(scaled, additions.sets[1], strict=True):
            module.weight *= part.scale.reshape(-1, *[1] * (module.weight.ndim - 1))
            bias = part.shift if module.bias is None else part.scale * module.bias + part.shift
            module.bias = nn.Parameter(bias.clone())
    torch.testing.assert_close(encoder(inputs), folded(inputs), atol=1e-4, rtol=1e-3)


# -- deep prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_attends_to_prompts_of_its_own_which_leave_behind_it(
    encoders: dict[str, Encoder], family: str
) -> None:
    """The oracle takes one input at a time, without padding. Prompts are last, except if blocks know positions."""
    inputs = tiny_inputs(family)
    encoder, additions = with_sets(encoders[family], "prompts")
    found = encoder(inputs)
    for i in range(len(found)):
        own = {key: value[i : i + 1] for key, value in inputs.items()}
        if family in TEXTS:
            own = {key: value[:, : int(inputs["attention_mask"][i].sum())] for key, value in own.items()}
        hidden, _ = encoders[family].embed(own)
        length = hidden.shape[1]
        for block, part in zip(encoders[family].blocks, additions.sets[1], strict=True):
            if family in ("deberta-v2", "modernbert"):
                everything = torch.ones(1, 1, 1, length + 4, dtype=torch.bool)
                longer = torch.cat([part.tokens[None], hidden], 1)
                hidden = block(longer, everything, **encoders[family].shared())[:, 4:]
            else:
                hidden = block(torch.cat([hidden, part.tokens[None]], 1), None)[:, :length]
        expected = encoders[family].finish(hidden)[0]
        torch.testing.assert_close(found[i, :length], expected, atol=1e-4, rtol=1e-3)


def test_prompts_start_uniform_within_the_bound_of_xavier(encoders: dict[str, Encoder]) -> None:
    additions = DeepPrompts(copy.deepcopy(encoders["vit"]), 200)
    additions.grow(seeded(), CPU)
    tokens = additions.sets[0][0].tokens
    assert tokens.shape == (200, WIDTH)
    bound = (6 / (2 * WIDTH)) ** 0.5
    assert float(tokens.abs().max()) == pytest.approx(bound, rel=1e-2)
    assert float(tokens.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
