"""Exact nearest neighbours in bounded memory.

Candidates are preselected by matrix products, block by block. The expression |c|^2 - 2 q.c loses all digits near
duplicates, so the preselected ones are ranked again by the length of the explicit difference, equal lengths by the
lower index. Where rounding or ties could have kept a true neighbour out of the preselection, the row is searched again
without a limit on their number: the answer is that of a brute-force search, whatever the features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bace.errors import ConfigError, DataError

SPARE = 8  # candidates preselected beyond k; only speed depends on it

Scores = Callable[[Tensor, slice], Tensor]  # (queries,), part of the pool -> (queries, part); inf: not a candidate


@dataclass(frozen=True)
class Near:
    """The neighbours of some rows."""

    rows: Tensor  # (passed,) ids of the rows to pass through the network
    position: Tensor  # (anchors, K) where each neighbour is among them
    log_weight_anchor: Tensor  # (anchors,) log W(x, x)
    log_weights: Tensor  # (anchors, K) log W(x_j, x)


@dataclass(frozen=True)
class NeighbourTable:
    """Every anchor's neighbours and the weights of both: made once an epoch, read batch by batch."""

    anchors: Tensor  # (anchors,) row ids, ascending
    neighbours: Tensor  # (anchors, K) row ids; -1: none
    log_weight_anchor: Tensor  # (anchors,)
    log_weights: Tensor  # (anchors, K); -inf where there is no neighbour
    distances: Tensor  # (anchors, K); inf where there is no neighbour

    def of(self, rows: Tensor, device: torch.device) -> Near:
        """The neighbours of these anchors; one that several anchors share is passed once."""
        at = torch.searchsorted(self.anchors, rows)
        ids = torch.where(self.neighbours[at] < 0, rows[:, None], self.neighbours[at])  # "none" weighs nothing
        ids, position = torch.unique(ids, return_inverse=True)
        weights = (self.log_weight_anchor[at].to(device), self.log_weights[at].to(device))
        return Near(ids, position.to(device), *weights)


