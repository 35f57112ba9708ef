"""The files of a saved learner that describe it to people and to the hub: README.md, which is the model card, and
config.json. Loading a learner does not read them."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from bace.data.modalities import MODALITIES
from bace.errors import CheckpointError
from bace.files import write_whole
from bace.learner.history import percent
from bace.models.backbones import find_backbone
from bace.models.packing import Packed

MARK = "<!-- written by bace: a card without this line is yours and is not overwritten -->"
PIPELINES = {"image": "image-classification", "text": "text-classification", "token": "token-classification"}


def write_cards(
    folder: Path,
    method: str,
    modality: str,
    classes: list[str],
    labels: list[str],
    settings: dict[str, Any],
    history: list[dict[str, Any]],
    encoder: Packed | None,
) -> None:
    """Write both files, unless the user has put files with these names there. `labels`: the names of the scores, which
    are tags if classes are entity types."""
    about = {"library_name": "bace", "method": method, "modality": modality, "id2label": dict(enumerate(labels))}
    texts = {
        "config.json": (json.dumps(about, indent=2) + "\n", '"library_name": "bace"'),
        "README.md": (model_card(method, modality, classes, settings, history, encoder), MARK),
    }
    try:
        for name, (text, mark) in texts.items():
            path = folder / name
            if not path.exists() or mark in path.read_text(encoding="utf-8", errors="replace"):
                write_whole(path, text)
    except OSError as error:
        raise CheckpointError(
            f"the model is saved in '{folder}', but {', '.join(texts)} could not be written: {error.strerror}"
        ) from error


def model_card(
    method: str,
    modality: str,
    classes: list[str],
    settings: dict[str, Any],
    history: list[dict[str, Any]],
    encoder: Packed | None,
) -> str:
    """YAML for the hub, then the card."""
    data: dict[str, Any] = {"library_name": "bace", "tags": ["class-incremental-learning", method]}
    if modality in PIPELINES:
        data["pipeline_tag"] = PIPELINES[modality]
    if encoder is not None and (base := hub_id(encoder.name)):
        data["base_model"] = base
    data["metrics"] = [_measure(modality)]
    title = f"{len(classes)} classes, learned by {method} in {len(history)} calls"
    if results := [found for n, call in enumerate(history, start=1) if (found := _result(n, call, modality))]:
        data["model-index"] = [{"name": title, "results": results}]
    rows = [
        f"| {n} | {_cell(', '.join(call['classes']))} | {call['examples']} | {percent(call['new'])} | "
        f"{percent(call['old'])} |"
        for n, call in enumerate(history, start=1)
    ]
    lines = [
        f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---",
        MARK,
        f"# {title}",
        f"Open it with bace {version('bace-cil')} or later: `bace.Learner.from_pretrained(...)`. Neither the data nor "
        "the encoder's files are needed.",
        f"Classes, in order: {_cell(', '.join(classes))}",
        "## Calls\n\n| call | classes | examples | recognised | old examples in memory recognised |\n"
        "| --- | --- | --- | --- | --- |\n" + "\n".join(rows),
        "The shares are measured on training examples: they are no test.",
        "## Settings\n\n" + "\n".join(f"- {_cell(name)}: {_cell(str(value))}" for name, value in settings.items()),
    ]
    if encoder is not None:
        origin = f", revision {encoder.revision}" if encoder.revision else ""
        lines.append(f"## Encoder\n\n{_cell(encoder.name)}{origin}; sha256 before learning: {encoder.sha256}")
    return "\n\n".join(lines) + "\n"


def _result(number: int, call: dict[str, Any], modality: str) -> dict[str, Any] | None:
    """The scores of a call as an entry of the hub's model-index; each says what it was measured on."""
    shares = {
        f"training examples of call {number}, recognised after it": call["new"],
        f"old examples in memory, which were learned from, recognised after call {number}": call["old"],
    }
    metrics = [{"type": _measure(modality), "name": name, "value": v} for name, v in shares.items() if v is not None]
    if not metrics:
        return None
    dataset = {"name": f"the user's own data of call {number}: no test set", "type": "own-data", "split": "train"}
    return {"task": {"type": PIPELINES.get(modality, modality)}, "dataset": dataset, "metrics": metrics}


def _measure(modality: str) -> str:
    return "accuracy" if MODALITIES[modality].one_label else "f1"  # of sentences: over words


def hub_id(name: str) -> str | None:
    """The hub's id of a backbone, if it has one: that of our own backbones, or a name that is no path on the disk."""
    known = find_backbone(name)
    if known is not None:
        return known.hub or known.original
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists() else None


def _cell(text: str) -> str:
    """The text in one line, escaped so that it is not read as markup."""
    plain = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in plain)
