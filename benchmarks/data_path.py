"""Augmented pictures, and decoded pictures that are found again."""

import tempfile
import time
from pathlib import Path

import torch
from common import Bar, fastest, peak_memory
from torch import Tensor

from bace.data.modalities.image import Images
from bace.data.table import read

CPU = torch.device("cpu")


def augmented(repeat: int) -> float:
    """The milliseconds to crop, mirror and normalise 128 pictures of 32 pixels."""
    pixels = torch.randint(0, 256, (5000, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data, examples = Images(pixels, size=32), torch.arange(128) * 37
    return 1000 * fastest(lambda: data.inputs(examples, 1, CPU), repeat)


def save_pictures(folder: Path, count: int, side: int, classes: int = 10) -> None:
    """A folder of classes with pictures of noise."""
    from PIL import Image

    rng = torch.Generator().manual_seed(0)
    for i in range(count):
        place = folder / f"class {i % classes}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (side, side, 3), generator=rng).to(torch.uint8)
        Image.fromarray(pixels.numpy()).save(place / f"{i}.bmp")


def first_batch(folder: str) -> None:
    table = read(folder)
    assert isinstance(table.inputs, Tensor)
    Images(table.inputs, size=table.inputs.shape[-1]).inputs(torch.arange(128) % len(table), 1, CPU)


def stored(count: int, side: int) -> tuple[float, int]:
    """The seconds until the first batch of this many pictures is ready, from the second run on, and the peak in MB."""
    with tempfile.TemporaryDirectory() as name:
        save_pictures(Path(name) / "train", count, side)
        first_batch(name)
        return fastest(lambda: first_batch(name), 2, time.perf_counter), peak_memory(first_batch, name)


def bars(tiny: bool) -> dict[str, Bar]:
    seconds, peak = stored(5000 if tiny else 100_000, 8 if tiny else 64)
    return {
        "128 augmented pictures of 32 pixels (ms)": Bar(augmented(5 if tiny else 200), 2.0),
        "first batch of 100,000 stored pictures of 64 pixels (s)": Bar(seconds, 20.0),
        "peak memory of that (MB)": Bar(peak, 2000),
    }
