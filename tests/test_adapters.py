import copy

import pytest
import torch
from tiny_encoders import DEPTH, FAMILIES, TEXTS, WIDTH, reference, save, tiny_inputs, tiny_model
from torch import nn

from bace.errors import ConfigError
from bace.models.adapters import Adapter, add_adapters
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.loading import load_encoder

HIDDEN = 5


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    return {family: load_encoder(save(tiny_model(family), tmp_path_factory.mktemp(family))) for family in FAMILIES}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_an_adapter_computes_its_formula():
    # u + W2 relu(W1 u), here with W1 = [1 -2], b1 = 1, W2 = [3 4]^T, b2 = (0, 1).
    adapter = Adapter(2, 1, seeded())
    with torch.no_grad():
        adapter.down.weight.copy_(torch.tensor([[1.0, -2.0]]))
        adapter.down.bias.fill_(1.0)
        adapter.up.weight.copy_(torch.tensor([[3.0], [4.0]]))
        adapter.up.bias.copy_(torch.tensor([0.0, 1.0]))
    u = torch.tensor([[1.0, 0.5], [0.0, 5.0]])  # W1 u + b1 = 1 and -9, so relu gives 1 and 0
    assert adapter(u).tolist() == [[4.0, 5.5], [0.0, 6.0]]


def test_an_adapter_starts_as_the_identity_with_hidden_units_of_the_size_of_its_input():
    adapter = Adapter(300, 200, seeded())
    u = torch.randn(400, 300, generator=seeded(1))
    assert torch.equal(adapter(u), u)
    assert adapter.down.weight.std().item() == pytest.approx((2 / 300) ** 0.5, rel=0.02)
    assert adapter.down.weight.mean().item() == pytest.approx(0, abs=2e-3)
    assert torch.relu(adapter.down(u)).square().mean().item() == pytest.approx(1, rel=0.05)
    assert not any(p.any() for p in (adapter.down.bias, adapter.up.weight, adapter.up.bias))


def test_adapters_draw_from_the_given_generator_only(encoders):
    first, again, other = (copy.deepcopy(encoders["vit"]) for _ in range(3))
    state = torch.get_rng_state()
    a, b, c = (add_adapters(e, HIDDEN, seeded(s)) for e, s in ((first, 1), (again, 1), (other, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x.down.weight, y.down.weight) for x, y in zip(a, b, strict=True))
    assert not any(torch.equal(x.down.weight, y.down.weight) for x, y in zip(a, c, strict=True))
    assert len({x.down.weight[0, 0].item() for x in a}) == 2 * DEPTH  # each adapter has its own draw


@pytest.mark.parametrize("family", FAMILIES)
def test_the_network_starts_exactly_as_it_was(encoders, family):
    encoder = copy.deepcopy(encoders[family])
    inputs = tiny_inputs(family)
    before = encoder(inputs)
    adapters = add_adapters(encoder, HIDDEN, seeded())
    assert torch.equal(encoder(inputs), before)
    assert len(adapters) == 2 * DEPTH
    assert [a for a in encoder.modules() if isinstance(a, Adapter)] == adapters  # lowest first, attention before MLP


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_and_layer_norms_are_trainable(encoders, family):
    encoder = copy.deepcopy(encoders[family])
    adapters = add_adapters(encoder, HIDDEN, seeded())
    norms = [m for m in encoder.modules() if isinstance(m, nn.LayerNorm)]
    # the final norm of image families, the embeddings' norm of text families; CLIP and DeBERTa have one more below
    assert len(norms) == 2 * DEPTH + (2 if family in ("clip", "deberta-v2") else 1)
    expected = {id(p) for module in (*adapters, *norms) for p in module.parameters()}
    assert {id(p) for p in encoder.parameters() if p.requires_grad} == expected
    (encoder(tiny_inputs(family)) * torch.arange(WIDTH)).sum().backward()
    for adapter in adapters:
        assert adapter.up.weight.grad is not None
        assert adapter.up.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in encoder.parameters() if not p.requires_grad)


