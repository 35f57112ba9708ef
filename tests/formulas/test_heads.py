"""The growing heads are compared with hand-computed numbers and numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bace.models.heads import AugmentedHead, CosineHead, Head, LinearHead, ProxyHead, WideningHead, align, imprint


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grown(head: Head, *classes: int) -> Head:
    for task, count in enumerate(classes):
        head.grow(count, generator(task))
    return head


def test_cosine_logits_by_hand() -> None:
    head = grown(CosineHead(2, sigma_init=10.0), 2)
    head.blocks[0].data = torch.tensor([[2.0, 0.0], [0.0, -0.5]])
    logits = head(torch.tensor([[3.0, 4.0]]))  # unit: (.6, .8); rows: (1, 0), (0, -1)
    torch.testing.assert_close(logits, torch.tensor([[6.0, -8.0]]))


@given(seed=st.integers(0, 10**6), sigma=st.sampled_from([0.5, 1.0, 10.0]), length=st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=25, deadline=None)
def test_cosine_logits_lie_within_the_scale_and_ignore_lengths(seed: int, sigma: float, length: float) -> None:
    head = grown(CosineHead(6, sigma_init=sigma), 3, 2)
    features = torch.randn(5, 6, generator=generator(seed))
    logits = head(length * features)
    assert (logits.abs() <= sigma * (1 + 1e-6)).all()
    torch.testing.assert_close(logits, head(features))
    torch.testing.assert_close(head(head.weight).diagonal(), torch.full((5,), sigma))


def test_cosine_head_normalises_over_the_last_axis() -> None:
    """Tokens have the shape (batch, length, width). Each token is divided by its own norm, not by that of its
    sentence."""
    head = grown(CosineHead(4), 3)
    tokens = torch.randn(2, 5, 4, generator=generator(1))
    unit, rows = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (tokens.numpy(), head.weight.detach().numpy()))
    np.testing.assert_allclose(head(tokens).detach().numpy(), 10 * unit @ rows.T, rtol=1e-4, atol=1e-5)


def test_a_feature_of_zeros_gives_zeros() -> None:
    assert torch.equal(grown(CosineHead(4), 3)(torch.zeros(1, 4)), torch.zeros(1, 3))


def test_one_learned_scale_is_shared_by_all_tasks_and_carried_over() -> None:
    head = grown(CosineHead(4, sigma_init=10.0), 2)
    assert isinstance(head, CosineHead)
    scales = [p for name, p in head.named_parameters() if p.ndim == 0]
    assert len(scales) == 1
    assert scales[0] is head.sigma
    assert head.sigma.requires_grad
    with torch.no_grad():
        head.sigma.fill_(3.0)
    before = head.sigma
    grown(head, 3)
    assert head.sigma is before
    features = torch.randn(2, 4, generator=generator(2))
    (ones,) = torch.autograd.grad(head(features).sum(), head.sigma)
    torch.testing.assert_close(ones, head(features).sum() / 3.0)  # the scale multiplies both blocks


def test_a_fixed_scale_is_not_trained() -> None:
    assert not CosineHead(4, sigma_init=1.0, sigma_learn=False).sigma.requires_grad


@pytest.mark.parametrize("kind", [CosineHead, LinearHead])
def test_growing_leaves_old_rows_their_parameters_and_old_logits_their_values(kind: type[Head]) -> None:
    head = grown(kind(16), 3)
    features = torch.randn(7, 16, generator=generator(3))
    before, rows = head(features), list(head.parameters())
    grown(head, 2)
    after = head(features)
    assert after.shape == (7, 5)
    torch.testing.assert_close(after[:, :3], before, rtol=0, atol=1e-12)  # a larger product may be rounded differently
    assert all(any(p is old for p in head.parameters()) for old in rows)
    assert all(p.requires_grad for p in head.parameters())
    assert head.classes == 5


def test_new_rows_are_uniform_within_one_over_the_root_of_the_width() -> None:
    head = grown(CosineHead(64), 400)
    rows = head.blocks[0].detach()
    bound = 1 / math.sqrt(64)
    assert rows.abs().max() <= bound
    assert rows.mean().item() == pytest.approx(0.0, abs=3 * bound / math.sqrt(3 * rows.numel()))
    assert rows.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
    torch.testing.assert_close(rows.norm(dim=1).mean(), torch.tensor(1 / math.sqrt(3)), rtol=0.01, atol=0)


def test_linear_logits_by_hand() -> None:
    head = grown(LinearHead(2), 1, 1)
    assert isinstance(head, LinearHead)
    head.blocks[0].data, head.blocks[1].data = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
    assert torch.equal(head.biases[0], torch.zeros(1))
    head.biases[1].data = torch.tensor([0.5])
    torch.testing.assert_close(head(torch.tensor([[2.0, 1.0]])), torch.tensor([[4.0, 5.5]]))


def test_an_augmented_head_classifies_by_view_0_of_each_class() -> None:
    head = AugmentedHead(2, views=3)
    assert head.classes == 0
    grown(head, 2, 1)
    assert head.classes == 3
    assert [len(block) for block in head.blocks] == [6, 3]
    head.biases[1].data = torch.tensor([1.0, 2.0, 3.0])
    features = torch.tensor([[2.0, 1.0], [0.0, -1.0]])
    every = features @ torch.cat(list(head.blocks)).T + torch.tensor([0.0] * 6 + [1.0, 2.0, 3.0])
    torch.testing.assert_close(head.all(features), every)
    torch.testing.assert_close(head(features), every[:, [0, 3, 6]])


def test_a_linear_head_can_start_at_zero() -> None:
    head = grown(LinearHead(2, zero=True), 1, 2)
    assert all(p.requires_grad and not p.any() for p in head.parameters())
    assert torch.equal(head(torch.ones(4, 2)), torch.zeros(4, 3))


def test_a_linear_head_without_bias_is_its_rows_alone() -> None:
    head = grown(LinearHead(2, bias=False), 1, 1)
    assert [p.shape for p in head.parameters()] == [(1, 2), (1, 2)]
    head.blocks[0].data, head.blocks[1].data = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
    torch.testing.assert_close(head(torch.tensor([[2.0, 1.0]])), torch.tensor([[4.0, 5.0]]))


@pytest.mark.parametrize("kind", [CosineHead, LinearHead])
def test_a_head_without_classes_gives_no_columns(kind: type[Head]) -> None:
    assert kind(4).double()(torch.randn(3, 4, dtype=torch.float64)).shape == (3, 0)


# -- imprinted rows


def test_imprinted_rows_point_to_the_mean_of_unit_features_at_the_mean_norm_of_the_old_rows() -> None:
    # class 4: units (1, 0) and (0, 1), mean direction (1, 1)/sqrt(2); class 5: (0, -1). Old norms 1 and 3: mean 2.
    features = torch.tensor([[5.0, 0.0], [0.0, -7.0], [0.0, 0.1]])
    rows = imprint(features, torch.tensor([4, 5, 4]), range(4, 6), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    torch.testing.assert_close(rows, torch.tensor([[math.sqrt(2), math.sqrt(2)], [0.0, -2.0]]))


def test_imprinted_rows_have_the_mean_old_norm() -> None:
    old = torch.randn(5, 8, generator=generator(4))
    features, targets = torch.randn(30, 8, generator=generator(5)), torch.arange(30) % 3 + 5
    rows: Tensor = imprint(features, targets, range(5, 8), old)
    mean_norm = np.linalg.norm(old.numpy(), axis=1).mean()
    np.testing.assert_allclose(np.linalg.norm(rows.numpy(), axis=1), [mean_norm] * 3, rtol=1e-5)


def test_before_the_first_task_imprinted_rows_have_length_one() -> None:
    rows = imprint(torch.randn(4, 3, generator=generator(6)), torch.zeros(4), range(1), nn.Parameter(torch.zeros(0, 3)))
    assert rows.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_head_grows_where_it_lives() -> None:
    for head in (CosineHead(4), LinearHead(4)):
        head.to("meta")
        head.grow(2, torch.Generator())
        assert {p.device.type for p in head.parameters()} == {"meta"}


# -- features that widen


def filled(head: WideningHead) -> WideningHead:
    """Fill the head with random numbers, so that every number differs."""
    with torch.no_grad():
        for i, p in enumerate(head.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator(100 + i)))
    return head


def test_a_widening_head_is_a_staircase() -> None:
    """Branches have width 2. Tasks have 2, 1 and 2 classes, and the last task reads only its own branch."""
    head = WideningHead(2)
    head.grow(2, generator(0))
    head.grow(1, generator(1))
    head.grow(2, generator(2), newest_only=True)
    assert [tuple(p.shape) for p in head.blocks] == [(2, 2), (1, 4), (2, 2)]
    assert [tuple(p.shape) for p in head.columns] == [(2, 2), (3, 2)]
    assert (head.width, head.classes) == (6, 5)
    filled(head)
    expected = np.zeros((5, 6))
    (a, b, c), (d, e) = ([p.detach().numpy() for p in parts] for parts in (head.blocks, head.columns))
    expected[:2, :2], expected[2:3, :4], expected[3:, 4:] = a, b, c
    expected[:2, 2:4], expected[:3, 4:] = d, e
    np.testing.assert_array_equal(head.weight.detach().numpy(), expected)
    features = torch.randn(7, 6, generator=generator(9))
    bias = np.concatenate([p.detach().numpy() for p in head.biases])
    np.testing.assert_allclose(
        head(features).detach().numpy(), features.numpy() @ expected.T + bias, rtol=1e-4, atol=1e-5
    )


def test_a_widening_head_keeps_its_parameters_and_its_old_logits_when_it_grows() -> None:
    head = filled(grown(WideningHead(3), 2, 2))  # type: ignore[arg-type]
    features = torch.randn(4, 9, generator=generator(5))
    before, parameters = head(features[:, :6]), list(head.parameters())
    head.grow(3, generator(6))
    torch.testing.assert_close(head(features)[:, :4], before)  # the new columns are zero
    assert all(any(p is q for q in head.parameters()) for p in parameters)


def test_a_widening_head_starts_as_a_linear_one() -> None:
    wide, plain = grown(WideningHead(4), 3), grown(LinearHead(4), 3)
    assert wide.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(wide.parameters(), plain.parameters(), strict=True))
    assert WideningHead(4)(torch.ones(2, 4)).shape == (2, 0)


def test_a_new_auxiliary_head_takes_the_place_of_the_last() -> None:
    head = grown(WideningHead(4), 2, 2)
    for outputs in (3, 5):
        head.assist(outputs, generator(0))  # type: ignore[operator]
        assert head.auxiliary(torch.ones(1, 4)).shape == (1, outputs)  # type: ignore[operator]
    assert len(list(head.parameters())) == 2 + 1 + 2 + 2


def test_alignment_scales_the_newest_rows_by_hand() -> None:
    """The mean norms are 1.5 and 3, so the new rows are halved."""
    head = grown(LinearHead(2), 2, 2)
    head.blocks[0].data = torch.tensor([[1.5, 2.0], [0.0, 0.5]])  # norms 2.5, 0.5: mean 1.5
    head.blocks[1].data = torch.tensor([[2.0, 0.0], [0.0, -4.0]])  # mean 3
    align(head)
    torch.testing.assert_close(head.blocks[1].data, torch.tensor([[1.0, 0.0], [0.0, -2.0]]))
    torch.testing.assert_close(head.blocks[0].data, torch.tensor([[1.5, 2.0], [0.0, 0.5]]))


@pytest.mark.parametrize("empty", [LinearHead(6), CosineHead(6), ProxyHead(6, 3)], ids=lambda head: type(head).__name__)
def test_a_merged_head_is_a_copy_in_one_block(empty: Head) -> None:
    assert empty.merged().classes == 0
    head = grown(empty, 2, 1, 4)
    features = torch.randn(5, 6, generator=generator(9))
    merged = head.merged()
    torch.testing.assert_close(merged(features), head(features))
    assert (len(merged.blocks), merged.classes, len(head.blocks)) == (1, 7, 3)
    with torch.no_grad():
        merged.blocks[0].zero_()
    assert head.weight.any()
