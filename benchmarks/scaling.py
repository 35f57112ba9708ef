"""The growth of the seconds and memory of a run with classes, tasks, examples and memory, as exponents.

The encoder is tiny (one block of width 32, 8 pixels), so that the library's own work is visible. One number grows at a
time. The exponent is that between the two largest sizes, or that of a power fitted to all sizes if this is larger. An
exponent of 1 is linear; none may be above 1.1. Tasks divide the same examples, and all seen test examples are
evaluated after each task, so seconds grow with the number of tasks even if learning does not. The method is ER. BaCE is
measured with examples, without a limit: it compares all examples of a task with each other.

    python benchmarks/scaling.py [--axis NAME ...] [--plot FILE.svg]
"""

import argparse
import math
import multiprocessing
import time
from pathlib import Path

import torch
from common import Bar, _peak_after, small_vit

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.modalities.image import Images
from bace.methods import find_method
from bace.models.heads import CosineHead
from bace.models.model import Model

USUAL = {"classes": 100, "tasks": 5, "examples": 10_000, "memory": 200}
AXES = {
    "classes": [10, 100, 300, 1000],
    "tasks": [5, 20, 50, 100],
    "examples": [1000, 10_000, 30_000, 100_000],
    "memory": [200, 600, 2000],
}
SMALLEST = {"classes": 10, "tasks": 2, "examples": 200, "memory": 50}
PLOT = Path(__file__).parents[1] / "docs" / "scaling.svg"
TINY = {"classes": [10, 20], "tasks": [2, 4], "examples": [200, 400], "memory": [50, 100]}