def test_an_adapter_learns_from_its_first_steps_on():
    """Twenty steps are enough to fit u + relu(u a) b. With a `down` of 1e-3 only the bias has learned by then: 3.5."""
    adapter, rng = Adapter(16, 8, seeded()), seeded(1)
    u = torch.randn(64, 16, generator=rng)
    wanted = u + torch.relu(u @ torch.randn(16, 1, generator=rng)) @ torch.randn(1, 16, generator=rng) / 4
    optimiser = torch.optim.SGD(adapter.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad()
        loss = (adapter(u) - wanted).square().sum(1).mean()
        loss.backward()
        optimiser.step()
    assert loss.item() < 1


@pytest.mark.parametrize("family", FAMILIES)
def test_each_adapter_sits_inside_its_residual_branch(encoders, family):
    """An adapter that doubles its input must equal doubling the weights of the Linear before it."""
    inputs = tiny_inputs(family)
    real = inputs["attention_mask"].bool() if family in TEXTS else slice(None)
    ends = {
        "vit": ("layers.1.attention.o_proj", "layers.1.mlp.fc2"),
        "deit": ("layers.1.attention.o_proj", "layers.1.mlp.fc2"),
        "dinov2": ("encoder.layer.1.attention.o_proj", "encoder.layer.1.mlp.fc2"),
        "bert": ("encoder.layer.1.attention.output.dense", "encoder.layer.1.output.dense"),
        "roberta": ("encoder.layer.1.attention.output.dense", "encoder.layer.1.output.dense"),
        "distilbert": ("transformer.layer.1.attention.out_lin", "transformer.layer.1.ffn.lin2"),
        "clip": ("encoder.layers.1.self_attn.out_proj", "encoder.layers.1.mlp.fc2"),
        "deberta-v2": ("encoder.layer.1.attention.output.dense", "encoder.layer.1.output.dense"),
        "modernbert": ("layers.1.attn.Wo", "layers.1.mlp.Wo"),
    }[family]
    for which, end in enumerate(ends):
        encoder = copy.deepcopy(encoders[family])
        plain = encoder(inputs)
        adapter = add_adapters(encoder, 2 * WIDTH, seeded())[2 + which]
        identity = torch.eye(WIDTH)
        with torch.no_grad():  # u = relu(u) - relu(-u), so this adapter is u -> 2u
            adapter.down.weight.copy_(torch.cat([identity, -identity]))
            adapter.up.weight.copy_(torch.cat([identity, -identity], 1))
        model = tiny_model(family)
        with torch.no_grad():
            for parameter in model.get_submodule(end).parameters():
                parameter *= 2
        expected = reference(model, inputs).last_hidden_state
        torch.testing.assert_close(encoder(inputs)[real], expected[real], rtol=0, atol=2e-5)
        assert (expected - plain)[real].abs().max() > 1e-2


def test_gates_can_be_hooked_onto_the_two_layers(encoders):
    """HAT needs u + up(relu(down(u) * g1)) * g2, with a gate of zeros closing the adapter."""
    adapter = Adapter(3, 2, seeded())
    nn.init.ones_(adapter.up.weight)
    nn.init.ones_(adapter.down.weight)
    u = torch.ones(1, 3)
    assert adapter(u).tolist() == [[7.0, 7.0, 7.0]]
    adapter.down.register_forward_hook(lambda module, args, output: output * torch.tensor([1.0, 0.0]))
    adapter.up.register_forward_hook(lambda module, args, output: output * torch.tensor([0.0, 1.0, 2.0]))
    assert adapter(u).tolist() == [[1.0, 4.0, 7.0]]


def test_a_prefix_frozen_afterwards_freezes_its_adapters_too(encoders):
    encoder = copy.deepcopy(encoders["bert"])
    adapters = add_adapters(encoder, HIDDEN, seeded())
    freeze_prefix(encoder, 2)
    assert [a.up.weight.requires_grad for a in adapters] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_a_prefix_frozen_before_gets_no_adapters_and_stays_frozen(encoders, family):
    encoder = copy.deepcopy(encoders[family])
    before = encoder(tiny_inputs(family))
    freeze_prefix(encoder, 2)
    adapters = add_adapters(encoder, HIDDEN, seeded())
    assert len(adapters) == 2 * (DEPTH - 2)
    assert [a for block in encoder.blocks[2:] for a in block.modules() if isinstance(a, Adapter)] == adapters
    assert not any(p.requires_grad for part in (encoder.embeddings, *encoder.blocks[:2]) for p in part.parameters())
    assert all(p.requires_grad for part in (*adapters, encoder.norm) for p in part.parameters())
    assert torch.equal(encoder(tiny_inputs(family)), before)


def test_adding_twice_or_nothing_is_refused(encoders):
    encoder = copy.deepcopy(encoders["bert"])
    add_adapters(encoder, HIDDEN, seeded())
    with pytest.raises(ConfigError, match="already has adapters"):
        add_adapters(encoder, HIDDEN, seeded())
    with pytest.raises(ConfigError, match="at least 1 hidden unit, not 0"):
        add_adapters(copy.deepcopy(encoders["bert"]), 0, seeded())
