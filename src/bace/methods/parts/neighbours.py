"""Exact nearest neighbours in bounded memory.

Candidates are preselected by matrix products, block by block. The expression |c|^2 - 2 q.c loses all digits near
duplicates, so the preselected candidates are ranked again by the length of the explicit difference, and equal lengths
by the lower index. If rounding or ties could have excluded a true neighbour from the preselection, the row is searched
again without a limit on the number of candidates. The result always equals that of a brute-force search.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bace.errors import ConfigError, DataError
from bace.models.products import linear

SPARE = 8  # candidates preselected beyond k; affects only the speed


@dataclass(frozen=True)
class Drawn:
    """One neighbour of each anchor, drawn by its weight to carry gradient for all of the anchor's neighbours."""

    rows: Tensor  # (passed,) ids of the rows to pass through the network
    position: Tensor  # (anchors,) where each anchor's is among them
    column: Tensor  # (anchors,) which of the K neighbours it is
    probability: Tensor  # (anchors,) with which it was drawn

    def carry(self, log_scores: Tensor, passed: Tensor) -> Tensor:  # (anchors, K), (anchors,) -> (anchors, K)
        """The same numbers, with the gradient of the passed rows. A mixture's gradient through neighbour j is
        r_j grad log S(x_j); through the drawn one it is r_j / q_j grad log S(x_j), whose mean over draws is the sum."""
        gradient = (passed - passed.detach()) / self.probability  # 0, with a gradient
        return log_scores.scatter_add(1, self.column[:, None], gradient[:, None])


@dataclass(frozen=True)
class Neighbourhood:
    """The neighbours of some rows."""

    rows: Tensor  # (passed,) ids of the rows to pass through the network
    position: Tensor  # (anchors, K) position of each neighbour among them
    log_weight_anchor: Tensor  # (anchors,) log W(x, x)
    log_weights: Tensor  # (anchors, K) log W(x_j, x)
    drawn: Drawn | None = None


@dataclass(frozen=True)
class NeighbourTable:
    """The neighbours of every anchor and the weights of both, computed once per epoch and read batch by batch."""

    anchors: Tensor  # (anchors,) row ids, ascending
    neighbours: Tensor  # (anchors, K) row ids; -1: none
    log_weight_anchor: Tensor  # (anchors,)
    log_weights: Tensor  # (anchors, K); -inf where there is no neighbour
    distances: Tensor  # (anchors, K); inf where there is no neighbour

    def of(self, rows: Tensor, device: torch.device, draw: torch.Generator | None = None) -> Neighbourhood:
        """The neighbours of these anchors. A neighbour that several anchors share is passed once. With `draw`, one of
        each anchor's neighbours is also drawn."""
        at = torch.searchsorted(self.anchors, rows)
        ids = torch.where(self.neighbours[at] < 0, rows[:, None], self.neighbours[at])  # "none" weighs nothing
        unique, position = torch.unique(ids, return_inverse=True)
        weights = (self.log_weight_anchor[at].to(device), self.log_weights[at].to(device))
        drawn = None if draw is None else _draw(ids, self.log_weights[at], draw, device)
        return Neighbourhood(unique, position.to(device), *weights, drawn)


