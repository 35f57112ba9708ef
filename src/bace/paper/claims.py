"""The paper's claims, each as comparisons of runs that can be computed, and what the finished runs say about them.

A quantity is a number of a run, or is computed from several; it is evaluated seed by seed, so that comparisons are
paired, and once from the printed means. A comparison says in which range a quantity lies if the claim is true: its mean
over seeds comes with a 95 % confidence interval (Student's t), and inside the range it is supported, outside not
supported, across its end undecided. docs/paper.md has the rules; `CLAIMS` below is the list.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from bace.paper.catalogue import (
    ABLATIONS,
    CIFAR,
    DEITS,
    ENTRIES,
    FIVE,
    HARD,
    HARD_METHODS,
    LONGER,
    NER,
    RIVALS,
    TEXT,
    VARIANTS,
    WITH_MEMORY,
    WITHOUT_MEMORY,
    Block,
    Buffer,
    Cell,
    Scale,
    published,
    rows_of,
)
from bace.paper.results import NUMBERS, Finished, finished_runs, rank_correlation

Verdict = Literal["supported", "not supported", "undecided", "missing runs", "not measured", "not testable"]
Leaf = tuple[Cell, str, str]  # a cell, the number of it that is meant, the table of published.csv that may print it


@dataclass(frozen=True)
class Quantity:
    """Something to compute from numbers of cells."""

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
    """Where in the tables: call it with a method and a metric."""

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


# -- what is claimed of quantities


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


def greater(a: Quantity, b: Quantity, by: float = 0.0) -> Comparison:
    """a > b + by; with a negative `by`: not below b by more than that."""
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
    """Each greater than the one before."""
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


# -- places

SMALL, LARGE = ([Place(CIFAR, steps, buffer, "cifar100") for steps in (20, 10)] for buffer in (100, 500))
FOUR = [*SMALL, *LARGE]
FIVES = [Place(FIVE, 5, buffer, "five_datasets") for buffer in (250, 500)]
ALPHAS = [replace(place, table="alpha") for place in FOUR]
TEXTS, NERS = (
    [Place(block, 5, buffer, name) for buffer in (100, 500)] for block, name in ((TEXT, "text"), (NER, "ner"))
)
HARDS = [Place(block, block.steps[0], block.buffers[0], "challenging") for block in HARD]
OMNI, VTAB = HARDS[0], HARDS[3]
TENS = [Place(block, block.steps[0], block.buffers[0], "deit") for block in DEITS]
PROBE = Place(CIFAR, 20, 200, "prose")
LONG = Place(LONGER, 20, 500, "")
FULL, NO_NEW, NO_OLD, NEITHER = "BaCE", "BaCE (W0=1)", "BaCE (alpha=0)", "BaCE (W0=1, alpha=0)"
CORRECTED = "BaCE + bias correction"
SEVEN = HARD_METHODS[:-1]  # without the bias correction


def probe(method: str, metric: str, buffer: Buffer | None = None) -> Quantity:
    """A number of the probing study; SEQ has no memory, MTL all."""
    own: dict[str, Buffer] = {"SEQ": 0, "MTL": "inf"}
    return PROBE(method, metric, own.get(method, buffer))


def sweep(metric: str) -> list[Quantity]:
    """Replay with a growing memory, from none to all."""
    sizes: tuple[Buffer, ...] = (100, 200, 500, 1000, 2000, "all")
    return [probe("SEQ", metric), *(probe("ER", metric, size) for size in sizes)]


def beats(places: Sequence[Place], *others: str, metric: str = "A_last", method: str = FULL) -> Among:
    return every(greater(at(method, metric), at(other, metric)) for other in others for at in places)


def below(places: Sequence[Place], *others: str, metric: str, method: str = FULL) -> Among:
    return every(greater(at(other, metric), at(method, metric)) for other in others for at in places)


def deit_beats(*others: str) -> Among:
    return every(
        greater(at(FULL), at(other, buffer=0 if other in WITHOUT_MEMORY else None)) for other in others for at in TENS
    )


def share_recovered(method: str, buffer: Buffer | None = None) -> Quantity:
    seen, best = probe(method, "A_observed", buffer), probe("MTL", "A_observed")
    found = (probe(method, "A_probing", buffer) - seen) / (best - seen)
    return replace(found, text=f"share of {method}'s loss that probing recovers", place=seen.place)


def probing_gap(method: str, buffer: Buffer | None = None) -> Quantity:
    found = probe(method, "A_probing", buffer) - probe(method, "A_observed", buffer)
    return replace(found, text=f"probing less observed accuracy of {method}")


def pairs(both: Sequence[str], metric: str, *memories: Buffer) -> list[Quantity]:
    return [probe(both[0], metric), *(probe(both[1], metric, memory) for memory in memories)]


def gain(at: Place, method: str, base: str) -> Quantity:
    return replace(at(method) - at(base), text=f"gain of {method} over {base}", place=at.name)


def more_memory(places: Sequence[Place], *methods: str) -> Iterable[Part]:
    small, large = places
    return (greater(large(method), small(method)) for method in methods)


def least_helped(places: Sequence[Place], little: Sequence[str], much: Sequence[str]) -> Iterable[Part]:
    small, large = places

    def growth(method: str) -> Quantity:
        return replace(large(method) - small(method), text=f"gain of {method} from more memory", place=large.name)

    return (greater(growth(b), growth(a)) for a in little for b in much)


# -- the claims


@dataclass(frozen=True)
class Encoded:
    """What must be true of the runs; `reading`: what of the claim is tested, where that is not all it says."""

    check: Among
    reading: str = ""


@dataclass(frozen=True)
class Untestable:
    reason: str


def _claims() -> dict[str, Encoded | Untestable]:
    """By id. Numbers such as 20 points are our readings of words such as 'large'."""
    found: dict[str, Encoded | Untestable] = {}

    def claim(number: int, *parts: Part | Iterable[Part], reading: str = "") -> None:
        found[f"C{number:02d}"] = Encoded(every(*parts), reading)

    def not_testable(number: int, reason: str) -> None:
        found[f"C{number:02d}"] = Untestable(reason)

    seq_er = ("SEQ", "ER")
    # -- probing and tracking
    steps = "accuracies averaged over the incremental steps, as the introduction's are"
    claim(1, lies(probing_gap("SEQ"), 20), reading=f"large: over 20 points; {steps}")
    claim(
        2,
        lies(probing_gap("ER", 100), 10),
        greater(probing_gap("SEQ"), probing_gap("ER", 100)),
        reading=f"large: over 10 points; {steps}",
    )
    claim(
        3,
        greater(
            0.5 * (probe("MTL", "A_observed") - probe("SEQ", "A_observed")),
            probe("MTL", "A_probing") - probe("SEQ", "A_probing"),
        ),
        reading=f"much smaller: less than half; {steps}",
    )
    claim(
        4,
        lies(share_recovered("SEQ"), 0.7),
        lies(share_recovered("ER", 200), 0.7),
        reading="most: over 70 %; the contrast with an exchanged encoder is not run",
    )
    claim(
        5,
        (
            greater(a, b)
            for a, b in zip(pairs(seq_er, "probing_slope", 100), pairs(seq_er, "observed_slope", 100), strict=True)
        ),
    )
    claim(6, falling(sweep("gap")), lies(sweep("gap")[-1], -3, 3), reading="towards 0: within 3 points with all data")
    claim(
        7,
        within(probe("ER", "A_probing", 100), probe("SEQ", "A_probing"), 5),
        greater(probe("ER", "A_observed", 100), probe("SEQ", "A_observed"), 20),
        reading=f"hardly: within 5 points; a lot: over 20; {steps}",
    )
    claim(8, lies(probing_gap("MTL"), -3, 3), reading=f"nearly: within 3 points; {steps}")
    claim(
        9,
        (greater(at(method, "Prob.Acc"), at(method, "Acc")) for method in HARD_METHODS for at in HARDS),
        (lies(gap, 0) for gap in pairs(seq_er, "gap", 100, 200)),
    )
    limits: list[Part] = []
    for at_all, methods in (
        (FOUR, (*RIVALS, *ABLATIONS)),
        (FIVES, ("ER", "GDumb", "BiC", "DER++", "Co2L", "CLS-ER", "FOSTER", "MEMO", "BEEF", "L2P", *ABLATIONS)),
        (TEXTS, ("Sparse-ER", "ER", "MBPA", "MBPA++", "IDBR", "BaCE")),
        (NERS, ("Sparse-ER", "ER", "MBPA", "MBPA++", "ExtendNER", "CFNER", "BaCE")),
    ):
        for at in at_all:
            limits += [greater(at("MTL", buffer="inf"), at(method)) for method in methods]
            limits += [greater(at(method), at("SEQ", buffer=0)) for method in methods]
    claim(10, limits)
    claim(11, (lies(q, 0.9) for q in pairs(seq_er, "lowest_when_learned", 200)), reading="of over 90 % of the tasks")
    claim(12, (lies(q, 0) for m in ("distance_trend", "distance_growth") for q in pairs(seq_er, m, 200)))
    claim(13, (lies(q, 0.9) for q in pairs(seq_er, "new_below_old", 200)), reading="at over 90 % of the steps")
    claim(
        14,
        (lies(q, 0.9) for q in pairs(seq_er, "pushed_away", 200)),
        reading="always: over 90 % of steps and old tasks; new classes have no embedding before their step",
    )
    claim(
        15,
        (lies(probe("ER", "distance_and_accuracy", size), high=0) for size in (200, 500)),
        reading="rank correlation over tasks, not classes, after the last task",
    )
    not_testable(16, "needs training on old data alone after a task, which no method here does")
    claim(17, falling(sweep("distance_all")), falling(sweep("distance_all_avg")))
    claim(
        18,
        lies(correlation(sweep("distance_all"), sweep("gap"), "distance and gap"), 0),
        lies(correlation(sweep("distance_all"), sweep("A_last"), "distance and accuracy"), high=0),
        reading="over memory sizes",
    )
    claim(
        19,
        falling(sweep("FGT")),
        lies(correlation(sweep("distance_all"), sweep("FGT"), "distance and forgetting"), 0),
    )
    old, new = sweep("distance_old"), sweep("distance_new")
    claim(20, falling(old))
    claim(21, rising(new), greater(abs(old[-1] - old[0]), abs(new[-1] - new[0])))
    claim(
        22,
        lies(probe("MTL", "distance_growth"), -0.05, 0.05),
        lies(probe("MTL", "Feat.Embed.Dist"), -0.05, 0.05),
        lies(probing_gap("MTL"), -3, 3),
        reading="about 0: within 0.05 (distance) and 3 points",
    )
    claim(
        23,
        within(probe("ER", "A_last", "all"), probe("MTL", "A_last"), 3),
        lies(probe("ER", "Feat.Embed.Dist", "all"), -0.05, 0.05),
        greater(probe("MTL", "A_last"), probe("ER", "A_last", 100), 3),
        lies(probe("ER", "Feat.Embed.Dist", 100), 0.05),
        reading="cancel out: within 3 points and 0.05; clearly worse: beyond that",
    )
    # -- prior methods, and what BaCE is made of
    for_memory = (*RIVALS, FULL)
    claim(24, (c for both in zip(SMALL, LARGE, strict=True) for c in more_memory(both, *for_memory)))
    claim(
        25,
        (greater(at(strong), at(weak, buffer=0)) for at in SMALL for weak in ("LwF", "EWC") for strong in ("ER", FULL)),
        reading="below ER and BaCE with memory 100",
    )
    not_testable(26, "runs record no peak memory; `bace paper run ID --dry_run` prints an estimate")
    betas = [f"BaCE (beta={beta})" for beta in (1, 0.99, 0.5, 0)]
    claim(27, (greater(at(FULL), at(beta)) for at in (SMALL[0], LARGE[0]) for beta in betas))
    claim(28, beats(FOUR, NEITHER, "DER++", method=NO_NEW))
    not_testable(29, "no experiment in the paper, and no method here weights the classes of the cross-entropy")
    claim(30, beats(FOUR, "DDE", method=NO_OLD))
    claim(31, (within(at(NEITHER), at("DER++"), 2) for at in FOUR), reading="essentially: within 2 points")
    claim(32, (greater(at(FULL, buffer=0), at(other, buffer=0)) for at in SMALL for other in ("SEQ", "LwF")))
    # -- split CIFAR-100
    for number, rival in enumerate(RIVALS[:9], 33):
        claim(number, beats(FOUR, rival))
    claim(42, below(FOUR, *RIVALS, metric="FGT"))
    claim(
        43,
        beats(FOUR, *RIVALS, metric="FWT"),
        reading="FWT by an imprinted temporary head: printed values differ in kind",
    )
    by_steps = list(zip(SMALL, LARGE, strict=True))
    claim(44, (greater(gain(a, FULL, "ER"), gain(b, FULL, "ER")) for a, b in by_steps))
    weak, strong = ("ER", "BiC", "DDE", "LUCIR"), ("DER++", "CLS-ER", "MEMO")
    claim(
        45,
        (greater(at(b), at(a)) for at in SMALL for a in weak for b in strong),
        (lies(gain(at, a, "ER"), high=10) for at in SMALL for a in weak[1:]),
        reading="modestly: by less than 10 points",
    )
    claim(
        46, (beats(FOUR, "ER", method=method) for method in ("BiC", "LUCIR", "DDE")), beats(FOUR, "PODNet", method="ER")
    )
    claim(
        47,
        beats(FOUR, "ER", method="DER++"),
        (greater(gain(a, "DER++", "ER"), gain(b, "DER++", "ER")) for a, b in by_steps),
    )
    claim(48, (greater(SMALL[1](method), SMALL[0](method)) for method in (*RIVALS, *ABLATIONS)))

    def to_joint(at: Place) -> Quantity:
        return replace(at("MTL", buffer="inf") - at(FULL), text="joint training less BaCE", place=at.name)

    claim(49, (greater(to_joint(a), to_joint(b)) for a, b in by_steps))
    # -- 5-datasets
    fives = ("ER", "GDumb", "BiC", "DER++", "Co2L", "L2P", "CLS-ER", "FOSTER", "MEMO", "BEEF")
    for number, rival in enumerate(fives, 50):
        claim(number, beats(FIVES, rival))
    claim(60, below(FIVES, *fives, metric="FGT"))
    claim(
        61,
        greater(FIVES[0]("MTL", buffer="inf"), FIVES[0]("SEQ", buffer=0), 20),
        reading="joint training stands for each alone; challenging: SEQ is over 20 points below it",
    )
    # -- ablations
    six = [*FOUR, *FIVES]
    claim(62, beats(six, NO_NEW))
    claim(63, beats(six, NO_OLD))
    claim(64, beats(six, NEITHER, method=NO_NEW))
    claim(65, beats(six, NEITHER, method=NO_OLD))
    claim(66, beats(six, NEITHER))
    claim(67, beats(six, NO_NEW), beats(six, NEITHER, method=NO_OLD))
    claim(68, below(six, NO_NEW, metric="FGT"), below(six, NEITHER, metric="FGT", method=NO_OLD))
    claim(69, below(six, NO_OLD, metric="FGT"), below(six, NEITHER, metric="FGT", method=NO_NEW))
    claim(70, beats(FOUR, *ABLATIONS[:3], metric="FWT"))
    claim(71, beats(FOUR, NO_OLD, method=NO_NEW), beats(FIVES, NO_NEW, method=NO_OLD))
    claim(72, (greater(gain(a, FULL, NO_OLD), gain(b, FULL, NO_OLD)) for a, b in by_steps))
    claim(
        73,
        (within(gain(at, FULL, NEITHER), gain(at, NO_NEW, NEITHER) + gain(at, NO_OLD, NEITHER), 3) for at in FOUR),
        reading="roughly: within 3 points",
    )
    claim(74, beats(FOUR, *RIVALS, method=NO_NEW))
    claim(
        75,
        beats(FOUR, "ER", "DER++", method=NO_OLD),
        some(greater(at(other), at(NO_OLD)) for other in ("CLS-ER", "MEMO") for at in FOUR),
        reading="not always: below one of them somewhere",
    )
    # -- neighbours and hyper-parameters
    shown = [FIVES[1], LARGE[0]]
    claim(
        76,
        (greater(at(FULL, "neighbour_purity"), at(FULL, "chance_purity"), 10) for at in shown),
        reading="well above: by over 10 points; over the anchors of the gallery",
    )
    claim(77, (lies(at(FULL, "neighbour_purity"), high=100) for at in shown), reading="over the anchors of the gallery")
    not_testable(78, "needs relations between classes (superclasses), which the gallery does not hold")
    claim(
        79,
        greater(SMALL[0](FULL, "Prob.Acc"), SMALL[0](NO_NEW, "Prob.Acc")),
        reading="probing accuracy only, of all tasks",
    )
    weights = [f"BaCE (W0={w})" for w in (0.5, 0.8, 0.9, 0.99, 1)]
    claim(
        80,
        (greater(mean([at(FULL) for at in FOUR]), mean([at(w) for at in FOUR])) for w in weights),
        reading="robust: the highest mean over the four settings",
    )
    claim(81, beats(FOUR, NO_NEW))
    alphas = (NO_OLD, "BaCE (alpha=0.01)", "BaCE (alpha=0.1)", FULL)
    claim(82, (rising([at(alpha) for alpha in alphas]) for at in ALPHAS))
    claim(
        83,
        beats(ALPHAS, *alphas[:3]),
        (greater(gain(a, FULL, NO_OLD), gain(b, FULL, NO_OLD)) for a, b in zip(ALPHAS[:2], ALPHAS[2:], strict=True)),
    )
    claim(84, (within(at(alphas[1]), at(NO_OLD), 1) for at in ALPHAS), reading="almost nothing: within 1 point")
    claim(
        85,
        (greater(at(FULL, "Acc"), at("BaCE (alpha=1)", "Acc"), -0.5) for at in HARDS),
        reading="at least as high: not below by over half a point",
    )
    at = LARGE[0]
    claim(86, beats([at], NO_NEW, "BaCE (K=1)", "BaCE (K=3)", "BaCE (K=10)"))
    claim(87, beats([at], "BaCE (K=10)"))
    claim(
        88,
        rising([at("BaCE (K=1)"), at("BaCE (K=3)"), at(FULL)], by=-0.5),
        reading="non-decreasing: by not over half a point",
    )
    claim(89, beats([at], "ER", metric="seconds"))
    claim(
        90,
        rising([at(method, "seconds") for method in (NO_NEW, "BaCE (K=1)", "BaCE (K=3)", FULL, "BaCE (K=10)")]),
        reading="time grows with K, from none on; no profile is taken",
    )
    claim(
        91,
        greater(at(FULL), LONG("ER")),
        reading="ER with 12 epochs for BaCE's 5 (at desk scale 7 for 3): about the same passes",
    )
    # -- DeiT with adapters
    claim(92, deit_beats(*WITHOUT_MEMORY, *WITH_MEMORY[:-1]))
    for number, rival in enumerate((*WITH_MEMORY[:-1], *WITHOUT_MEMORY), 93):
        claim(number, deit_beats(rival))
    claim(106, deit_beats("DER++"))
    # -- hard data sets
    for number, rival in enumerate(HARD_METHODS[:6], 107):
        claim(number, beats(HARDS, rival, metric="Acc"))
    for number, rival in enumerate(("BiC", "LUCIR", "IL2M")):
        claim(113 + number, beats(HARDS, rival, metric="Prob.Acc"))
        claim(117 + number, below(HARDS, rival, metric="Feat.Embed.Dist"))
    claim(116, beats(HARDS, "ER", "DER++", "CLS-ER", metric="Prob.Acc"))
    claim(120, below(HARDS, "ER", "DER++", "CLS-ER", metric="Feat.Embed.Dist"))
    claim(
        121,
        some(greater(at("ER", "Prob.Acc"), at(method, "Prob.Acc")) for method in ("BiC", "IL2M") for at in HARDS),
        reading="not necessarily: one of them is below ER somewhere",
    )
    claim(
        122,
        beats(HARDS, "ER", metric="Acc", method="BiC"),
        beats(HARDS, "ER", metric="Acc", method="IL2M"),
        some((greater(at("LUCIR", "Acc"), at("ER", "Acc")) for at in HARDS), need=3),
        reading="LUCIR on at least three of the four",
    )

    def range_of(at: Place, metric: str) -> Quantity:
        return spread([at(method, metric) for method in SEVEN], metric)

    claim(123, (greater(range_of(at, "Acc"), range_of(at, "Prob.Acc")) for at in HARDS))

    def gap(at: Place, method: str) -> Quantity:
        found = at(method, "Prob.Acc") - at(method, "Acc")
        return replace(found, text=f"gap of {method}", place=at.name)

    claim(124, (greater(gap(at, other), gap(at, FULL)) for at in HARDS for other in SEVEN[:-1]))
    claim(
        125,
        (
            lies(
                correlation(
                    [at(method, "Feat.Embed.Dist") for method in SEVEN],
                    [at(method, "Acc") for method in SEVEN],
                    "distance difference and accuracy",
                ),
                high=0,
            )
            for at in HARDS
        ),
    )

    def off_balance(at: Place, method: str) -> Quantity:
        return abs(at(method, "imbalance"))

    drawn = (OMNI, VTAB)
    order = (("BiC", FULL), ("BiC", "IL2M"), (FULL, "LUCIR"), ("IL2M", "LUCIR"))
    claim(126, (greater(off_balance(at, b), off_balance(at, a)) for at in drawn for a, b in order))
    claim(127, beats(drawn, "BiC", metric="old_accuracy"))
    claim(128, beats(drawn, "IL2M", metric="old_accuracy"))
    claim(
        129,
        beats(HARDS, "BiC", metric="Prob.Acc"),
        some(greater(at("ER", "Prob.Acc"), at("BiC", "Prob.Acc")) for at in HARDS),
        reading="probing accuracy only; how far the memory misrepresents a class is not measured",
    )
    claim(130, (lies(at(FULL, "imbalance"), 0) for at in drawn))
    claim(
        131,
        (lies(replace(at(CORRECTED, "Acc") - at(FULL, "Acc"), place=at.name), 0, 1.5) for at in HARDS),
        reading="slightly: by at most 1.5 points",
    )
    claim(
        132,
        (within(at(CORRECTED, "Prob.Acc"), at(FULL, "Prob.Acc"), 1) for at in HARDS),
        (within(at(CORRECTED, "Feat.Embed.Dist"), at(FULL, "Feat.Embed.Dist"), 0.02) for at in HARDS),
        reading="within 1 point and 0.02: our correction holds examples out from the start, so the two runs differ",
    )
    claim(133, (greater(off_balance(at, FULL), off_balance(at, CORRECTED)) for at in drawn))
    learned = [replace(at, table="prose") for at in drawn]
    claim(
        134,
        (lies(at(CORRECTED, "bias_alpha"), 0.8, 1) for at in learned),
        (lies(at(CORRECTED, "bias_beta"), -0.2, 0) for at in learned),
        reading="a little: a scale over 0.8, a shift over -0.2",
    )
    claim(135, beats(HARDS, FULL, metric="Acc", method=CORRECTED), reading="bias correction only")
    for number, variant in enumerate(VARIANTS, 136):
        claim(number, beats([replace(at, table="f10") for at in HARDS], variant))
    claim(
        141,
        beats(HARDS, VARIANTS[0], metric="Acc"),
        reading="that `same` is worse; drift from the teacher is not measured",
    )
    # -- texts and entities
    generic = ("Sparse-ER", "ER", "MBPA", "MBPA++")
    for first, places, special in ((142, TEXTS, ("IDBR",)), (151, NERS, ("ExtendNER", "CFNER"))):
        rivals = (*generic, *special)
        for number, rival in enumerate(rivals, first):
            claim(number, beats(places, rival))
        number = first + len(rivals)
        claim(number, (greater(at(FULL), at(other, buffer=0)) for at in places for other in ("LwF", "EWC")))
        claim(number + 1, below(places, *rivals, metric="FGT"))
        claim(number + 2, beats(places, *rivals, metric="FWT"))
        little, much = ("Sparse-ER", "MBPA"), ("ER", "MBPA++", *special, FULL)
        claim(
            number + 3,
            more_memory(places, *rivals, FULL),
            least_helped(places, little, much),
            reading="hardly: less than every other method",
        )
    both = list(zip(TEXTS, NERS, strict=True))
    claim(
        161,
        (greater(t(FULL), n(FULL)) for t, n in both),
        greater(TEXTS[0]("MTL", buffer="inf"), NERS[0]("MTL", buffer="inf")),
        (greater(to_joint(n), to_joint(t)) for t, n in both),
    )
    claim(
        162,
        beats(TEXTS, *generic, method="IDBR"),
        (beats(NERS, *generic, method=method) for method in ("ExtendNER", "CFNER")),
        beats(TEXTS, *generic, "IDBR"),
        beats(NERS, *generic, "ExtendNER", "CFNER"),
    )
    claim(
        163,
        beats(FOUR, "ER", "DER++"),
        beats(HARDS, "ER", "DER++", metric="Acc"),
        deit_beats("DER++"),
        beats([*TEXTS, *NERS], "ER"),
        reading="against ER and DER++ where the paper has them",
    )
    others = ("ER", "DER++")
    claim(
        164,
        beats(SMALL, *others, metric="old_accuracy"),
        (greater(at(FULL, "new_accuracy"), at(other, "new_accuracy"), -1) for other in others for at in SMALL),
        below(HARDS, "ER", metric="distance_old"),
        (greater(at("ER", "distance_new"), at(FULL, "distance_new"), -0.02) for at in HARDS),
        reading="not lower: by not over 1 point; not higher: by not over 0.02",
    )
    claim(
        165,
        greater(off_balance(OMNI, FULL), off_balance(OMNI, "BiC")),
        greater(OMNI("BiC", "Feat.Embed.Dist"), OMNI(FULL, "Feat.Embed.Dist")),
        greater(off_balance(VTAB, "IL2M"), off_balance(VTAB, "BiC")),
        greater(VTAB("BiC", "Feat.Embed.Dist"), VTAB("IL2M", "Feat.Embed.Dist")),
        reading="the two examples that it gives",
    )
    return found


CLAIMS = _claims()

# -- evaluation


@dataclass(frozen=True)
class Outcome:
    """What the runs say about one comparison."""

    text: str
    verdict: Verdict
    seeds: int = 0
    mean: float | None = None
    interval: tuple[float, float] | None = None  # 95 %; none with one seed


@dataclass(frozen=True)
class Evaluated:
    """What the runs, and the printed means, say about a claim."""

    id: str
    claim: str
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    missing: tuple[Cell, ...]  # without a finished run
    printed: bool | None  # whether the printed means agree; None: none are printed
    printed_against: tuple[str, ...]  # comparisons that the printed means contradict
    note: str  # reading, or why it cannot be tested


def evaluate(out: Path, scale: Scale) -> list[Evaluated]:
    """Every row of claims.csv, in order."""

    runs: dict[object, dict[int, Finished]] = {}

    def numbers(leaf: Leaf) -> dict[int, float | None]:
        cell, metric, _ = leaf
        if cell.key not in runs:
            runs[cell.key] = finished_runs(cell, out, scale)
        return {seed: NUMBERS[metric](found) for seed, found in runs[cell.key].items()}

    return [_evaluate(row["id"], row["claim"], numbers) for row in rows_of("claims.csv")]


def _evaluate(name: str, text: str, numbers: Callable[[Leaf], dict[int, float | None]]) -> Evaluated:
    about = CLAIMS[name]
    if isinstance(about, Untestable):
        return Evaluated(name, text, "not testable", (), (), None, (), about.reason)
    outcomes = {id(c): judge(c, numbers) for c in about.check.comparisons()}
    cells = {leaf[0].key: leaf[0] for c in about.check.comparisons() for leaf in c.quantity.leaves}
    with_runs = {leaf[0].key for c in about.check.comparisons() for leaf in c.quantity.leaves if numbers(leaf)}
    missing = tuple(cell for key, cell in cells.items() if key not in with_runs)
    verdict = together(about.check, lambda c: outcomes[id(c)].verdict)
    against, agrees = printed_verdict(about.check)
    return Evaluated(name, text, verdict, tuple(outcomes.values()), missing, agrees, against, about.reading)


def judge(comparison: Comparison, numbers: Callable[[Leaf], dict[int, float | None]]) -> Outcome:
    """Mean and interval over the seeds that all the runs have."""
    by_leaf = [numbers(leaf) for leaf in comparison.quantity.leaves]
    seeds = sorted(set.intersection(*(set(found) for found in by_leaf)))
    if not seeds:
        return Outcome(comparison.text, "missing runs")
    values = []
    for seed in seeds:
        parts = [found[seed] for found in by_leaf]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts) and math.isfinite(value := comparison.quantity.compute(known)):
            values.append(value)
    if not values:
        return Outcome(comparison.text, "not measured")
    centre = fmean(values)
    if len(values) == 1:
        return Outcome(comparison.text, "undecided", 1, centre)
    low, high = confidence_interval(values)
    verdict: Verdict = "undecided"
    if low > comparison.low and high < comparison.high:
        verdict = "supported"
    elif high <= comparison.low or low >= comparison.high:
        verdict = "not supported"
    return Outcome(comparison.text, verdict, len(values), centre, (low, high))


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 %, by Student's t, of the mean of at least two paired differences."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def together(part: Part, verdict_of: Callable[[Comparison], Verdict]) -> Verdict:
    """The verdict of all parts: supported if enough of them are, not supported if enough of them no longer can be.

    What a run does not have (forward transfer of a method without one head) does not count."""
    if isinstance(part, Comparison):
        return verdict_of(part)
    verdicts = [together(inner, verdict_of) for inner in part.parts]
    counted = [verdict for verdict in verdicts if verdict != "not measured"]
    if not counted:
        return "not measured"
    need = part.need - (len(verdicts) - len(counted)) if part.need == len(verdicts) else part.need
    if counted.count("supported") >= need:
        return "supported"
    if len(counted) - counted.count("not supported") < need:
        return "not supported"
    return "missing runs" if set(counted) <= {"missing runs"} else "undecided"


# -- against the printed means


def printed_value(quantity: Quantity) -> float | None:
    """The quantity computed from the printed means."""
    found = [published(table, cell, metric) for cell, metric, table in quantity.leaves]
    means = [value.mean for value in found if value is not None]
    return quantity.compute(means) if len(means) == len(found) else None


def printed_verdict(check: Among) -> tuple[tuple[str, ...], bool | None]:
    """The comparisons that the printed means contradict, and whether the claim holds by them."""
    against = []

    def verdict_of(comparison: Comparison) -> Verdict:
        value = printed_value(comparison.quantity)
        if value is None:
            return "not measured"
        if comparison.low < value < comparison.high:
            return "supported"
        against.append(f"{comparison.text} ({value:+.4g})")
        return "not supported"

    verdict = together(check, verdict_of)
    agrees = None if verdict == "not measured" else verdict == "supported"
    return (() if agrees else tuple(against)), agrees


# -- what is shown


def weakest(evaluated: Evaluated) -> Outcome | None:
    """The comparison that decides: not supported before undecided before supported; then the fewest seeds."""
    order = {"not supported": 0, "undecided": 1, "supported": 2}
    known = [outcome for outcome in evaluated.outcomes if outcome.verdict in order]
    return min(known, key=lambda o: (order[o.verdict], o.seeds, abs(o.mean or 0.0)), default=None)


def interval_text(evaluated: Evaluated) -> str:
    outcome = weakest(evaluated)
    if outcome is None or outcome.mean is None:
        return "-"
    if outcome.interval is None:
        return f"{outcome.mean:+.3g} (1 seed)"
    return f"{outcome.mean:+.3g} [{outcome.interval[0]:+.3g}, {outcome.interval[1]:+.3g}] ({outcome.seeds} seeds)"


def printed_text(evaluated: Evaluated) -> str:
    if evaluated.printed is None:
        return "-"
    return "agrees" if evaluated.printed else "disagrees"


def about_text(evaluated: Evaluated) -> str:
    """The deciding comparison, how many are decided, what is missing and how the claim was read."""
    parts = []
    outcome, size = weakest(evaluated), len(evaluated.outcomes)
    if outcome is not None:
        count = sum(o.verdict == "supported" for o in evaluated.outcomes)
        parts.append(f"{count} of {size} comparisons supported; weakest: {outcome.text}")
    if evaluated.missing:
        more = f" and {len(evaluated.missing) - 1} more" if len(evaluated.missing) > 1 else ""
        ids = ", ".join(entries_with(evaluated.missing))
        parts.append(f"missing runs: {evaluated.missing[0]}{more} (bace paper run {ids})")
    if evaluated.printed_against:
        more = f" and {len(evaluated.printed_against) - 1} more" if len(evaluated.printed_against) > 1 else ""
        parts.append(f"printed against it: {evaluated.printed_against[0]}{more}")
    if evaluated.note:
        parts.append(evaluated.note if evaluated.verdict == "not testable" else f"read as: {evaluated.note}")
    return ". ".join(parts)


def entries_with(cells: Sequence[Cell]) -> list[str]:
    """The entries to run for these cells: for each the smallest that has it."""
    by_size = sorted(ENTRIES.values(), key=lambda entry: len(entry.cells()))
    smallest: dict[object, str] = {}
    for entry in by_size:
        for cell in entry.cells():
            smallest.setdefault(cell.key, entry.id)
    return list(dict.fromkeys(smallest[cell.key] for cell in cells))


def as_rows(verdicts: Sequence[Evaluated]) -> list[list[str]]:
    return [
        [v.id, v.verdict, interval_text(v), printed_text(v), "\n".join(filter(None, (v.claim, about_text(v))))]
        for v in verdicts
    ]


def as_markdown(verdicts: Sequence[Evaluated]) -> str:
    """A table with a row for each claim."""
    lines = ["| id | claim | verdict | difference [95 % interval] | printed | about |", "| --- " * 6 + "|"]
    for v in verdicts:
        cells = (v.id, v.claim, v.verdict, interval_text(v), printed_text(v), about_text(v))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
