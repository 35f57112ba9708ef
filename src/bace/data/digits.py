"""The embedded default: scikit-learn's 1,797 handwritten digits, which need no download."""

import torch

from bace.data.modalities.image import IMAGE
from bace.data.modality import Table


def load_digits() -> tuple[Table, Table]:
    """Training and test pictures, 8 x 8, grey: every fifth picture of each class is for the test."""
    from sklearn.datasets import load_digits as sklearn_digits

    raw = sklearn_digits()
    pixels = torch.from_numpy(raw.images * (255 / 16)).round().to(torch.uint8)[:, None]
    table = Table(IMAGE, pixels, [str(label) for label in raw.target], [str(digit) for digit in range(10)])
    count: dict[str, int] = {}
    train: list[int] = []
    test: list[int] = []
    for index, label in enumerate(table.labels):
        position = count[str(label)] = count.get(str(label), -1) + 1
        (test if position % 5 == 4 else train).append(index)
    return table.take(train), table.take(test)