def run(classes: int, tasks: int, examples: int, memory: int, method: str = "ER") -> float:
    """The seconds of a whole run: training, memory and evaluation after every task."""
    rng = torch.Generator().manual_seed(0)
    count = examples + examples // 4  # the test set has a quarter of the examples
    pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=rng).to(torch.uint8)
    targets = (torch.arange(count) * classes // count).clamp(max=classes - 1)
    ends = [classes * (t + 1) // tasks for t in range(tasks)]
    made = []
    for t, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        ids = ((targets >= start) & (targets < end)).nonzero().flatten()
        test = torch.arange(len(ids)) % 5 == 4
        made.append(Task(t, str(t), range(start, end), ids[~test], ids[:0], ids[test]))
    stream = Stream(Images(pixels, size=8), targets, made, [str(c) for c in range(classes)])
    budget = MemoryBudget(memory, allow_missing_classes=True)
    training, measures = Training(epochs=1, threads=1), Measures(fwt=False)
    settings = (Backbone(), HeadSettings(), budget, training, measures, Checkpoints())
    config = Config({"name": "benchmark"}, {"name": method}, *settings)
    learned = find_method(method)()
    learned.stream, learned.training_settings, learned.now = stream, training, Position(0)
    learned.memory = Memory(memory, allow_missing_classes=True)
    encoder = small_vit(32, 1, 8, 4)
    learned.model = learned.build(Model(encoder, CosineHead(encoder.width)))
    begun = time.process_time()
    Trainer(learned, stream, config).run()
    return time.process_time() - begun


def measured(size: dict[str, int], method: str = "ER") -> tuple[float, int]:
    """The seconds, and the memory in MB that the run adds to a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(_one_thread, (SMALLEST,))  # includes imports and the allocations of the first run of a process
        before = pool.apply(_peak_after, (int, ()))
        seconds = pool.apply(_one_thread, (size, method))
        return seconds, max(pool.apply(_peak_after, (int, ())) - before, 1)


def _one_thread(size: dict[str, int], method: str = "ER") -> float:
    torch.set_num_threads(1)
    return run(**size, method=method)


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(size): of all points by least squares, or of the last two if it is larger."""
    return max(slope(sizes, values), slope(sizes[-2:], values[-2:]))


def slope(sizes: list[int], values: list[float]) -> float:
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


Points = dict[str, list[tuple[int, float, int]]]  # by axis: size, seconds, MB


def grown(axes: dict[str, list[int]], usual: dict[str, int]) -> Points:
    return {axis: [(size, *measured({**usual, axis: size})) for size in sizes] for axis, sizes in axes.items()}


def exponents(points: Points) -> dict[str, Bar]:
    found = {}
    for axis, along in points.items():
        sizes, seconds, megabytes = (list(column) for column in zip(*along, strict=True))
        found[f"seconds grow with {axis}: exponent"] = Bar(exponent(sizes, seconds), 1.1)
        found[f"memory grows with {axis}: exponent"] = Bar(exponent(sizes, megabytes), 1.1)
    return found


def bars(tiny: bool) -> dict[str, Bar]:
    axes, usual = (TINY, SMALLEST) if tiny else (AXES, USUAL)
    points = grown(axes, usual)
    if not tiny:
        PLOT.write_text(plot(points))
    sizes = axes["examples"]
    seconds = [measured({**usual, "examples": size}, "BaCE")[0] for size in sizes]
    return exponents(points) | {"BaCE: seconds grow with examples: exponent": Bar(exponent(sizes, seconds))}


# -- the plot of docs/performance.md

SIDE, GAP = 190, 58


def plot(points: Points) -> str:
    """An SVG with seconds and MB over the size for each axis, both logarithmic."""
    panels = []
    for column, (axis, along) in enumerate(points.items()):
        for row, (unit, at) in enumerate((("seconds", 1), ("MB", 2))):
            values = [(point[0], max(point[at], 1e-9)) for point in along]
            panels.append(panel(f"{unit} over {axis}", values, GAP + column * (SIDE + GAP), 24 + row * (SIDE + GAP)))
    width, height = GAP + len(points) * (SIDE + GAP), 2 * (SIDE + GAP) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    return f'{head} font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'


def panel(title: str, values: list[tuple[int, float]], left: int, top: int) -> str:
    """Both axes cover equally many powers of ten, so that a line of 45 degrees is linear growth."""
    x, y = ([math.log10(value[k]) for value in values] for k in (0, 1))
    reach = max(max(x) - min(x), max(y) - min(y), 0.1)

    def place(a: float, b: float) -> tuple[float, float]:
        return left + SIDE * (a - min(x)) / reach, top + SIDE * (1 - (b - min(y)) / reach)

    spots = [place(a, b) for a, b in zip(x, y, strict=True)]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#1f77b4"/>' for a, b in spots)
    labels = "".join(
        f'<text x="{a:.1f}" y="{b - 7:.1f}" text-anchor="middle">{value:.3g}</text>'
        for (a, b), (_, value) in zip(spots, values, strict=True)
    )
    below = "".join(
        f'<text x="{a:.1f}" y="{top + SIDE + 13}" text-anchor="middle">{size:,}</text>'
        for (a, _), (size, _) in zip(spots, values, strict=True)
    )
    steepest = exponent(*(list(column) for column in zip(*values, strict=True)))
    return (
        f'<text x="{left}" y="{top - 12}" font-weight="bold">{title}: exponent {steepest:.2f}</text>'
        f'<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/>'
        f'<line x1="{left}" y1="{top + SIDE}" x2="{left + SIDE}" y2="{top}" stroke="#ccc" stroke-dasharray="4"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4"/>{dots}{labels}{below}'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    options = parser.parse_args()
    points = {}
    for axis in options.axis:
        points |= grown({axis: AXES[axis]}, USUAL)
        for size, seconds, megabytes in points[axis]:
            print(f"{axis} {size}: {seconds:.2f} s, {megabytes} MB", flush=True)
    for name, bar in exponents(points).items():
        print(f"{name} {bar.value:.2f}")
    if options.plot:
        options.plot.write_text(plot(points))


if __name__ == "__main__":
    main()