@torch.no_grad()
def nearest(
    features: Tensor,  # (rows, width)  float32 or float64
    k: int,
    *,
    labels: Tensor | None = None,  # (rows,)
    among: Literal["all", "same", "different"] = "all",
    farthest: bool = False,
    candidates: Tensor | None = None,  # (pool,)  rows that may be neighbours; None: all
    block: int = 1024,
) -> tuple[Tensor, Tensor]:  # (rows, k) int64, (rows, k)
    """The k nearest (or farthest) other rows of every row, and their Euclidean distances, best first.

    A row is never its own neighbour, but an exact duplicate of it may be (at distance 0). `among` restricts the
    neighbours to rows of the same or of a different label. Equal distances go to the lower index. Where there are fewer
    than k candidates, the remaining entries have index -1 and distance inf, also for the farthest. No more than
    block x block scores exist at once.
    """
    _check(features, k, block)
    if among not in ("all", "same", "different"):
        raise ConfigError(f"among = {among!r} is not a choice of neighbours: use 'all', 'same' or 'different'.")
    if among != "all" and labels is None:
        raise ConfigError(f"among = '{among}' compares labels, but labels is None: pass one label per row.")
    if labels is not None and labels.shape != features.shape[:1]:
        raise DataError(f"labels has shape {tuple(labels.shape)}, features {tuple(features.shape)}: one label per row.")
    rows, width = features.shape
    device = features.device
    pool = _pool(candidates, rows).to(device)
    sign = -1 if farthest else 1  # scores and keys are sign * squared distance or distance: lower is always better

    squares = features.square().sum(1)  # (rows,)
    # Bounds the rounding of a score, of |q|^2 and of an explicit distance together: each is a sum of `width` products,
    # and |q|^2 + |c|^2 + 2 |q.c| and the squared distance stay below (|q| + |c|)^2.
    lengths = squares.sqrt()
    reach = lengths + (lengths[pool].max() if len(pool) else 0)
    number = torch.finfo(features.dtype)
    slack = (width + 8) * (number.eps * reach.square() + number.tiny)  # (rows,)

    pool_features, pool_squares = (features, squares) if candidates is None else (features[pool], squares[pool])
    pool_labels = labels[pool] if labels is not None else None
    position = torch.full((rows,), -1, device=device)  # of each row in the pool
    position[pool] = torch.arange(len(pool), device=device)

    def scores(queries: Tensor, part: slice) -> Tensor:  # (queries, part): squared distance less |q|^2
        result = torch.addmm(pool_squares[part], features[queries], pool_features[part].T, beta=sign, alpha=-2 * sign)
        own = position[queries] - part.start
        here = (own >= 0) & (own < result.shape[1])
        result[here.nonzero().squeeze(1), own[here]] = torch.inf
        if labels is not None and pool_labels is not None and among != "all":
            same = labels[queries].unsqueeze(1) == pool_labels[part]
            result.masked_fill_(same if among == "different" else ~same, torch.inf)
        return result

    # Few rows by many columns: the best of a long row cost less to find than those of many short ones and their merger.
    height = max(block // 4, 1)
    parts = [slice(start, start + block * block // height) for start in range(0, len(pool), block * block // height)]

    indices = torch.full((rows, k), -1, device=device)
    keys = features.new_full((rows, k), torch.inf)
    # Mixed precision would round the products far beyond `slack`.
    with torch.autocast(device.type, enabled=False):
        for queries in torch.split(torch.arange(rows, device=device), height):
            found, score = _preselect(scores, queries, pool, parts, k + SPARE)
            key = features.new_full(found.shape, torch.inf)
            there = found >= 0
            row, _ = there.nonzero(as_tuple=True)
            key[there] = sign * _distances(features, queries[row], found[there], block)
            found, key = _rank(found, key, k)

            # What was not preselected scores no lower than the last one that was: can it still be among the k?
            if score.shape[1] == k + SPARE:
                limit = sign * (key[:, -1].square() - squares[queries]) + slack[queries]
                last = score[:, -1]
                part = (last.isfinite() & (last <= limit)).nonzero().squeeze(1)
                if len(part):
                    found[part], key[part] = _search(
                        scores, features, queries[part], pool, parts, limit[part], k, sign=sign, block=block
                    )
            indices[queries, : found.shape[1]] = found
            keys[queries, : found.shape[1]] = key
    return indices, (sign * keys).masked_fill_(indices < 0, torch.inf)


@torch.no_grad()
def random_neighbours(
    features: Tensor,  # (rows, width)  float32 or float64
    k: int,
    generator: torch.Generator,
    *,
    block: int = 1024,
) -> tuple[Tensor, Tensor]:  # (rows, k) int64, (rows, k)
    """k distinct other rows for every row, drawn uniformly, in no order, and their Euclidean distances.

    With fewer than k other rows all of them are taken; the remaining entries have index -1 and distance inf.
    """
    _check(features, k, block)
    rows = len(features)
    drawn = min(k, max(rows - 1, 0))
    chosen = torch.full((rows, k), -1, device=features.device)
    # Floyd's sampling without replacement (Bentley and Floyd, CACM 30(9), 1987), for all rows at once, because one
    # permutation per row would be N x N: each draw is from one value more than the last, and takes that newest value
    # where it hits one already chosen.
    for n in range(drawn):
        newest = rows - 1 - drawn + n
        draw = torch.randint(newest + 1, (rows,), generator=generator, device=generator.device).to(features.device)
        taken = (chosen[:, :n] == draw.unsqueeze(1)).any(1)
        chosen[:, n] = draw.masked_fill_(taken, newest)
    own = torch.arange(rows, device=features.device).unsqueeze(1)
    chosen += chosen >= own  # 0 .. rows - 2 become all indices but the row's own; -1 stays
    distances = features.new_full((rows, k), torch.inf)
    there = chosen >= 0
    row, _ = there.nonzero(as_tuple=True)
    distances[there] = _distances(features, row, chosen[there], block)
    return chosen, distances


def _preselect(
    scores: Scores, queries: Tensor, pool: Tensor, parts: list[slice], count: int
) -> tuple[Tensor, Tensor]:  # (queries, min(count, pool)) twice, best first
    """The candidates of the lowest scores, and the scores; index -1 where there are no more."""
    best = scores(queries, slice(0, 0))
    index = pool[:0].expand(len(queries), 0)
    for part in parts:
        score = scores(queries, part)
        score, at = score.topk(min(count, score.shape[1]), dim=1, largest=False)
        best, index = torch.cat([best, score], 1), torch.cat([index, pool[part][at]], 1)
        if best.shape[1] > count:
            best, at = best.topk(count, dim=1, largest=False)
            index = index.gather(1, at)
    return index.masked_fill(best == torch.inf, -1), best


def _search(
    scores: Scores,
    features: Tensor,  # (rows, width)
    queries: Tensor,  # (queries,)
    pool: Tensor,  # (pool,)  ascending
    parts: list[slice],  # of the pool
    limit: Tensor,  # (queries,)
    k: int,
    *,
    sign: int,
    block: int,
) -> tuple[Tensor, Tensor]:  # (queries, k) twice, best first
    """Indices and keys of the k best of all candidates whose score is within the limit, however many those are."""
    found = torch.full((len(queries), k), -1, device=pool.device)
    keys = features.new_full((len(queries), k), torch.inf)
    for part in parts:
        row, column = (scores(queries, part) <= limit.unsqueeze(1)).nonzero(as_tuple=True)
        index = pool[part][column]
        key = sign * _distances(features, queries[row], index, block)
        # By row, then key, then index: the pairs come by row and index, and both sorts are stable.
        order = key.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        row, index, key = row[order], index[order], key[order]
        counts = row.bincount(minlength=len(queries))
        rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        row, index, key, rank = (t[rank < k] for t in (row, index, key, rank))
        new_found, new_keys = torch.full_like(found, -1), torch.full_like(keys, torch.inf)
        new_found[row, rank], new_keys[row, rank] = index, key
        found, keys = _rank(torch.cat([found, new_found], 1), torch.cat([keys, new_keys], 1), k)
        if sign > 0 and not keys[:, -1].any():  # k duplicates each, of the lowest indices: nothing can be better
            break
    return found, keys


def _rank(indices: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (rows, any) twice -> (rows, at most k)
    """The k lowest keys of each row in order, equal ones by index."""
    indices, at = indices.sort(1)
    keys, order = keys.gather(1, at).sort(dim=1, stable=True)
    return indices.gather(1, order)[:, :k], keys[:, :k]


def _distances(features: Tensor, left: Tensor, right: Tensor, block: int) -> Tensor:  # (rows, width), (pairs,) twice
    """Euclidean distances of pairs of rows by explicit difference, a bounded number at a time."""
    distances = features.new_empty(len(left))
    step = max(block, block * block // max(features.shape[1], 1))
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        difference = features.index_select(0, left[part]).sub_(features.index_select(0, right[part]))
        distances[part] = torch.linalg.vector_norm(difference, dim=1)
    return distances


def _pool(candidates: Tensor | None, rows: int) -> Tensor:  # (pool,)  ascending, each once
    if candidates is None:
        return torch.arange(rows)
    outside = candidates[(candidates < 0) | (candidates >= rows)]
    if len(outside):
        raise DataError(f"candidates holds row {int(outside[0])}, but there are {rows} rows, counted from 0.")
    allowed = torch.zeros(rows, dtype=torch.bool, device=candidates.device)
    allowed[candidates] = True
    return allowed.nonzero().squeeze(1)


def _check(features: Tensor, k: int, block: int) -> None:
    if features.ndim != 2:
        raise DataError(f"features has shape {tuple(features.shape)}: expected (rows, width).")
    if features.dtype not in (torch.float32, torch.float64):
        raise DataError(f"features are {features.dtype}: neighbours need float32 or float64; convert with .float().")
    if k < 1:
        raise ConfigError(f"k = {k} neighbours cannot be searched: use 1 or more.")
    if block < 1:
        raise ConfigError(f"block = {block} is no block size: use 1 or more.")
    finite = (4 * features.square().sum(1)).isfinite()  # 4: the longest squared distance, both ends on one line
    if not finite.all():
        raise DataError(
            f"features of row {int(finite.logical_not().nonzero()[0])} are not finite, or too large for "
            f"{features.dtype}: check the encoder's outputs, or normalise them."
        )
