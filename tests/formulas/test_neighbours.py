"""Exact neighbours, searched block by block, are compared with brute force (docs/bace.md 2.2, 2.6)."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bace.errors import ConfigError, DataError
from bace.methods.parts.neighbours import MANY, SPARE, _Search, nearest, random_neighbours


def brute_force(
    features: Tensor,
    k: int,
    *,
    labels: Tensor | None = None,
    among: str = "all",
    farthest: bool = False,
    candidates: Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute every pair by explicit difference in float64, and sort by (distance, index)."""
    x = features.double().numpy()
    pool = np.arange(len(x)) if candidates is None else np.unique(candidates.numpy())
    indices = np.full((len(x), k), -1)
    distances = np.full((len(x), k), np.inf)
    for i in range(len(x)):
        allowed = pool[pool != i]
        if labels is not None and among != "all":
            allowed = allowed[(labels.numpy()[allowed] == labels.numpy()[i]) == (among == "same")]
        length = np.sqrt(((x[allowed] - x[i]) ** 2).sum(1))
        best = np.lexsort((allowed, -length if farthest else length))[:k]
        indices[i, : len(best)] = allowed[best]
        distances[i, : len(best)] = length[best]
    return indices, distances


def agree(features: Tensor, k: int, *, block: int, rtol: float = 1e-12, **options: Any) -> None:
    indices, distances = nearest(features, k, block=block, **options)
    expected_indices, expected_distances = brute_force(features, k, **options)
    assert indices.dtype == torch.int64
    assert distances.dtype == features.dtype
    np.testing.assert_array_equal(indices.numpy(), expected_indices)
    np.testing.assert_allclose(distances.numpy(), expected_distances, rtol=rtol, atol=0)


@pytest.mark.parametrize("block", [1, 3, 7, 32, 59, 60, 61, 1024])
@pytest.mark.parametrize("farthest", [False, True])
def test_any_block_size_gives_the_brute_force_answer_in_float64(block: int, farthest: bool) -> None:
    features = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    agree(features, 4, block=block, farthest=farthest)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 45),
    width=st.integers(1, 6),
    k=st.integers(1, 30),
    levels=st.integers(1, 3),
    block=st.integers(1, 50),
    among=st.sampled_from(["all", "same", "different"]),
    farthest=st.booleans(),
    capped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_ties_go_to_the_lower_index_on_a_grid_full_of_ties_and_duplicates(
    seed: int,
    rows: int,
    width: int,
    k: int,
    levels: int,
    block: int,
    among: str,
    farthest: bool,
    capped: bool,
    dtype: torch.dtype,
) -> None:
    # Integers are exact in both types, so the index alone decides the order wherever lengths are equal.
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(0, levels, (rows, width), generator=generator).to(dtype)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    candidates = torch.randperm(rows, generator=generator)[: rows // 2] if capped else None
    agree(
        features,
        k,
        block=block,
        labels=labels,
        among=among,
        farthest=farthest,
        candidates=candidates,
        rtol=1e-6 if dtype == torch.float32 else 1e-12,
    )


@pytest.mark.parametrize("block", [16, 1024])
def test_more_ties_than_are_preselected_still_give_the_lowest_indices(block: int) -> None:
    features = torch.zeros(200, 3)
    features[150] = 5
    indices, distances = nearest(features, 3, block=block)
    assert indices[0].tolist() == [1, 2, 3]
    assert indices[1].tolist() == [0, 2, 3]
    assert indices[199].tolist() == [0, 1, 2]
    assert indices[150].tolist() == [0, 1, 2]
    assert distances[199].tolist() == [0, 0, 0]
    assert distances[150].tolist() == pytest.approx([75**0.5] * 3)


def test_an_exact_duplicate_is_a_neighbour_at_distance_zero_and_the_row_itself_is_none() -> None:
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    indices, distances = nearest(features, 2)
    assert indices.tolist() == [[2, 3], [3, 0], [0, 3], [1, 0]]
    assert distances[0, 0] == 0
    # |(0.6, 0.8) - (1, 0)|^2 = 0.16 + 0.64
    assert distances[0, 1].item() == pytest.approx(0.8**0.5)


def test_near_duplicates_in_single_precision_keep_their_distances_and_order() -> None:
    # 40 unit vectors at distances 1e-5, 2e-5, ... from the first: 2 - 2 cos is about 1e-10 and vanishes in float32, so
    # the preselection of k + 8 sees 40 equal scores.
    generator = torch.Generator().manual_seed(1)
    base = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64, generator=generator), dim=0)
    aside = torch.randn(64, dtype=torch.float64, generator=generator)
    aside = torch.nn.functional.normalize(aside - (aside @ base) * base, dim=0)
    angles = torch.arange(41, dtype=torch.float64)[torch.randperm(41, generator=generator)] * 1e-5
    near = angles.cos().unsqueeze(1) * base + angles.sin().unsqueeze(1) * aside
    far = torch.nn.functional.normalize(torch.randn(200, 64, dtype=torch.float64, generator=generator), dim=1)
    features = torch.cat([near, far]).float()
    first = int(angles.argmin())
    by_cosine = (2 - 2 * features[:41] @ features[first]).clamp(min=0).sqrt()
    assert (by_cosine - angles).abs().max() > 1e-4  # the naive formula fails

    indices, distances = nearest(features, 5, block=100)
    assert indices[first].tolist() == angles.argsort()[1:6].tolist()
    np.testing.assert_allclose(distances[first].numpy(), np.arange(1, 6) * 1e-5, rtol=5e-3)
    agree(features, 5, block=100, rtol=1e-5)


