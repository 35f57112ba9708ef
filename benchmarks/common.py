"""Parts that the benchmarks share: the small ViT, the random pictures, a method that is ready for its second task, and
the measurement of time and memory."""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.method import Method
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.modalities.image import Images
from bace.data.modality import Examples
from bace.methods import find_method
from bace.models.heads import CosineHead
from bace.models.model import Model
from bace.models.plain_vit import PlainViT, ViTConfig
from bace.models.vit import ViTEncoder

T = TypeVar("T")
WIDTH, DEPTH, SIDE, PATCH = 128, 6, 32, 8  # 16 tokens and the class token
CLASSES = 10  # classes per task


@dataclass(frozen=True)
class Bar:
    """A measured number and its limit: it must be at most `limit` or, if `least`, at least `limit`. Without a limit it
    is for information."""

    value: float
    limit: float | None = None
    least: bool = False

    @property
    def passed(self) -> bool:
        return self.limit is None or (self.value >= self.limit if self.least else self.value <= self.limit)


@dataclass(frozen=True)
class Row:
    """What a simulation measured here, and what it means for a run: seconds, bytes."""

    what: str
    here: str
    seconds: float | None = None
    size: float | None = None


def table(rows: list[Row]) -> str:
    """The longest first."""
    lines = ["| part | here | seconds a run | MB |", "| --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: -(row.seconds or 0)):
        seconds = "-" if row.seconds is None else f"{row.seconds:,.0f}"
        size = "-" if row.size is None else f"{row.size / 1e6:,.1f}"
        lines.append(f"| {row.what} | {row.here} | {seconds} | {size} |")
    return "\n".join(lines)


def small_vit(width: int = WIDTH, depth: int = DEPTH, side: int = SIDE, patch: int = PATCH) -> ViTEncoder:
    torch.manual_seed(0)
    model = PlainViT(ViTConfig(**shape(width, depth, side, patch)))
    for table in (model.embeddings.cls_token, model.embeddings.position_embeddings):
        torch.nn.init.trunc_normal_(table, std=0.02)
    return ViTEncoder(model, {})


def vit_of_transformers() -> Any:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    return ViTModel(ViTConfig(**shape()), add_pooling_layer=False)


def shape(width: int = WIDTH, depth: int = DEPTH, side: int = SIDE, patch: int = PATCH) -> dict[str, int]:
    """The shape of a ViT, under transformers' names."""
    blocks = {"num_hidden_layers": depth, "num_attention_heads": max(width // 32, 1), "intermediate_size": 4 * width}
    return {"hidden_size": width, "image_size": side, "patch_size": patch, **blocks}


def pictures(count: int, side: int = SIDE) -> tuple[Tensor, Tensor]:  # (count, 3, side, side) uint8, (count,) classes
    """Noisy pictures of CLASSES patterns, so that neighbours cluster as they do in real data."""
    rng = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % CLASSES
    patterns = torch.rand(CLASSES, 3, side, side, generator=rng)
    noise = torch.rand(count, 3, side, side, generator=rng)
    return ((0.6 * patterns[targets] + 0.4 * noise) * 255).to(torch.uint8), targets


def second_task(
    method: str, examples: int, batch: int, encoder: ViTEncoder | None = None, **settings: Any
) -> tuple[Method, Stream, Config]:
    """A method on pictures at the start of its second task."""
    encoder = encoder or small_vit()
    data = Images(pictures(2 * examples, encoder.image_size)[0], size=encoder.image_size)
    model = Model(encoder, CosineHead(encoder.width))
    return begun(method, data, model, Training(epochs=1, batch_size=batch, threads=1), 500, **settings)


def begun(
    method: str, data: Examples, model: Model, training: Training, memory: int, **settings: Any
) -> tuple[Method, Stream, Config]:
    """A method at the start of its second task: it has learned a first task of CLASSES classes, and its memory is full.

    Each task has half of the data. The memory is filled directly, because only the second task is measured."""
    examples = len(data) // 2
    targets = torch.arange(2 * examples) % CLASSES
    targets = torch.cat([targets[:examples], targets[examples:] + CLASSES])
    first, second = torch.arange(examples), torch.arange(examples, 2 * examples)
    none = torch.zeros(0, dtype=torch.int64)
    tasks = [
        Task(0, "old", range(CLASSES), first, none, none),
        Task(1, "new", range(CLASSES, 2 * CLASSES), second, none, none),
    ]
    stream = Stream(data, targets, tasks, [str(c) for c in range(2 * CLASSES)])
    config = Config(
        {"name": "benchmark"},
        {"name": method},
        Backbone(),
        HeadSettings(),
        MemoryBudget(memory),
        training,
        Measures(fwt=False),
        Checkpoints(),
    )
    learned = find_method(method)(**settings)
    learned.stream, learned.training_settings, learned.now = stream, config.train, Position(0)
    learned.memory = Memory(memory)
    learned.model = learned.build(model)
    learned.now.seen = CLASSES
    learned.grow(tasks[0])
    if learned.uses_memory:
        kept = first[:memory]
        learned.memory.add(kept, 0, targets[kept])
    return learned, stream, config


Mark = Callable[[], None]  # to be called after every step


def trained_by_library(
    method: str, examples: int, batch: int, encoder: ViTEncoder | None = None, **settings: Any
) -> Callable[[Mark], None]:
    """The library's epoch of the second task, ready to run."""
    return second_epoch(*second_task(method, examples, batch, encoder, **settings))


def second_epoch(learned: Method, stream: Stream, config: Config) -> Callable[[Mark], None]:
    def epoch(mark: Mark) -> None:
        trainer = Trainer(learned, stream, config, show=lambda done, text: mark())
        trainer.enter(stream[1])
        learned.grow(stream[1])
        trainer.train(learned.stages(stream[1])[0], 1)

    return epoch


class _Enough(Exception):
    """Ends an epoch when no more steps are needed."""


def step_times(work: Callable[[Mark], None], steps: int | None = None) -> list[float]:
    """The seconds of every step, or of the first steps. Work before the first step (tables of the epoch) counts for the
    first step. This is processor time: on one thread it is the time that a quiet machine takes, and other processes
    disturb it less."""
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())
        if steps is not None and len(marks) > steps:
            raise _Enough

    with suppress(_Enough):
        work(mark)
    return [after - before for before, after in pairwise(marks)]


def least(runs: list[list[float]], steps: int | None = None) -> float:
    """The seconds of an epoch of `steps` steps, by default those that were timed. Each step is the fastest of the
    repetitions, so that a disturbance costs one step of one repetition and not all of it. Steps that were not timed
    take as long as the others, except the first."""
    first, *others = (min(times) for times in zip(*runs, strict=True))
    return first + sum(others) * ((steps - 1) / len(others) if steps and others else 1)


def fastest(work: Callable[[], object], repeat: int, clock: Callable[[], float] = time.process_time) -> float:
    """The seconds of the fastest repetition."""
    times = []
    for _ in range(repeat):
        begun = clock()
        work()
        times.append(clock() - begun)
    return min(times)


def timed(work: Callable[[], T], clock: Callable[[], float] = time.process_time) -> tuple[float, T]:
    """Seconds, and what the work gives."""
    begun = clock()
    result = work()
    return clock() - begun, result


def ignore() -> None:
    """The mark of a run that is not timed."""


def peak_memory(work: Callable[..., object], *arguments: object) -> int:
    """The maximum resident size, in MB, of a separate process that does this work."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_after, (work, arguments))


def _peak_after(work: Callable[..., object], arguments: tuple[object, ...]) -> int:
    torch.set_num_threads(1)
    work(*arguments)
    # not getrusage, whose maximum is inherited from the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024
