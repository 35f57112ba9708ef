"""Quantities computed from numbers of runs, and the comparisons that claims consist of.

A quantity is a number of a run, or is computed from several numbers. It is evaluated seed by seed, so that comparisons
are paired, and once from the printed means. A comparison gives the range of a quantity if the claim is true.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from bace.paper.results import rank_correlation
from bace.paper.tables import Block, Buffer, Cell

Leaf = tuple[Cell, str, str]  # a cell, the name of one of its numbers, the table of published.csv that may print it


@dataclass(frozen=True)
class Quantity:
    """A quantity computed from numbers of cells."""

    text: str
    place: str
    leaves: tuple[Leaf, ...]
    compute: Callable[[Sequence[float]], float]  # of the leaves' numbers

    def __sub__(self, other: "Quantity") -> "Quantity":
        return combine(lambda v: v[0] - v[1], f"{self.text} - {other.text}", self, other)

    def __add__(self, other: "Quantity") -> "Quantity":
        return combine(lambda v: v[0] + v[1], f"{self.text} + {other.text}", self, other)

    def __rmul__(self, factor: float) -> "Quantity":
        return combine(lambda v: factor * v[0], f"{factor:g} x ({self.text})", self)

    def __truediv__(self, other: "Quantity") -> "Quantity":
        return combine(lambda v: v[0] / v[1] if v[1] else math.nan, f"({self.text}) / ({other.text})", self, other)

    def __abs__(self) -> "Quantity":
        return combine(lambda v: abs(v[0]), f"|{self.text}|", self)


def combine(f: Callable[[Sequence[float]], float], text: str, *parts: Quantity) -> Quantity:
    """A quantity computed from others."""

    def compute(numbers: Sequence[float]) -> float:
        values, first = [], 0
        for part in parts:
            values.append(part.compute(numbers[first : first + len(part.leaves)]))
            first += len(part.leaves)
        return f(values)

    places = dict.fromkeys(part.place for part in parts)
    leaves = tuple(leaf for part in parts for leaf in part.leaves)
    return Quantity(text, " and ".join(places), leaves, compute)


@dataclass(frozen=True)
class Place:
    """A place in the tables. Call it with a method and a metric to get a quantity."""

    block: Block
    steps: int
    buffer: Buffer
    table: str

    @property
    def name(self) -> str:
        return f"{self.block.group or self.block.benchmark}, {self.steps} tasks, memory {self.buffer}"

    def __call__(self, method: str, metric: str = "A_last", buffer: Buffer | None = None) -> Quantity:
        at = self if buffer is None else replace(self, buffer=buffer)
        cell = Cell(at.block, at.steps, at.buffer, method)
        text = method if metric in ("A_last", "Acc") else f"{metric} of {method}"
        return Quantity(text, at.name, ((cell, metric, at.table),), lambda numbers: numbers[0])


# -- claims about quantities


@dataclass(frozen=True)
class Comparison:
    """If the claim is true, the quantity lies between `low` and `high`."""

    text: str
    quantity: Quantity
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Among:
    """At least `need` of the parts are true."""

    parts: tuple["Comparison | Among", ...]
    need: int

    def comparisons(self) -> list[Comparison]:
        return [c for part in self.parts for c in ([part] if isinstance(part, Comparison) else part.comparisons())]


Part = Comparison | Among


def every(*parts: Part | Iterable[Part]) -> Among:
    found = _flat(parts)
    return Among(found, len(found))


def some(*parts: Part | Iterable[Part], need: int = 1) -> Among:
    return Among(_flat(parts), need)


def _flat(parts: Iterable[Part | Iterable[Part]]) -> tuple[Part, ...]:
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Comparison | Among):
            found.append(part)
        else:
            found.extend(part)
    return tuple(found)


def exchanged(check: Among, exchange: Callable[[Cell], Cell]) -> Among:
    """The same comparisons with other cells."""

    def of(part: Part) -> Part:
        if isinstance(part, Among):
            return exchanged(part, exchange)
        leaves = tuple((exchange(cell), metric, table) for cell, metric, table in part.quantity.leaves)
        return replace(part, quantity=replace(part.quantity, leaves=leaves))

    return replace(check, parts=tuple(of(part) for part in check.parts))


def greater(a: Quantity, b: Quantity, by: float = 0.0) -> Comparison:
    """a > b + by; with a negative `by`, a is not below b by more than that."""
    more = f" by {by:g}" if by > 0 else ""
    word = "not below" if by < 0 else ">"
    where = f", {a.place}" if a.place == b.place else f": {a.place} against {b.place}"
    return Comparison(f"{a.text} {word} {b.text}{more}{where}", a - b, low=by)


def within(a: Quantity, b: Quantity, tolerance: float) -> Comparison:
    where = f", {a.place}" if a.place == b.place else f": {a.place} against {b.place}"
    return Comparison(f"{a.text} within {tolerance:g} of {b.text}{where}", a - b, -tolerance, tolerance)


def lies(a: Quantity, low: float = -math.inf, high: float = math.inf) -> Comparison:
    text = f"{low:g} < " * (low > -math.inf) + a.text + f" < {high:g}" * (high < math.inf)
    return Comparison(f"{text}, {a.place}", a, low, high)


def rising(values: Sequence[Quantity], by: float = 0.0) -> Among:
    """Each value is greater than the one before."""
    return every(greater(b, a, by) for a, b in pairwise(values))


def falling(values: Sequence[Quantity]) -> Among:
    return rising(values[::-1])


def correlation(xs: Sequence[Quantity], ys: Sequence[Quantity], text: str) -> Quantity:
    size = len(xs)
    found = combine(lambda v: rank_correlation(v[:size], v[size:]), f"rank correlation of {text}", *xs, *ys)
    return replace(found, place=xs[0].place if len({x.place for x in xs}) == 1 else "over memory sizes")


def spread(values: Sequence[Quantity], text: str) -> Quantity:
    return combine(lambda v: max(v) - min(v), f"range of {text}", *values)


def mean(values: Sequence[Quantity]) -> Quantity:
    found = combine(fmean, values[0].text, *values)
    return replace(found, place="mean over the settings")
