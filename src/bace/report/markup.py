"""Pieces of the report page in HTML."""

import re
from collections.abc import Sequence
from html import escape

from bace.report import figures
from bace.report.runs import Stat, show

KEYS = ("", "6 2", "2 2", "6 2 2 2", "9 3", "9 2 2 2")  # figures.DASHES, as SVG draws them
MOST_SHOWN = 6  # heat maps shown before the reader asks for more


def part(heading: str, aid: str, content: str, where: str = "") -> str:
    place = f' id="{where}"' if where else ""
    return f'<section class="part"{place}><h3>{heading}</h3>{f"<p>{escape(aid)}</p>" if aid else ""}{content}</section>'


def scale(unit: str = "%") -> str:
    return f'<p class="scale" aria-hidden="true"><span>0</span><i></i><span>100 {unit}</span></p>'


def grid(members: Sequence[str], *, large: bool = False, most: int = MOST_SHOWN, kind: str = "") -> str:
    """Figures side by side: the first `most` (half of that on a phone), the rest when the reader asks for them."""
    classes = f"grid{' large' if large else ''}{f' {kind}' if kind else ''}"
    more = '<p><button type="button" class="more" hidden></button></p>' if len(members) > most // 2 else ""
    return f'<div><div class="{classes}" data-most="{most}">{"".join(members)}</div>{more}</div>'


def sortable(name: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heading(name: str, meaning: str, first: str, arrow: str = "") -> str:
    """A column's heading, a button that sorts by it; without `first` it is a column of names."""
    kind = f' class="number" data-first="{first}"' if first else ""
    title = f' title="{escape(meaning)}"' if meaning else ""
    small = f'<small aria-hidden="true"> {arrow}</small>' if arrow else ""
    return f'<th scope="col"{kind}{title}><button type="button">{name}{small}</button></th>'


def cell(cell: Stat | None, kind: str = "", after: str = "", decimals: int | None = None) -> str:
    if cell is None:
        return '<td class="number" data-value="">-</td>'
    shown = show(cell)
    if decimals is not None:
        shown = f"{cell.mean:.{decimals}f}" + ("" if cell.std is None else f" ± {cell.std:.{decimals}f}")
    mean, plus, spread = shown.partition(" ±")
    small = f"<small>{plus}{spread}{after}</small>" if plus or after else ""
    return f'<td class="number{f" {kind}" if kind else ""}" data-value="{cell.mean!r}">{mean}{small}</td>'


def chip(label: str, index: dict[str, int]) -> str:
    """A method's name behind a piece of its line, in its colour and dashes."""
    number = index[label]
    dashes = KEYS[figures.turn(number)]
    line = f'<path d="M0 5h22" stroke="{figures.colour(number)}"{f" stroke-dasharray={dashes!r}" if dashes else ""}/>'
    key = f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'
    return f'<span class="chip">{key}{escape(label)}</span>'


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
