"""Pieces of the report page in HTML.

Every piece is a `Markup` made from a literal and from values, which its `format` and `join` escape. The template
escapes everything that is not `Markup`. A value from a file therefore cannot become a tag, even if an escape is
forgotten. (ruff's rule S704 refuses a `Markup` made from anything but a literal.)
"""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from bace.report import figures
from bace.report.runs import Stat, show

KEYS = ("", "6 2", "2 2", "6 2 2 2", "9 3", "9 2 2 2")  # figures.DASHES, as SVG draws them
MOST_SHOWN = 6  # heat maps shown before the reader asks for more
NOTHING = Markup("")


def joined(pieces: Iterable[str | Markup]) -> Markup:
    return NOTHING.join(pieces)


def part(heading: str, aid: str, content: Markup, where: str = "") -> Markup:
    place = Markup(' id="{}"').format(where) if where else ""
    help_to_read = Markup("<p>{}</p>").format(aid) if aid else ""
    form = Markup('<section class="part"{}><h3>{}</h3>{}{}</section>')
    return form.format(place, heading, help_to_read, content)


def scale(unit: str = "%") -> Markup:
    return Markup('<p class="scale" aria-hidden="true"><span>0</span><i></i><span>100 {}</span></p>').format(unit)


def grid(members: Sequence[Markup], *, large: bool = False, most: int = MOST_SHOWN, kind: str = "") -> Markup:
    """Figures side by side: the first `most` (half of that on a phone), and the rest when the reader asks for them."""
    classes = f"grid{' large' if large else ''}{f' {kind}' if kind else ''}"
    more = Markup('<p><button type="button" class="more" hidden></button></p>') if len(members) > most // 2 else ""
    form = Markup('<div><div class="{}" data-most="{}">{}</div>{}</div>')
    return form.format(classes, most, joined(members), more)


def sortable(name: str, head: Markup, body: Markup) -> Markup:
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table class="sortable">'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(name, head, body)


def heading(name: str | Markup, meaning: str, first: str, arrow: str = "", method: str = "") -> Markup:
    """A column's heading, which is a button that sorts by the column. Without `first` it is a column of names. `method`
    is the method of the column."""
    kind = Markup(' class="number" data-first="{}"').format(first) if first else ""
    kind += Markup(' data-method="{}"').format(method) if method else ""
    title = Markup(' title="{}"').format(meaning) if meaning else ""
    small = Markup('<small aria-hidden="true"> {}</small>').format(arrow) if arrow else ""
    form = Markup('<th scope="col"{}{}><button type="button">{}{}</button></th>')
    return form.format(kind, title, name, small)


def table_row(label: str, index: dict[str, int], cells: Iterable[Markup]) -> Markup:
    """A method's row of a sortable table."""
    form = Markup('<tr data-method="{0}"><th scope="row" data-value="{0}">{1}</th>{2}</tr>')
    return form.format(label, chip(label, index), joined(cells))


def cell(cell: Stat | None, kind: str = "", after: str = "", decimals: int | None = None, method: str = "") -> Markup:
    """A number in a table; `method` is the method of its column."""
    whose = Markup(' data-method="{}"').format(method) if method else ""
    if cell is None:
        return Markup('<td class="number" data-value=""{}>-</td>').format(whose)
    shown = show(cell)
    if decimals is not None:
        shown = f"{cell.mean:.{decimals}f}" + ("" if cell.std is None else f" ± {cell.std:.{decimals}f}")
    mean, plus, spread = shown.partition(" ±")
    small = Markup("<small>{}{}{}</small>").format(plus, spread, after) if plus or after else ""
    form = Markup('<td class="number{}" data-value="{!r}"{}>{}{}</td>')
    return form.format(f" {kind}" if kind else "", cell.mean, whose, mean, small)


def chip(label: str, index: dict[str, int]) -> Markup:
    """A method's name after a sample of its line, with its colour and dashes."""
    number = index[label]
    dashes = KEYS[figures.turn(number)]
    return Markup(
        '<span class="chip"><svg class="key" viewBox="0 0 22 10" aria-hidden="true">'
        '<path d="M0 5h22" stroke="{}"{}/></svg>{}</span>'
    ).format(figures.colour(number), Markup(' stroke-dasharray="{}"').format(dashes) if dashes else "", label)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
