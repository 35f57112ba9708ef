"""The cost of every method relative to ER: seconds of a second task, with everything included, and peak memory.

There are two tasks of 10 classes with 256 examples each, and one epoch in batches of 32 new and 32 old examples, with a
small transformer and one thread. Methods that take pictures learn pictures; methods for texts or entities learn those
and are compared with ER on them. The second task is timed from its first hook to its last (teachers, stages,
statistics, memory), because methods do their work in different places. The fastest of several repetitions counts.
Seconds are given per step of ER.

    python benchmarks/methods.py [--repeat N] [--method NAME ...] [--json]
"""

import argparse
import json
import sys
import time

import torch
from common import CLASSES, DEPTH, SIDE, WIDTH, peak_memory, pictures, small_vit
from torch import Tensor

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.modalities.image import Images
from bace.data.modalities.text import Texts, flat
from bace.data.modalities.token import Entities
from bace.data.modality import Examples
from bace.methods import METHODS, find_method
from bace.models import prefix_attention
from bace.models.bert import BertEncoder
from bace.models.encoder import Encoder
from bace.models.heads import CosineHead
from bace.models.model import Model

EXAMPLES, BATCH, WORDS, VOCABULARY = 256, 64, 15, 1000
MODALITIES: tuple[str, ...] = ("image", "text", "token")


def modality_of(method: str) -> str:
    """The first of these modalities that the method takes."""
    return next(modality for modality in MODALITIES if modality in find_method(method).modalities)


def data(modality: str) -> tuple[Examples, Tensor, list[str]]:
    """Examples of two tasks, the classes of their rows, and the names of the classes."""
    classes = torch.arange(2 * EXAMPLES) % CLASSES + (torch.arange(2 * EXAMPLES) >= EXAMPLES) * CLASSES
    names = [str(c) for c in range(2 * CLASSES)]
    if modality == "image":
        return Images(pictures(2 * EXAMPLES)[0], size=SIDE), classes, names
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(2 * CLASSES + 2, VOCABULARY, (2 * EXAMPLES, WORDS), generator=rng)
    words[:, 3] = 2 + classes  # distinguishes the classes; [CLS] comes before it and [SEP] after the text
    tokens = flat([torch.cat([torch.tensor([0]), sentence, torch.tensor([1])]) for sentence in words])
    if modality == "text":
        return Texts(tokens["ids"], tokens["start"]), classes, names
    where = flat([torch.arange(1, WORDS + 1)] * (2 * EXAMPLES))
    tags = torch.zeros(2 * EXAMPLES, WORDS, dtype=torch.int64)
    tags[:, 3] = 1 + 2 * classes  # B- of its type; all other words are O
    names = ["O", *(f"{prefix}-{name}" for name in names for prefix in "BI")]
    return Entities(tokens["ids"], tokens["start"], where["ids"], where["start"]), tags.flatten(), names


def encoder(modality: str) -> Encoder:
    if modality == "image":
        return small_vit()
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    attention = prefix_attention.register()  # as in the library
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, attn_implementation=attention, **shape)
    return BertEncoder(BertModel(config, add_pooling_layer=False))


def ready(method: str, modality: str) -> Trainer:
    """A method and a stream of two tasks."""
    examples, targets, names = data(modality)
    none, middle = torch.zeros(0, dtype=torch.int64), len(names) - (len(names) - 1) // 2
    middle = CLASSES if modality != "token" else middle
    tasks = [
        Task(t, f"task {t}", classes, ids, none, none)
        for t, (classes, ids) in enumerate(
            zip((range(middle), range(middle, len(names))), torch.arange(2 * EXAMPLES).split(EXAMPLES), strict=True)
        )
    ]
    training = Training(epochs=1, batch_size=BATCH, threads=1, optimiser="sgd" if modality == "image" else "adamw")
    config = Config(
        {"name": "benchmark"},
        {"name": method},
        Backbone(),
        HeadSettings(),
        MemoryBudget(100),
        training,
        Measures(fwt=False),
        Checkpoints(),
    )
    stream = Stream(examples, targets, tasks, names)
    learned = find_method(method)()
    learned.stream, learned.training_settings, learned.now = stream, config.train, Position(0)
    learned.memory = Memory(100)
    learned.fresh_model = lambda: Model(encoder(modality), CosineHead(WIDTH))
    learned.model = learned.build(learned.fresh_model())
    return Trainer(learned, stream, config)


def second_task_seconds(method: str, modality: str) -> float:
    trainer = ready(method, modality)
    trainer.learn(trainer.stream[0])
    begun = time.process_time()
    trainer.learn(trainer.stream[1])
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--method", nargs="*")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [(name, modality_of(name)) for name in options.method or [method.title for method in METHODS]]
    cases = list(dict.fromkeys([*(("ER", modality) for _, modality in asked), *asked]))
    seconds = dict.fromkeys(cases, float("inf"))
    for repetition in range(options.repeat):
        for case in cases:
            seconds[case] = min(seconds[case], second_task_seconds(*case))
            print(f"{repetition + 1} of {options.repeat}: {case[0]} {seconds[case]:.1f} s", file=sys.stderr, flush=True)
    memory = {case: peak_memory(second_task_seconds, *case) for case in cases}
    result = [
        {
            "method": name,
            "data": modality,
            "seconds_per_step": seconds[name, modality] / (EXAMPLES / (BATCH / 2)),
            "ratio": seconds[name, modality] / seconds["ER", modality],
            "peak_memory_mb": memory[name, modality],
            "memory_ratio": memory[name, modality] / memory["ER", modality],
        }
        for name, modality in sorted(cases, key=lambda case: MODALITIES.index(case[1]))
    ]
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'method':10} {'data':6} {'s/step':>7} {'x ER':>6} {'MB':>6} {'x ER':>6}")
    for r in result:
        print(
            f"{r['method']:10} {r['data']:6} {r['seconds_per_step']:7.3f} {r['ratio']:6.2f} "
            f"{r['peak_memory_mb']:6} {r['memory_ratio']:6.2f}"
        )


if __name__ == "__main__":
    main()