def _draw(
    ids: Tensor,  # (anchors, K)
    log_weights: Tensor,  # (anchors, K)
    rng: torch.Generator,
    device: torch.device,
) -> Drawn:
    chances = log_weights.softmax(1).nan_to_num(1 / ids.shape[1])  # an anchor without neighbours draws itself
    column = torch.multinomial(chances, 1, generator=rng)
    rows, position = torch.unique(ids.gather(1, column)[:, 0], return_inverse=True)
    probability = chances.gather(1, column)[:, 0]
    return Drawn(rows, position.to(device), column[:, 0].to(device), probability.to(device))


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
    neighbours to rows of the same or of a different label. Equal distances go to the lower index. If there are fewer
    than k candidates, the remaining entries have index -1 and distance inf, also for the farthest. At most
    block x block scores exist at the same time.
    """
    _check(features, k, block)
    _check_labels(features, labels, among)
    search = _Search(features, _pool(candidates, len(features)), labels, among, farthest, block)
    indices = torch.full((len(features), k), -1, device=features.device)
    keys = features.new_full((len(features), k), torch.inf)
    # Mixed precision would round the products far beyond `slack`.
    with torch.autocast(features.device.type, enabled=False):
        for queries in torch.arange(len(features), device=features.device).split(search.height):
            found, key = search.best(queries, k)
            indices[queries, : found.shape[1]] = found
            keys[queries, : found.shape[1]] = key
    return indices, (search.sign * keys).masked_fill_(indices < 0, torch.inf)


@torch.no_grad()
def random_neighbours(
    features: Tensor,  # (rows, width)  float32 or float64
    k: int,
    generator: torch.Generator,
    *,
    block: int = 1024,
) -> tuple[Tensor, Tensor]:  # (rows, k) int64, (rows, k)
    """k distinct other rows for every row, drawn uniformly, in no particular order, and their Euclidean distances.

    If there are fewer than k other rows, all of them are taken; the remaining entries have index -1 and distance inf.
    """
    _check(features, k, block)
    rows = len(features)
    drawn = min(k, max(rows - 1, 0))
    chosen = torch.full((rows, k), -1, device=features.device)
    # Floyd's sampling without replacement (Bentley and Floyd, CACM 30(9), 1987), for all rows at once, because one
    # permutation per row would need N x N entries. Each draw has one more possible value than the last, and takes this
    # new value if it hits one that is already chosen.
    for n in range(drawn):
        newest = rows - 1 - drawn + n
        draw = torch.randint(newest + 1, (rows,), generator=generator, device=generator.device).to(features.device)
        taken = (chosen[:, :n] == draw.unsqueeze(1)).any(1)
        chosen[:, n] = draw.masked_fill_(taken, newest)
    own = torch.arange(rows, device=features.device).unsqueeze(1)
    chosen += chosen >= own  # 0 .. rows - 2 become all indices except the row's own; -1 stays
    distances = features.new_full((rows, k), torch.inf)
    there = chosen >= 0
    row, _ = there.nonzero(as_tuple=True)
    distances[there] = _distances(features, row, chosen[there], block)
    return chosen, distances


class _Search:
    """Rows and the candidates among them. A candidate's score is its squared distance minus |query|^2, and its key is
    its distance; both are negated in a search for the farthest, so that lower is always better."""

    def __init__(
        self,
        features: Tensor,  # (rows, width)
        pool: Tensor,  # (pool,)  ascending
        labels: Tensor | None,  # (rows,)
        among: Literal["all", "same", "different"],
        farthest: bool,
        block: int,
    ) -> None:
        rows, width = features.shape
        self.features, self.pool, self.block = features, pool.to(features.device), block
        self.labels, self.among, self.sign = labels, among, -1 if farthest else 1
        self.squares = features.square().sum(1)  # (rows,)
        # Bounds the rounding of a score, of |q|^2 and of an explicit distance together: each is a sum of `width`
        # products, and |q|^2 + |c|^2 + 2 |q.c| and the squared distance stay below (|q| + |c|)^2.
        lengths = self.squares.sqrt()
        reach = lengths + (lengths[self.pool].max() if len(pool) else 0)
        number = torch.finfo(features.dtype)
        self.slack = (width + 8) * (number.eps * reach.square() + number.tiny)  # (rows,)
        self.candidates = features if len(pool) == rows else features[self.pool]  # (pool, width)
        self.position = torch.full((rows,), -1, device=features.device)  # of each row in the pool
        self.position[self.pool] = torch.arange(len(pool), device=features.device)
        # Blocks have few rows and many columns: finding the best of one long row costs less than finding those of many
        # short rows and merging them.
        self.height = max(block // 4, 1)
        step = block * block // self.height
        self.parts = [slice(start, start + step) for start in range(0, len(pool), step)]

    def best(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (queries, at most k) twice
        """Indices and keys of the k best candidates, best first; index -1 where there are no more."""
        found, score = self.preselect(queries, k + SPARE)
        key = self.features.new_full(found.shape, torch.inf)
        there = found >= 0
        row, _ = there.nonzero(as_tuple=True)
        key[there] = self.keys(queries[row], found[there])
        found, key = _rank(found, key, k)
        # Other candidates score no lower than the last preselected one: can they still be among the k?
        if score.shape[1] == k + SPARE:
            limit = self.sign * (key[:, -1].square() - self.squares[queries]) + self.slack[queries]
            last = score[:, -1]
            part = (last.isfinite() & (last <= limit)).nonzero().squeeze(1)
            if len(part):
                found[part], key[part] = self.within(queries[part], limit[part], k)
        return found, key

    def scores(self, queries: Tensor, part: slice) -> Tensor:  # (queries, part of the pool); inf: not a candidate
        squares, sign = self.squares[self.pool[part]], self.sign
        result = linear(-2 * sign * self.features[queries], self.candidates[part], sign * squares)
        own = self.position[queries] - part.start
        here = (own >= 0) & (own < result.shape[1])
        result[here.nonzero().squeeze(1), own[here]] = torch.inf
        if self.labels is not None and self.among != "all":
            same = self.labels[queries].unsqueeze(1) == self.labels[self.pool[part]]
            result.masked_fill_(same if self.among == "different" else ~same, torch.inf)
        return result

    def keys(self, left: Tensor, right: Tensor) -> Tensor:  # (pairs,) twice -> (pairs,)
        return self.sign * _distances(self.features, left, right, self.block)

    def preselect(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:  # (queries, min(count, pool)) twice
        """The candidates of the lowest scores, best first, and the scores; index -1 where there are no more."""
        best = self.scores(queries, slice(0, 0))
        index = self.pool[:0].expand(len(queries), 0)
        for part in self.parts:
            score = self.scores(queries, part)
            score, at = score.topk(min(count, score.shape[1]), dim=1, largest=False)
            best, index = torch.cat([best, score], 1), torch.cat([index, self.pool[part][at]], 1)
            if best.shape[1] > count:
                best, at = best.topk(count, dim=1, largest=False)
                index = index.gather(1, at)
        return index.masked_fill(best == torch.inf, -1), best

    def within(self, queries: Tensor, limit: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (queries, k) twice
        """The k best of all candidates whose score is within the limit, however many those are."""
        found = torch.full((len(queries), k), -1, device=queries.device)
        keys = self.features.new_full((len(queries), k), torch.inf)
        for part in self.parts:
            row, column = (self.scores(queries, part) <= limit.unsqueeze(1)).nonzero(as_tuple=True)
            index = self.pool[part][column]
            key = self.keys(queries[row], index)
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
            if self.sign > 0 and not keys[:, -1].any():  # k duplicates each, with the lowest indices: nothing is better
                break
        return found, keys


def _rank(indices: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (rows, any) twice -> (rows, at most k)
    """The k lowest keys of each row in order; equal keys are ordered by index."""
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


def _check_labels(features: Tensor, labels: Tensor | None, among: str) -> None:
    if among not in ("all", "same", "different"):
        raise ConfigError(f"among = {among!r} is not a choice of neighbours: use 'all', 'same' or 'different'.")
    if among != "all" and labels is None:
        raise ConfigError(f"among = '{among}' compares labels, but labels is None: pass one label per row.")
    if labels is not None and labels.shape != features.shape[:1]:
        raise DataError(f"labels has shape {tuple(labels.shape)}, features {tuple(features.shape)}: one label per row.")


def _check(features: Tensor, k: int, block: int) -> None:
    if features.ndim != 2:
        raise DataError(f"features has shape {tuple(features.shape)}: expected (rows, width).")
    if features.dtype not in (torch.float32, torch.float64):
        raise DataError(f"features are {features.dtype}: neighbours need float32 or float64; convert with .float().")
    if k < 1:
        raise ConfigError(f"k = {k} neighbours cannot be searched: use 1 or more.")
    if block < 1:
        raise ConfigError(f"block = {block} is not a valid block size: use 1 or more.")
    finite = (4 * features.square().sum(1)).isfinite()  # a squared distance is at most 4 times the largest square
    if not finite.all():
        raise DataError(
            f"features of row {int(finite.logical_not().nonzero()[0])} are not finite, or too large for "
            f"{features.dtype}: check the encoder's outputs, or normalise them."
        )
