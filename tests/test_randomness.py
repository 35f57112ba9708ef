"""Named random streams are stable across versions, uniform, and independent of each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bace.core.position import Position
from bace.randomness import derive, generator, seed_dropout, uniform

MASK = (1 << 64) - 1


def test_seeds_are_what_they_always_were():
    """The values are literal: if they change, no recorded run can be repeated."""
    assert derive(0) == 7210762507766007076
    assert derive(0, "order", 1, "main", 2, 3) == 2888893088883898354
    assert derive("0") == 2864763844733986431
    drawn = uniform(7, torch.tensor([0, 1, 2**40, 123456]), 3)[2]
    assert [float(x).hex() for x in drawn] == [
        "0x1.12ffcce9a0874p-3",
        "0x1.ab02ef12518c3p-1",
        "0x1.eca78397520e2p-2",
        "0x1.6014f6fd688bcp-2",
    ]


@given(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=6))
def test_a_seed_fits_in_63_bits_and_a_generator_takes_it(parts):
    assert 0 <= derive(*parts) < 1 << 63
    assert generator(*parts).initial_seed() == derive(*parts)


def test_every_name_has_its_own_stream():
    names = [
        (seed, name, task, stage, epoch, step)
        for seed in range(3)
        for name in ("order", "memory 1", "memory 2", "dropout")
        for task in range(3)
        for stage in ("main", "bias")
        for epoch in range(3)
        for step in range(10)
    ]
    first = [int(torch.randint(1 << 62, (), generator=generator(*name))) for name in names]
    assert len(set(first)) == len(names)


@pytest.mark.parametrize(("one", "other"), [((1, "2"), (1, 2)), (("ab", "c"), ("a", "bc")), ((1, 23), (12, 3))])
def test_parts_are_not_run_together(one, other):
    assert derive(*one) != derive(*other)


def test_asking_twice_gives_the_same_numbers_and_asking_elsewhere_changes_nothing():
    now = Position(seed=4, task=1, stage="main", epoch=2, step=3)
    expected = torch.rand(5, generator=now.rng("memory 1"))
    torch.rand(100, generator=now.rng("memory 2"))
    torch.rand(100)
    assert torch.equal(torch.rand(5, generator=now.rng("memory 1")), expected)
    now.step = 4
    assert not torch.equal(torch.rand(5, generator=now.rng("memory 1")), expected)


def test_the_epoch_view_lasts_all_epoch_and_other_draws_are_fresh_at_every_step():
    now = Position(seed=0, task=1, stage="main", epoch=2, step=3)
    epoch, fresh = now.view(), now.view(1)
    now.step = 4
    assert now.view() == epoch
    assert now.view(1) != fresh
    assert len({now.view(draw) for draw in range(4)}) == 4
    for field, value in (("epoch", 3), ("task", 2), ("stage", "other"), ("seed", 1)):
        changed = Position(**{**vars(now), field: value})
        assert changed.view() != epoch, field


def splitmix64(state: int) -> int:
    """The finaliser in plain Python integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


@given(st.integers(0, (1 << 63) - 1), st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8), st.integers(1, 6))
def test_uniform_equals_the_hash_in_plain_integers(key, ids, lanes):
    expected = [[] for _ in range(lanes)]
    for lane in range(lanes):
        for i in ids:
            once = splitmix64((i + derive(key, lane)) & MASK)
            expected[lane].append((splitmix64((once + 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53)
    drawn = uniform(key, torch.tensor(ids), lanes)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == expected


def test_uniform_is_uniform_and_lanes_keys_and_neighbouring_ids_are_uncorrelated():
    ids = torch.arange(20_000)
    draws = {(key, lane): drawn for key in (0, 1) for lane, drawn in enumerate(uniform(key, ids, 3).numpy())}
    for drawn in draws.values():
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert stats.kstest(drawn, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03  # 4 standard errors
    matrix = np.corrcoef(np.stack(list(draws.values())))
    assert np.abs(matrix - np.eye(len(draws))).max() < 0.03


def test_dropout_depends_on_its_seed_alone():
    def mask() -> torch.Tensor:
        return torch.nn.functional.dropout(torch.ones(64), 0.5)

    seed_dropout(5)
    first = mask()
    torch.rand(10)
    seed_dropout(5)
    assert torch.equal(mask(), first)
    seed_dropout(6)
    assert not torch.equal(mask(), first)