def test_a_large_common_offset_does_not_mislead_the_search() -> None:
    # Raw features in a narrow cone: |c|^2 - 2 q.c cancels nearly everything in float32.
    generator = torch.Generator().manual_seed(2)
    features = 100 + torch.randint(-512, 512, (150, 16), generator=generator).float() / 1024
    agree(features, 5, block=64, rtol=1e-6)
    agree(features, 5, block=64, rtol=1e-6, farthest=True)


def test_fewer_candidates_than_k_are_padded_with_minus_one_and_infinity() -> None:
    features = torch.tensor([[0.0], [1.0], [3.0]])
    indices, distances = nearest(features, 4)
    assert indices.tolist() == [[1, 2, -1, -1], [0, 2, -1, -1], [1, 0, -1, -1]]
    assert distances.tolist() == [
        [1, 3, math.inf, math.inf],
        [1, 2, math.inf, math.inf],
        [2, 3, math.inf, math.inf],
    ]


@pytest.mark.parametrize("farthest", [False, True])
def test_same_and_different_with_no_candidate_return_none_at_all(farthest: bool) -> None:
    features = torch.arange(6.0).unsqueeze(1)
    alone = torch.arange(6)
    one_class = torch.zeros(6, dtype=torch.int64)
    for labels, among in ((alone, "same"), (one_class, "different")):
        indices, distances = nearest(features, 3, labels=labels, among=among, farthest=farthest)  # type: ignore[arg-type]
        assert (indices == -1).all()
        assert (distances == math.inf).all()
    indices, _ = nearest(features, 3, candidates=torch.tensor([], dtype=torch.int64), farthest=farthest)
    assert (indices == -1).all()
    indices, distances = nearest(features[:1], 2, farthest=farthest)  # a task of one example
    assert indices.tolist() == [[-1, -1]]
    assert distances.tolist() == [[math.inf, math.inf]]


def test_the_farthest_are_never_masked_rows_nor_the_row_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(80, 4, generator=generator)
    labels = torch.randint(0, 7, (80,), generator=generator)
    candidates = torch.randperm(80, generator=generator)[:50]
    for among in ("all", "same", "different"):
        indices, distances = nearest(
            features, 20, labels=labels, among=among, farthest=True, candidates=candidates, block=16
        )
        there = indices >= 0
        rows = torch.arange(80).unsqueeze(1).expand_as(indices)
        assert torch.equal(there, distances.isfinite())
        assert (indices[there] != rows[there]).all()
        assert torch.isin(indices[there], candidates).all()
        if among != "all":
            assert ((labels[indices] == labels[rows])[there] == (among == "same")).all()


