"""bace predict: predictions for files, with the model of a finished run."""

import json
from pathlib import Path
from typing import Any

import torch

from bace.cli.console import in_line
from bace.cli.options import refuse, split_options
from bace.data.modalities.token import spans, split_words
from bace.errors import ConfigError, DataError
from bace.learner import Learner


def command(words: list[str]) -> None:
    options, rest = split_options(words, {"--json": 0, "--trust": 0, "--force": 0})
    refuse([word for word in rest if word.startswith("-")], ["--json", "--trust", "--force"])
    if len(rest) < 2:
        raise ConfigError("bace predict needs a run folder and at least one file")
    trust, force = ("--trust" in options), ("--force" in options)
    rows = predict_files(Path(rest[0]), [Path(file) for file in rest[1:]], trust=trust, force=force)
    for row in rows:
        print(json.dumps(row) if "--json" in options else "\t".join(map(in_line, row.values())))


def predict_files(folder: Path, files: list[Path], *, trust: bool = False, force: bool = False) -> list[dict[str, Any]]:
    """A row per picture; per line of a text file (a text; or a sentence, whose entities' positions are characters of
    the line)."""
    learner = Learner.from_run(folder, trust=trust, force=force)
    for file in files:
        if not file.is_file():
            if file.is_dir():
                raise DataError(f"'{file}' is a folder: name the files in it")
            raise DataError(f"there is no file '{file}': check the path")
    if learner.modality == "image":
        return _rows([str(file) for file in files], files, learner)
    lines = [(f"{file}:{n}", line) for file in files for n, line in enumerate(_lines(file), 1) if line.strip()]
    if learner.modality == "text":
        return _rows([where for where, _ in lines], [line for _, line in lines], learner)
    if not lines:
        return []
    words = [split_words(line) for _, line in lines]
    sentences = [[line[start:end] for start, end in own] for (_, line), own in zip(lines, words, strict=True)]
    tags = learner.predict(sentences)
    return [
        {
            "where": where,
            "words": sentence,
            "tags": tagged,
            "entities": [span._asdict() for span in spans(line, own, tagged)],
        }
        for (where, line), own, sentence, tagged in zip(lines, words, sentences, tags, strict=True)
    ]


def _rows(where: list[str], inputs: list[Any], learner: Learner) -> list[dict[str, Any]]:
    if not inputs:
        return []
    scores = learner.scores(inputs)
    assert isinstance(scores, torch.Tensor)
    share, best = torch.softmax(scores, 1).max(1)
    names = learner.classes_
    return [
        {"where": place, "class": names[c], "score": round(s, 4)}
        for place, c, s in zip(where, best.tolist(), share.tolist(), strict=True)
    ]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' cannot be read as text ({error}): this run's model takes text files") from error
