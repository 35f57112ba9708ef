"""The products of encoders on AMD processors (models/products.py)."""

import pytest
import torch
import torch.nn.functional as F
from tiny_encoders import FAMILIES, save, tiny_inputs, tiny_model
from torch import nn
from torch.func import grad, vmap

from bace.models import products
from bace.models.loading import load_encoder

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
LARGE = (4, 50, 128, 512)  # examples, tokens, inputs, outputs: more work than SMALL


@pytest.fixture
def onednn(monkeypatch):
    monkeypatch.setenv("BACE_ONEDNN", "1")
    products.prefers_onednn.cache_clear()
    yield
    products.prefers_onednn.cache_clear()


@pytest.fixture
def multiplied(onednn, monkeypatch):
    """The number of products that oneDNN has computed."""
    shapes, multiply = [], products._multiply

    def counted(input, weight, bias):
        shapes.append((tuple(input.shape), tuple(weight.shape)))
        return multiply(input, weight, bias)

    monkeypatch.setattr(products, "_multiply", counted)
    return shapes


def layers(*, bias=True):
    torch.manual_seed(0)
    torchs = nn.Linear(LARGE[2], LARGE[3], bias=bias)
    ours = nn.Sequential(nn.Linear(LARGE[2], LARGE[3], bias=bias))
    ours[0].load_state_dict(torchs.state_dict())
    products.use_fast_products(ours)
    return torchs, ours[0]


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_torchs_linear(multiplied, bias):
    results = []
    for layer in layers(bias=bias):
        input = torch.randn(LARGE[:3], generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = layer(input)
        output.square().mean().backward()
        results.append([output, input.grad, *(p.grad for p in layer.parameters())])
    assert len(multiplied) == 3  # Y, dX and dW of ours
    for expected, found in zip(*results, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale)


@needs_onednn
def test_only_gradients_that_are_needed_are_computed(multiplied):
    _, layer = layers()
    layer.weight.requires_grad_(False)
    input = torch.randn(LARGE[:3], requires_grad=True)
    layer(input).sum().backward()
    assert len(multiplied) == 2  # Y and dX
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert input.grad is not None


@needs_onednn
def test_strided_inputs_and_passes_without_gradient_give_the_same(multiplied):
    torchs, ours = layers()
    input = torch.randn(4, 60, LARGE[2])[:, 5:55]
    with torch.inference_mode():
        torch.testing.assert_close(ours(input), torchs(input), rtol=1e-5, atol=1e-5)
    assert len(multiplied) == 1


@needs_onednn
def test_other_types_and_small_products_are_left_to_torch(multiplied):
    torchs, ours = layers()
    input = torch.randn(LARGE[:3])
    with torch.no_grad():
        assert torch.equal(ours(input[0, :2]), torchs(input[0, :2]))
        doubled = ours.double()(input.double())
        assert torch.equal(doubled, torchs.double()(input.double()))
    assert multiplied == []


@needs_onednn
def test_transformations_of_torch_and_exports_are_left_to_torch(multiplied):
    _, layer = layers()
    input = torch.randn(LARGE[:3])

    def loss(weight, example):
        return products.linear(example, weight, layer.bias).square().sum()

    per_example = vmap(grad(loss), in_dims=(None, 0))(layer.weight.detach(), input)
    assert per_example.shape == (LARGE[0], LARGE[3], LARGE[2])
    exported = torch.export.export(nn.Sequential(layer), (input,))
    assert "mkldnn" not in str(exported.graph)
    assert multiplied == []


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", torch.backends.mkldnn.is_available())])
def test_the_environment_decides(monkeypatch, value, expected):
    monkeypatch.setenv("BACE_ONEDNN", value)
    products.prefers_onednn.cache_clear()
    assert products.prefers_onednn() is expected
    products.prefers_onednn.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_every_family_use_them(family, tmp_path):
    encoder = load_encoder(save(tiny_model(family), tmp_path))
    linears = [module for module in encoder.blocks.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(type(module) is products.Linear for module in linears)


@needs_onednn
def test_an_encoder_computes_the_same_with_both(multiplied, monkeypatch, tmp_path):
    encoder = load_encoder(save(tiny_model("vit"), tmp_path))
    inputs = tiny_inputs("vit")
    monkeypatch.setattr(products, "SMALL", 1)
    with torch.no_grad():
        fast = encoder(inputs)
        assert multiplied
        monkeypatch.setattr(products, "linear", F.linear)
        torch.testing.assert_close(fast, encoder(inputs), rtol=1e-4, atol=1e-4)