def test_the_farthest_of_points_on_a_line() -> None:
    features = torch.tensor([[0.0], [1.0], [2.0], [4.0]])
    indices, distances = nearest(features, 2, farthest=True)
    assert indices.tolist() == [[3, 2], [3, 0], [0, 3], [0, 1]]  # 0 and 2 are equally far from 1, 0 and 4 from 2
    assert distances.tolist() == [[4, 2], [3, 1], [2, 2], [4, 3]]


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and not func.is_view:
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("farthest", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_no_tensor_is_larger_than_a_block_of_scores_or_the_features(
    ties: bool, farthest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width, block, k = 1600, 8, 64, 5
    generator = torch.Generator().manual_seed(4)
    features = torch.randint(0, 2, (rows, width), generator=generator).float()  # 256 points, so rows are searched twice
    if not ties:
        features += torch.rand(rows, width, generator=generator)
    pending = []
    merge = _Search.merge

    def merged(search: _Search) -> None:
        pending.append(sum(len(row) for row, _, _ in search.pending))
        merge(search)

    monkeypatch.setattr(_Search, "merge", merged)
    with Largest() as largest:
        nearest(features, k, block=block, farthest=farthest, labels=torch.arange(rows) % 3, among="different")
    assert 0 < max(pending) <= 3 * block * block / MANY
    # The factors 2 are for the pairs of a second search, which are row and column, and for the best of each row so far
    # beside new ones.
    assert block * block / 2 < largest.elements <= 2 * max(block * block, rows * (k + SPARE))
    assert largest.elements < rows * rows / 50
    with Largest() as largest:
        random_neighbours(features, k, generator, block=block)
    assert largest.elements <= 2 * rows * max(k, width)


def test_mixed_precision_around_the_search_does_not_change_it() -> None:
    # Squared distances are about 0.06, and products about 1,200, which half precision rounds to whole numbers.
    features = 10 + 0.05 * torch.randn(300, 12, generator=torch.Generator().manual_seed(5))
    expected = nearest(features, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        found = nearest(features, 3)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_search_costs_a_few_times_the_bare_matrix_product() -> None:
    features = torch.randn(2500, 192, generator=torch.Generator().manual_seed(6))

    def seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times)

    # 1.5 to 3 was measured; the margin is for busy machines.
    assert seconds(lambda: nearest(features, 5)) < 10 * seconds(lambda: features @ features.T)


def test_random_neighbours_are_distinct_others_with_their_true_distances() -> None:
    features = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    indices, distances = random_neighbours(features, 6, torch.Generator().manual_seed(8))
    for row, chosen in enumerate(indices.tolist()):
        assert len(set(chosen)) == 6
        assert row not in chosen
        assert all(0 <= j < 40 for j in chosen)
        assert distances[row].tolist() == pytest.approx([math.dist(features[row], features[j]) for j in chosen])
    again, _ = random_neighbours(features, 6, torch.Generator().manual_seed(8))
    other, _ = random_neighbours(features, 6, torch.Generator().manual_seed(9))
    assert torch.equal(indices, again)
    assert not torch.equal(indices, other)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), k=st.integers(1, 12), seed=st.integers(0, 1000))
def test_random_neighbours_take_everyone_where_k_is_too_large(rows: int, k: int, seed: int) -> None:
    indices, distances = random_neighbours(torch.randn(rows, 2), k, torch.Generator().manual_seed(seed))
    assert indices.shape == distances.shape == (rows, k)
    for row in range(rows):
        chosen = [j for j in indices[row].tolist() if j >= 0]
        assert len(chosen) == len(set(chosen)) == min(k, rows - 1)
        assert row not in chosen
        assert distances[row].isfinite().sum() == len(chosen)
        if k >= rows - 1:
            assert sorted(chosen) == [j for j in range(rows) if j != row]


def test_random_neighbours_are_uniform_over_the_subsets() -> None:
    # Each of the C(5, 2) = 10 pairs of others must be equally likely, for each of the 6 rows. The statistic is
    # chi-square with 9 degrees of freedom, whose 0.9999 quantile is 33.7.
    generator = torch.Generator().manual_seed(10)
    features = torch.zeros(6, 1)
    draws = 4000
    counts: list[Counter[frozenset[int]]] = [Counter() for _ in range(6)]
    for _ in range(draws):
        for row, chosen in enumerate(random_neighbours(features, 2, generator)[0].tolist()):
            counts[row][frozenset(chosen)] += 1
    for count in counts:
        assert len(count) == 10
        assert sum((n - draws / 10) ** 2 / (draws / 10) for n in count.values()) < 33.7


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 0}, ConfigError, "k = 0"),
        ({"block": 0}, ConfigError, "block = 0"),
        ({"among": "same"}, ConfigError, "labels is None"),
        ({"among": "near"}, ConfigError, "'near'"),
        ({"labels": torch.zeros(3)}, DataError, r"\(3,\)"),
        ({"candidates": torch.tensor([1, 4])}, DataError, "row 4"),
        ({"features": torch.zeros(4)}, DataError, r"\(4,\)"),
        ({"features": torch.zeros(4, 2, dtype=torch.float16)}, DataError, "float16"),
        ({"features": torch.tensor([[0.0], [math.nan]])}, DataError, "row 1"),
        ({"features": torch.tensor([[0.0], [1.0], [1e25]])}, DataError, "row 2"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        nearest(**{"features": torch.zeros(4, 2), "k": 2} | options)
