"""Exact nearest neighbours in bounded memory.

Candidates are preselected by matrix products, block by block. Distances are symmetric, so a product of two blocks of
candidates serves the rows of both. The expression |q|^2 + |c|^2 - 2 q.c loses all digits near duplicates, so the
preselected candidates are ranked again by the length of the explicit difference, and equal lengths by the lower index.
If rounding or ties could have excluded a true neighbour from the preselection, the row is searched again without a
limit on the number of candidates. The result always equals that of a brute-force search.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bace.errors import ConfigError, DataError
from bace.models.allocation import keep_freed_memory
from bace.models.products import linear

SPARE = 8  # candidates preselected beyond k; affects only the speed
MANY = 8  # a tile of which more than this part is better than what is known is sorted; also affects only the speed


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
    than k candidates, the remaining entries have index -1 and distance inf, also for the farthest. The
    scores of at most block x block pairs exist at the same time, besides those of the best k + 8 of each row.
    """
    _check(features, k, block)
    _check_labels(features, labels, among)
    keep_freed_memory()  # the scores of every block are as large as those of the last one
    search = _Search(features, _pool(candidates, len(features)).to(features.device), labels, among, farthest, block)
    indices = torch.full((len(features), k), -1, device=features.device)
    keys = features.new_full((len(features), k), torch.inf)
    # Mixed precision would round the products far beyond `slack`.
    with torch.autocast(features.device.type, enabled=False):
        search.preselect(k + SPARE)
        for queries in torch.arange(len(features), device=features.device).split(block):
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


class _Tile(NamedTuple):
    """Some rows that are scored together."""

    ids: Tensor  # (rows,)
    rows: Tensor  # (rows, width)
    squares: Tensor  # (rows,) squared lengths
    start: int = 0  # position of the first one in the pool, if they are candidates


