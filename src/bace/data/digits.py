"""The embedded default: scikit-learn's 1,797 handwritten digits, which need no download."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from bace.data.modalities.image import IMAGE
from bace.data.modality import Table


def load_digits() -> tuple[Table, Table]:
    """Training and test pictures, 8 x 8, grey. Every fifth picture of each class is a test picture."""
    found = importlib.util.find_spec("sklearn")  # finds the file only: importing scikit-learn takes seconds
    assert found is not None
    assert found.origin is not None
    raw = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = torch.from_numpy(raw[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)
    table = Table(IMAGE, pixels, [str(int(label)) for label in raw[:, -1]], [str(digit) for digit in range(10)])
    count: dict[str, int] = {}
    train: list[int] = []
    test: list[int] = []
    for index, label in enumerate(table.labels):
        position = count[str(label)] = count.get(str(label), -1) + 1
        (test if position % 5 == 4 else train).append(index)
    return table.take(train), table.take(test)
