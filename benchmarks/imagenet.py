"""What a run of ImageNet's size does beside the passes of its encoder, on one core: 1,000 classes in 10 tasks, 1.3
million training and 50,000 test examples, a memory of 20,000, batches of 512 of which half are replayed, 5 epochs.

The encoder hands on features of width 768, so that all seconds are the library's own. What would take too long is
measured at a smaller size and scaled up, and the table says by how much. Seconds are those of the processor on one
thread; those of checkpoints, which wait for the disk, are those of the clock. The table has the longest first.

    OMP_NUM_THREADS=1 python benchmarks/imagenet.py [--tiny] [--only PART ...]

`--tiny` takes minimal sizes, to see that everything runs. imagenet_cost.py has what the encoder would take.
"""

import argparse
import io
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import stored
import torch
from common import Row, small_vit, table, timed
from data_path import save_pictures
from imagenet_cost import cost
from PIL import Image
from torch import nn

from bace import ranks
from bace.config.parse import config_from
from bace.core import checkpoint
from bace.core.evaluation import evaluate_seen
from bace.core.memory import Memory
from bace.core.optimiser import stage_groups
from bace.core.resources import forget_peak, peak_bytes
from bace.data.benchmarks import find_benchmark
from bace.data.decode import Pictures, decode_pictures
from bace.data.modalities.image import Images
from bace.data.settings import data_settings
from bace.experiments import run_folder
from bace.experiments.run import describe, summary
from bace.experiments.stream import make_stream
from bace.methods.parts.neighbours import nearest
from bace.report import write_page

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size(stored.Size):
    searched: int = 32_500  # rows for which neighbours are searched: a quarter of a task
    files: int = 25_000
    jpegs: int = 200
    vit: tuple[int, int, int, int] = (768, 12, 224, 16)  # width, depth, side, patch


FULL = Size(1000, 10, 1300, 50, 20_000, 768)
TINY = Size(20, 10, 30, 5, 40, 16, searched=20, files=60, jpegs=4, vit=(32, 1, 8, 4))


def steps(size: Size) -> list[Row]:
    """The last task of BaCE. Neighbours are drawn at random here; the search is a part of its own."""
    trainer = size.last_task("BaCE", effect_new="random")
    method, stream, task, rng = trainer.method, trainer.stream, trainer.stream[-1], trainer.now.rng("order")
    stage = method.stages(task)[0]
    drawn, _ = timed(lambda: [stream.shuffled(t.train, stage.batch_size, rng, bucketing=False) for t in stream])
    ids = trainer.batches(stage, task.train)
    read, _ = timed(lambda: [stream.batch(examples, inputs=False) for examples in ids])
    forget_peak(CPU)
    before = peak_bytes(CPU) or 0
    tables, _ = timed(lambda: method.before_epoch(stage))
    more = (peak_bytes(CPU) or 0) - before
    trainer.optimiser = trainer.begin_optimiser(stage, stage_groups(stage))
    parameters = list(method.model.parameters())
    some = ids[:20]

    def learn() -> None:
        for batch in trainer.made(stage, some):
            trainer.step(stage, batch, parameters)

    step, _ = timed(learn)
    features, head = torch.randn(stage.batch_size, size.width, requires_grad=True), method.model.head
    head_pass, _ = timed(lambda: [head(features).logsumexp(1).sum().backward() for _ in some])
    shape, all_steps = f"{len(task.train):,} x {task.classes.start}", size.epochs * size.steps / len(some)
    later = size.epochs * (size.tasks - 1)  # epochs with a teacher
    return [
        Row("order of the examples", f"{drawn:.2f} s an epoch of {size.examples:,}", size.epochs * drawn),
        Row("batches by id, without inputs", f"{read:.2f} s an epoch of a task", size.epochs * size.tasks * read),
        Row("tables of BaCE's epochs", f"{tables:.1f} s for {shape} scores of the teacher", later * tables, more),
        Row("steps of BaCE without its encoder", f"{1000 * step / len(some):.0f} ms", all_steps * step),
        Row(
            "the head alone, there and back, half a batch",
            f"{1000 * head_pass / len(some):.1f} ms",
            all_steps * head_pass,
        ),
    ]


