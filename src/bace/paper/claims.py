"""Verdicts of the finished runs about the paper's claims (statements.py).

The mean of a comparison over seeds has a 95 % confidence interval (Student's t). The comparison is supported if the
interval lies inside its range, not supported if it lies outside, and undecided otherwise. docs/paper.md has the rules.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from bace.paper.comparisons import Among, Comparison, Leaf, Part, Quantity
from bace.paper.results import NUMBERS, Finished, finished_runs
from bace.paper.statements import CLAIMS, Encoded, Untestable
from bace.paper.tables import ENTRIES, Cell, Scale, published, rows_of

Verdict = Literal["supported", "not supported", "undecided", "missing runs", "not measured", "not testable"]


@dataclass(frozen=True)
class Outcome:
    """The result of one comparison."""

    text: str
    verdict: Verdict
    seeds: int = 0
    mean: float | None = None
    interval: tuple[float, float] | None = None  # 95 %; none with one seed


@dataclass(frozen=True)
class Evaluated:
    """The result of a claim, by the runs and by the printed means."""

    id: str
    claim: str
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    missing: tuple[Cell, ...]  # cells without a finished run
    printed: bool | None  # whether the printed means agree; None if there are none
    printed_against: tuple[str, ...]  # comparisons that the printed means contradict
    note: str  # reading, or why it cannot be tested
    setting: str = ""  # for claims about SEQ, LwF or EWC, the span of their soft-max

    @property
    def name(self) -> str:
        return f"{self.id} {self.setting}".rstrip()


def evaluate(out: Path, scale: Scale) -> list[Evaluated]:
    """Every row of claims.csv, in order. Claims about SEQ, LwF or EWC come once for each span of their soft-max."""

    runs: dict[object, dict[int, Finished]] = {}

    def numbers(leaf: Leaf) -> dict[int, float | None]:
        cell, metric, _ = leaf
        if cell.key not in runs:
            runs[cell.key] = finished_runs(cell, out, scale)
        return {seed: NUMBERS[metric](found) for seed, found in runs[cell.key].items()}

    found: list[Evaluated] = []
    for row in rows_of("claims.csv"):
        name, text, about = row["id"], row["claim"], CLAIMS[row["id"]]
        if isinstance(about, Untestable):
            found.append(Evaluated(name, text, "not testable", (), (), None, (), about.reason))
        else:
            found += [_evaluate(name, text, about, setting, numbers) for setting in about.checks()]
    return found


def _evaluate(
    name: str, text: str, about: Encoded, setting: str, numbers: Callable[[Leaf], dict[int, float | None]]
) -> Evaluated:
    check = about.checks()[setting]
    outcomes = {id(c): judge(c, numbers) for c in check.comparisons()}
    cells = {leaf[0].key: leaf[0] for c in check.comparisons() for leaf in c.quantity.leaves}
    with_runs = {leaf[0].key for c in check.comparisons() for leaf in c.quantity.leaves if numbers(leaf)}
    missing = tuple(cell for key, cell in cells.items() if key not in with_runs)
    verdict = together(check, lambda c: outcomes[id(c)].verdict)
    against, agrees = printed_verdict(check)
    return Evaluated(name, text, verdict, tuple(outcomes.values()), missing, agrees, against, about.reading, setting)


def judge(comparison: Comparison, numbers: Callable[[Leaf], dict[int, float | None]]) -> Outcome:
    """The mean and interval over the seeds that all runs have."""
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
    """The 95 % interval, by Student's t, of the mean of at least two paired differences."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def together(part: Part, verdict_of: Callable[[Comparison], Verdict]) -> Verdict:
    """The joint verdict of all parts: supported if enough parts are, not supported if that is no longer possible.

    Numbers that a run does not have (forward transfer of a method without one head) do not count."""
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


# -- comparison with the printed means


def printed_value(quantity: Quantity) -> float | None:
    """The quantity computed from the printed means."""
    found = [published(table, cell, metric) for cell, metric, table in quantity.leaves]
    means = [value.mean for value in found if value is not None]
    return quantity.compute(means) if len(means) == len(found) else None


def printed_verdict(check: Among) -> tuple[tuple[str, ...], bool | None]:
    """The comparisons that the printed means contradict, and whether the claim agrees with the printed means."""
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


# -- output


def weakest(evaluated: Evaluated) -> Outcome | None:
    """The comparison that decides: not supported comes before undecided, then supported; then the fewest seeds."""
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
        parts.append(f"the printed means contradict: {evaluated.printed_against[0]}{more}")
    if evaluated.note:
        parts.append(evaluated.note if evaluated.verdict == "not testable" else f"read as: {evaluated.note}")
    return ". ".join(parts)


def entries_with(cells: Sequence[Cell]) -> list[str]:
    """The entries to run for these cells: the smallest entry that has each cell."""
    by_size = sorted(ENTRIES.values(), key=lambda entry: len(entry.cells()))
    smallest: dict[object, str] = {}
    for entry in by_size:
        for cell in entry.cells():
            smallest.setdefault(cell.key, entry.id)
    return list(dict.fromkeys(smallest[cell.key] for cell in cells))


def as_rows(verdicts: Sequence[Evaluated]) -> list[list[str]]:
    return [
        [v.name, v.verdict, interval_text(v), printed_text(v), "\n".join(filter(None, (v.claim, about_text(v))))]
        for v in verdicts
    ]


def as_markdown(verdicts: Sequence[Evaluated]) -> str:
    """A table with a row for each claim."""
    lines = ["| id | claim | verdict | difference [95 % interval] | printed | about |", "| --- " * 6 + "|"]
    for v in verdicts:
        cells = (v.name, v.claim, v.verdict, interval_text(v), printed_text(v), about_text(v))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
