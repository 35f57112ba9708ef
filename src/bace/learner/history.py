"""A learner's reports on its calls: a line and warnings after each call, and a table of all calls."""

import logging
import warnings
from html import escape
from typing import Any

import torch

from bace.core.calibration import calibrate
from bace.core.evaluation import complaints, recognised, scores_of, stock
from bace.core.method import Method
from bace.core.stream import Stream
from bace.data.scores import per_class_accuracy
from bace.experiments import choose

OF_SETTINGS = ("settings", "rates")  # entries of a record whose keys are not classes


def take_stock(method: Method, stream: Stream) -> dict[str, Any]:
    """The shares of a call's examples and of old examples in memory that are recognised; and a new temperature."""
    call, memory, shown = stream[-1], torch.unique(method.remembered()), stock(stream[-1].train)
    if method.prediction_cost(len(shown) + len(memory)):  # it would take longer than learning
        return {"new": None, "old": None}
    old = memory[~torch.isin(memory, call.train)]
    if not stream.modality.one_label:
        with stream.licence("what was learned", torch.cat([shown, old])):
            return {"new": recognised(method, shown), "old": recognised(method, old)}
    asked = torch.unique(torch.cat([shown, memory]))
    with stream.licence("what was learned", asked):
        scores, targets = scores_of(method, asked)
    right = (scores.argmax(1) == targets).double()
    new, old = (right[torch.isin(asked, ids)] for ids in (shown, old))
    names = [stream.names[c] for c in stream.known]
    by_class = zip(names, per_class_accuracy(scores.argmax(1), targets, len(names)), strict=True)
    return {
        "new": float(new.mean()),
        "old": float(old.mean()) if len(old) else None,
        "per_class": {name: share / 100 for name, share in by_class if share is not None},
        **calibrate(scores, targets),
    }


def as_table(history: list[dict[str, Any]]) -> str:
    """A table for notebooks, with a row for each call."""
    cells = [
        (n, ", ".join(call["classes"]), call["examples"], percent(call["new"]), percent(call["old"]))
        for n, call in enumerate(history, start=1)
    ]
    head = ("call", "classes", "examples", "recognised", "old examples in memory recognised")
    rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in cells)
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{rows}</table>"


def held_out(call: dict[str, Any]) -> float | None:
    """The share of held-out (and old) examples that the trial with the chosen rate recognised, if rates were tried."""
    rates = {float(rate): float(worth) for rate, worth in call.get("rates", {}).items()}
    return rates[choose.best_rate(rates)] if rates else None


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def tell(call: dict[str, Any], method: Method) -> None:
    """Log the chosen settings in a line, and warn if little was learned."""
    train = method.training_settings
    rates = ", ".join(f"{rate} ({worth:.0%})" for rate, worth in call["rates"].items())
    how = f"batches of {train.batch_size}, {train.epochs} epochs, {call['steps']} steps, rate {train.lr:g}"
    how = how + (f" of {rates}" if rates else "") if call["steps"] else "statistics"
    old = f", {percent(call['old'])} of the old ones in memory" if call["old"] is not None else ""
    logging.getLogger("bace").info(
        f"{call['examples']} examples of {len(call['classes'])} classes: {how}; "
        f"after it the learner recognises {percent(call['new'])} of the new examples{old}"
    )
    for line in complaints("this call", call["new"], call["old"], method, call["steps"] // max(train.epochs, 1)):
        warnings.warn(line, stacklevel=3)


def without_class(history: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The records without the class. A record of this class alone is left out."""

    def scrubbed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: entry for key, entry in value.items() if key != name}
        return [entry for entry in value if entry != name] if isinstance(value, list) else value

    records = [{key: v if key in OF_SETTINGS else scrubbed(v) for key, v in call.items()} for call in history]
    return [call for call in records if call["classes"]]
