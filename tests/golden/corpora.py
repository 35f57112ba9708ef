"""Small generated corpora for methods that do not take pictures, and a small BERT with random weights."""

import functools
import tempfile
from pathlib import Path

import torch
from conftest import TYPES, WORDS, save_bert

KEPT: list[tempfile.TemporaryDirectory[str]] = []  # folders of this process, which remove themselves when it ends


@functools.cache
def corpora() -> Path:
    """A folder with `texts`, `entities` and `bert`."""
    KEPT.append(tempfile.TemporaryDirectory(prefix="bace-golden-"))
    folder = Path(KEPT[-1].name)
    save_texts(folder / "texts")
    save_sentences(folder / "entities")
    save_bert(folder / "bert")
    return folder


class Draws:
    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int) -> int:
        """From low to high - 1."""
        return int(torch.randint(low, high, (1,), generator=self.rng))


def save_texts(folder: Path, classes: int = 6) -> None:
    """Two thirds of the words of a text are among the ten words of its class, and the others are any words."""
    draw = Draws(5).number
    folder.mkdir()
    for split, count in (("train", 20), ("test", 20)):
        lines = ["text,label"]
        for i in range(count * classes):
            own = 10 * (i % classes)
            places = [own + draw(0, 10) if draw(0, 3) else draw(0, len(WORDS)) for _ in range(draw(4, 9))]
            lines.append(" ".join(WORDS[place] for place in places) + f",class {i % classes}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def save_sentences(folder: Path) -> None:
    """A sentence has entities of two types, so entities of old types hide among the words that a task labels O."""
    draw = Draws(4).number
    folder.mkdir()
    for split, count in (("train", 20), ("test", 12)):
        lines = []
        for i in range(count * len(TYPES)):
            first = i % len(TYPES)
            for c in (first, (first + draw(1, len(TYPES))) % len(TYPES)):
                lines += [f"{WORDS[draw(50, 60)]} O" for _ in range(draw(1, 3))]
                lines.append(f"{WORDS[10 * c + draw(0, 4)]} B-{TYPES[c]}")
                if draw(0, 2):
                    lines.append(f"{WORDS[10 * c + draw(0, 4)]}s I-{TYPES[c]}")
            lines.append("w55 O\n")
        (folder / f"{split}.conll").write_text("\n".join(lines) + "\n")