def neighbours(size: Size) -> list[Row]:
    stream = size.stream()
    rows = stream[-1].train
    some = stream.data.inputs(rows[:: len(rows) // size.searched], None, CPU)["feature"]
    seconds, _ = timed(lambda: nearest(nn.functional.normalize(some), 5))
    factor = (len(rows) / len(some)) ** 2
    here = f"{seconds:.0f} s for {len(some):,} x {size.width}; x {factor:.0f} for {len(rows):,}"
    return [Row("search of 5 neighbours", here, size.epochs * (size.tasks - 1) * factor * seconds)]


def memory(size: Size) -> list[Row]:
    trainer = size.last_task("ER")
    method, stream, full, rng = trainer.method, trainer.stream, trainer.method.memory, torch.Generator().manual_seed(0)
    new = stream[-1].train[torch.randperm(len(stream[-1].train), generator=rng)]
    group, batch = stream.targets[new], slice(size.batch // 2)
    greedy, _ = timed(lambda: full.offer_greedy(new, 9, group, rng))
    ring, _ = timed(lambda: full.offer_ring(new[batch], 9, group[batch], size.memory // size.classes))
    full.note("logits", torch.zeros(len(full), 1, size.classes))
    full.size, full.seen, logits = len(full), torch.tensor(size.examples), torch.zeros(size.batch, 1, size.classes)
    some = len(new[batch])
    reservoir, _ = timed(lambda: full.offer_reservoir(new[batch], 9, group[batch], rng, logits=logits[:some]))
    held = full.get_buffer("logits").nbytes
    method.memory = Memory(size.memory)
    trainer.enter(stream[0])
    herded, _ = timed(lambda: method.remember(stream[0]))
    here = f"{herded:.0f} s for {len(method.memory):,} of {len(new):,} x {size.width}"
    every_step = size.epochs * size.steps
    return [
        Row("herding", here, herded * sum(1 / t for t in range(1, size.tasks + 1))),  # the quota shrinks
        Row("GDumb's memory", f"{greedy:.1f} s for the {len(new):,} offers of a task", size.tasks * greedy),
        Row("HAL's ring by class", f"{1000 * ring:.1f} ms a step of the first epoch", size.steps * ring),
        Row("DER++'s reservoir with its logits", f"{1000 * reservoir:.1f} ms a step", every_step * reservoir, held),
    ]


def evaluation(size: Size) -> list[Row]:
    """After the last task; then the folder of the run, and the page of one run and of four."""
    trainer = size.last_task("ER")
    seconds, (row, detail) = timed(lambda: evaluate_seen(trainer.method, trainer.stream[-1]))
    trainer.results.matrix = matrix = [row[: t + 1] for t in range(size.tasks)]
    trainer.results.details = [{**detail, "kept": 1}] * size.tasks
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), summary(trainer.results, trainer.stream, trainer.config)
        run_folder.write_description(folder, describe(trainer.config, trainer.stream))
        run_folder.Log(folder).file.close()
        written, _ = timed(lambda: run_folder.write_results(folder, matrix, found, {}))
        read, run = timed(lambda: run_folder.load_run(folder))
        runs = [replace(run, method=title, folder=folder / title) for title in ("SEQ", "ER", "BaCE", "LwF")]
        one, page = timed(lambda: write_page(runs[:1], folder / "one.html"))
        four, pages = timed(lambda: write_page(runs, folder / "four.html"))
        files = (folder / "metrics.json", page, pages)
        metrics_size, page_size, pages_size = (file.stat().st_size for file in files)
    here = f"{seconds:.1f} s for {size.classes * size.test:,} x {size.classes} after the last"
    more = (four - one) / 3
    return [
        Row("tests after each task", here, seconds * (size.tasks + 1) / 2),
        Row("metrics.json", f"written in {written:.1f} s, read in {read:.1f} s", written + read, metrics_size),
        Row("report page of one run", f"{one:.1f} s", one, page_size),
        Row("report page, each further run", f"{more:.1f} s", more, (pages_size - page_size) / 3),
    ]


def checkpoints(size: Size) -> list[Row]:
    """Student, teacher and momentum with the weights of a ViT-B/16."""
    trainer = size.last_task("BaCE", small_vit(*size.vit))
    stage = trainer.method.stages(trainer.stream[-1])[0]
    trainer.optimiser, trainer.now.prepared = trainer.begin_optimiser(stage, stage_groups(stage)), True
    tensors, state = trainer.state()
    weights = sum(p.numel() for p in trainer.method.model.encoder.parameters())
    with tempfile.TemporaryDirectory() as name:
        saved, place = timed(lambda: checkpoint.save(Path(name), tensors, state, keep=1), time.perf_counter)
        read, _ = timed(lambda: checkpoint.load(Path(name)), time.perf_counter)
        held = sum(file.stat().st_size for file in place.iterdir())
    compared, found = timed(lambda: checkpoint.fingerprints(tensors))
    often = size.tasks + 6 * cost("ER").hours(100_000)  # after each task, and every ten minutes at 100 TFLOP/s
    return [
        Row(f"checkpoints, {often:.0f} a run", f"{saved:.1f} s, read in {read:.1f} s", often * saved, held),
        Row("fingerprints for the other ranks", f"{compared:.1f} s", often * compared, len(ranks._lines(found))),
        Row(f"gradient of {weights / 1e6:.0f} M weights, a step", "arithmetic", None, 4 * weights),
    ]


def pictures(size: Size) -> list[Row]:
    files, everything = size.files + size.classes, size.classes * (size.train + size.test)
    with tempfile.TemporaryDirectory() as name:
        save_pictures(Path(name, "train"), size.files, 8, size.classes)
        save_pictures(Path(name, "test"), size.classes, 8, size.classes)
        config = config_from({"benchmark": "my-images", "benchmark.path": name, "benchmark.tasks": size.tasks})
        settings, encoder, parts = data_settings(config), small_vit(32, 1, 8, 4), find_benchmark("my-images").parts
        starts = [timed(lambda: make_stream(parts(settings), settings, encoder, "", 0))[0] for _ in range(2)]
    file, factor = io.BytesIO(), everything / files
    colours = nn.functional.interpolate(torch.rand(1, 3, 24, 32), (375, 500), mode="bilinear")[0] * 230
    noisy = (colours + 25 * torch.rand(3, 375, 500)).byte().permute(1, 2, 0)
    Image.fromarray(noisy.numpy()).save(file, "JPEG", quality=90)
    source = Pictures(lambda rows: (file.getvalue() for _ in rows), range(size.jpegs), str)
    decoded, pixels = timed(lambda: decode_pictures([source], 256))
    images, batch = Images(pixels, size=224, window=224), torch.arange(size.batch) % size.jpegs
    device = torch.device("meta")  # the work of a GPU is left out
    views = min(timed(lambda: images.inputs(batch, 1, device))[0] for _ in range(5))
    rate = f"{size.jpegs / decoded:.0f} a second of 500 x 375 pixels, {len(file.getvalue()) / 1000:.0f} kB"
    tiny, later = f"{files:,} tiny pictures; x {factor:.1f}", size.epochs * size.steps
    return [
        Row("first start, decoding aside", f"{starts[0]:.1f} s for {tiny}", factor * starts[0]),
        Row("later starts", f"{starts[1]:.1f} s for {tiny}", factor * starts[1]),
        Row("decoding, once; squares of 256 pixels", rate, everything * decoded / size.jpegs, everything * 3 * 256**2),
        Row("views, the whole batch by every rank", f"{1000 * views:.0f} ms for {size.batch}", later * views),
    ]


PARTS = {part.__name__: part for part in (steps, neighbours, memory, evaluation, checkpoints, pictures)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.only:
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        found = PARTS[name](TINY if options.tiny else FULL)
        print(table(found), file=sys.stderr, flush=True)
        rows += found
    print(table(rows))


if __name__ == "__main__":
    main()