class _Search:
    """Rows and the candidates among them. A candidate's score is its squared distance and its key is its distance; both
    are negated in a search for the farthest, so that lower is always better."""

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
        self.features, self.block = features, block
        self.labels, self.among, self.sign = labels, among, -1 if farthest else 1
        self.squares = features.square().sum(1)  # (rows,)
        # Bounds the rounding of a score and of an explicit distance together: each is a sum of `width` products, and
        # |q|^2 + |c|^2 + 2 |q.c| and the squared distance stay below (|q| + |c|)^2.
        lengths = self.squares.sqrt()
        reach = lengths + (lengths[pool].max() if len(pool) else 0)
        number = torch.finfo(features.dtype)
        self.slack = (width + 8) * (number.eps * reach.square() + number.tiny)  # (rows,)
        self.position = torch.full((rows,), -1, device=features.device)  # of each row in the pool
        self.position[pool] = torch.arange(len(pool), device=features.device)
        others = (self.position < 0).nonzero().squeeze(1)
        self.candidates = self.tiles(pool, features if len(pool) == rows else features[pool])
        self.others = self.tiles(others, features[others])
        # what is known of every row so far, and pairs that are not yet compared with it: row, candidate, score
        self.index = self.score = features[:, :0]
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def tiles(self, ids: Tensor, rows: Tensor) -> list[_Tile]:  # (rows,), (rows, width)
        parts = [slice(start, start + self.block) for start in range(0, len(ids), self.block)]
        return [_Tile(ids[part], rows[part], self.squares[ids[part]], part.start) for part in parts]

    def preselect(self, count: int) -> None:
        """Find the candidates of the lowest scores for every row: `index`, -1 where there are no more, and `score`."""
        rows, device = len(self.features), self.features.device
        self.index = torch.full((rows, count), -1, device=device)
        self.score = self.features.new_full((rows, count), torch.inf)
        for tile in self.candidates:  # first, because a row's first scores decide how many others are collected
            self.sort_out(tile, tile, self.scores(tile, tile))
        for left, right in itertools.combinations(self.candidates, 2):
            self.collect(left, right, both=True)
        for left, right in itertools.product(self.others, self.candidates):
            self.collect(left, right, both=False)
        self.merge()

    def scores(self, left: _Tile, right: _Tile) -> Tensor:  # (left, right); inf: not a candidate
        sign = self.sign
        result = linear(-2 * sign * left.rows, right.rows, sign * right.squares)
        result += sign * left.squares.unsqueeze(1)
        own = self.position[left.ids] - right.start
        here = (self.position[left.ids] >= 0) & (own >= 0) & (own < result.shape[1])
        result[here.nonzero().squeeze(1), own[here]] = torch.inf
        if self.labels is not None and self.among != "all":
            same = self.labels[left.ids].unsqueeze(1) == self.labels[right.ids]
            result.masked_fill_(same if self.among == "different" else ~same, torch.inf)
        return result

    def collect(self, left: _Tile, right: _Tile, both: bool) -> None:
        """Keep the pairs that score better than the last candidate that is known of the left row or, if both tiles are
        candidates, of the right one: distances are symmetric, so one product serves both."""
        scores, limit, count = self.scores(left, right), self.score[left.ids, -1:], self.index.shape[1]
        if both:
            limit = torch.maximum(limit, self.score[right.ids, -1])
        better = scores < limit
        if int(better.count_nonzero()) > min(2 * count * len(left.ids), scores.numel() // MANY):
            self.sort_out(left, right, scores)
            if both:
                self.sort_out(right, left, scores.T.contiguous())
            return
        row, column = better.nonzero(as_tuple=True)
        one, other, score = left.ids[row], right.ids[column], scores[row, column]
        self.pending += [(one, other, score), (other, one, score)] if both else [(one, other, score)]
        if sum(len(rows) for rows, _, _ in self.pending) > self.block**2 // MANY:
            self.merge()

    def sort_out(self, queries: _Tile, candidates: _Tile, scores: Tensor) -> None:  # (queries, candidates)
        score, column = scores.topk(min(self.index.shape[1], scores.shape[1]), dim=1, largest=False)
        self.take(queries.ids, candidates.ids[column].masked_fill_(score == torch.inf, -1), score)

    def merge(self) -> None:
        """Compare the pending pairs with what is known of their rows."""
        if self.pending:
            row, index, score = (torch.cat(parts) for parts in zip(*self.pending, strict=True))
            self.pending = []
            row, index, score = (part[score < self.score[row, -1]] for part in (row, index, score))
            rows, at = row.unique(return_inverse=True)
            self.take(rows, *_best_of_pairs(at, index, score, len(rows), self.index.shape[1]))

    def take(self, rows: Tensor, index: Tensor, score: Tensor) -> None:  # (rows,), (rows, any) twice
        """Take these candidates into `index` and `score` where they are among the best."""
        index, score = torch.cat([self.index[rows], index], 1), torch.cat([self.score[rows], score], 1)
        self.score[rows], at = score.topk(self.index.shape[1], dim=1, largest=False)
        self.index[rows] = index.gather(1, at)

    def best(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (queries, at most k) twice
        """Indices and keys of the k best candidates, best first; index -1 where there are no more."""
        found, score = self.index[queries], self.score[queries]
        key = self.features.new_full(found.shape, torch.inf)
        there = found >= 0
        row, _ = there.nonzero(as_tuple=True)
        key[there] = self.keys(queries[row], found[there])
        found, key = _rank(found, key, k)
        # Other candidates score no lower than the last preselected one: can they still be among the k?
        limit = self.sign * key[:, -1].square() + self.slack[queries]
        last = score[:, -1]
        part = (last.isfinite() & (last <= limit)).nonzero().squeeze(1)
        if len(part):
            found[part], key[part] = self.within(queries[part], limit[part], k)
        return found, key

    def keys(self, left: Tensor, right: Tensor) -> Tensor:  # (pairs,) twice -> (pairs,)
        return self.sign * _distances(self.features, left, right, self.block)

    def within(self, queries: Tensor, limit: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (queries, k) twice
        """The k best of all candidates whose score is within the limit, however many those are."""
        found = torch.full((len(queries), k), -1, device=queries.device)
        keys = self.features.new_full((len(queries), k), torch.inf)
        (tile,) = self.tiles(queries, self.features[queries])
        for part in self.candidates:
            row, column = (self.scores(tile, part) <= limit.unsqueeze(1)).nonzero(as_tuple=True)
            index = part.ids[column]
            pairs = _best_of_pairs(row, index, self.keys(queries[row], index), len(queries), k)
            found, keys = _rank(torch.cat([found, pairs[0]], 1), torch.cat([keys, pairs[1]], 1), k)
            if self.sign > 0 and not keys[:, -1].any():  # k duplicates each, with the lowest indices: nothing is better
                break
        return found, keys


def _best_of_pairs(
    row: Tensor,  # (pairs,)
    index: Tensor,  # (pairs,)
    key: Tensor,  # (pairs,)
    rows: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # (rows, count) twice
    """Indices and keys of the pairs with the lowest keys of each row, best first; index -1 where there are no more.
    Equal keys keep their order."""
    order = key.argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    row, index, key = row[order], index[order], key[order]
    counts = row.bincount(minlength=rows)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    row, index, key, rank = (t[rank < count] for t in (row, index, key, rank))
    best = torch.full((rows, count), -1, device=row.device), key.new_full((rows, count), torch.inf)
    best[0][row, rank], best[1][row, rank] = index, key
    return best


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
