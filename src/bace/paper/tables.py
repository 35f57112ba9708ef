"""Every table and figure of the paper as declared data: which methods learn which benchmark with which memory.

An entry is a list of blocks. A block is a benchmark with step counts, memories and methods. Each combination is a cell,
which is one run per seed. A run belongs to the cell, not to the entry: entries that need the same cell share it, and
the run measures everything that any of them needs. Desk scale is the same declaration with other numbers: it uses the
benchmark's desk version and the settings in `desk` and `desk_buffers`.
"""

import csv
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from bace.config.schema import Config
from bace.errors import ConfigError, closest_name
from bace.experiments.compare import folder_name, parse_method

Buffer = int | Literal["all", "inf"]  # total number of examples, as printed; "inf": joint training
Scale = Literal["desk", "full"]
SCALES: tuple[Scale, ...] = ("desk", "full")

DEIT = "deit-small-611"  # the other backbones are the defaults of their benchmarks
LONG_NAMES = {"BaCE + bias correction": ("BaCE", {"bias_correction": True})}  # printed names that are not method calls
# Rows after a method's printed row, without printed numbers: the same method as others compute it. Most methods were
# published with the memory shuffled into the task's data (`replay` in their cards), which is IL2M's default.
CONTROLS_OF: dict[str, tuple[str, ...]] = {
    "SEQ": ("SEQ (span=new)",),
    "LwF": ("LwF (span=seen)",),
    "EWC": ("EWC (span=seen)",),
    "ER": ("ER (reduction=joint)", "ER (mode=concat)"),
    "DER++": ("DER++ (logits=stored)", "DER++ (logits=teacher)"),
    "IL2M": ("IL2M (mode=batch)",),
    "ExtendNER": ("ExtendNER (head=frozen)",),  # CFNER's head, and CFNER without it and without its weight
    "CFNER": ("CFNER (head=trained, adaptive=false)",),
    **{
        name: (f"{name} (mode=concat)",)
        for name in ("iCaRL", "BiC", "LUCIR", "PODNet", "DDE", "EEIL", "GD", "Co2L", "FOSTER", "MEMO", "BEEF")
    },
}
FIXED_TOTAL = ("DER++ (logits=stored)",)  # rows with a reservoir, which cannot hold a number for each class


@dataclass(frozen=True)
class Block:
    """A benchmark with the cells that an entry needs.

    Args:
        benchmark: the benchmark at full scale; desk scale uses its `-desk` version.
        dataset: its name in published.csv.
        own: hyper-parameters of a method in the whole block, by title.
        settings: settings of all cells at both scales; `full` and `desk` add to them, `rivals` for all except BaCE.
        desk_buffers: memories that desk scale replaces.
        per_class: memory slots of each class, at full and at desk scale, instead of a total.
        group: the folder of its runs; blocks with the same group, steps, buffer and method share a run.
    """

    benchmark: str
    dataset: str
    steps: tuple[int, ...] = (5,)
    buffers: tuple[Buffer, ...] = ()
    methods: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    rivals: Mapping[str, Any] = field(default_factory=dict)
    full: Mapping[str, Any] = field(default_factory=dict)
    desk: Mapping[str, Any] = field(default_factory=dict)
    desk_buffers: Mapping[Buffer, int] = field(default_factory=dict)
    per_class: Mapping[Scale, int] = field(default_factory=dict)
    studies: tuple[str, ...] = ()
    group: str = ""

    def of(self, *methods: str, **changes: Any) -> "Block":
        """The same block with these methods and changes."""
        return replace(self, methods=methods, **changes)

    def with_controls(self, *methods: str, **changes: Any) -> "Block":
        """`of`, with the controls of each method after it, except those that equal the method in this block."""
        rows: list[str] = []
        for method in methods:
            own = self.own.get(method, {})
            others = (row for row in CONTROLS_OF.get(method, ()) if not parse_method(row)[1].items() <= own.items())
            rows += [method, *others]
        return self.of(*rows, **changes)


@dataclass(frozen=True)
class Cell:
    """One place in a table, with a run for each seed."""

    block: Block
    steps: int
    buffer: Buffer
    method: str  # as printed: "BaCE (W0=1, alpha=0)"

    @property
    def key(self) -> tuple[str, int, Buffer, str]:
        """Cells with the same key share a run."""
        return (self.block.group or self.block.benchmark, self.steps, self.buffer, self.method)

    def __str__(self) -> str:
        group, steps, buffer, method = self.key
        return f"{method} on {group}, {steps} tasks, memory {buffer}"

    def folder(self, out: Path, scale: Scale, seed: int) -> Path:
        group, steps, buffer, method = self.key
        return out / scale / f"{group}-{steps}tasks-memory{buffer}" / f"{folder_name(method)}-seed{seed}"

    def settings(self, scale: Scale) -> dict[str, Any]:
        """The settings that differ from the benchmark's defaults, by dotted name."""
        block = self.block
        name, changes = LONG_NAMES.get(self.method) or parse_method(self.method)
        suffix = "-desk" if scale == "desk" else ""
        own = {**AS_DEFINED.get(name, {}), **block.own.get(name, {}), **changes}
        given = {
            "benchmark.name": block.benchmark + suffix,
            "benchmark.tasks": self.steps,
            "method.name": name,
            **{f"method.{key}": value for key, value in own.items()},
            **self.memory(scale),
            **block.settings,
            **({} if name == "BaCE" else block.rivals),
            **(block.full if scale == "full" else block.desk),
        }
        if studies := studies_of(self):
            given["studies"] = list(studies)
        return given

    def memory(self, scale: Scale) -> dict[str, Any]:
        if self.buffer == "all":
            return {"memory.size": 0, "memory.per_class": 1_000_000, "memory.select": "random"}
        if self.buffer == "inf":  # joint training reads all data and needs no memory
            return {"memory.size": 0}
        total = self.block.desk_buffers.get(self.buffer, self.buffer) if scale == "desk" else self.buffer
        if not self.block.per_class:
            return {"memory.size": total}
        if self.method in FIXED_TOTAL:
            return {"memory.size": total, "memory.per_class": 0}
        return {"memory.size": 0, "memory.per_class": self.block.per_class[scale]}

    def config(self, scale: Scale, seed: int) -> Config:
        """The full configuration of a run; ConfigError if the method, benchmark or a setting is unknown."""
        from bace.config.parse import config_from

        return config_from({**self.settings(scale), "seed": seed})


@dataclass(frozen=True)
class Entry:
    """A table or figure.

    Args:
        columns: numbers of a run, by their name in results.py; they are compared with published.csv if it has them.
        curves: lists of a run with one number per task.
        matrices: lists of lists.
        table: the table in published.csv with the printed numbers.
        baseline: the method that `delta_A_last` is measured from.
        average: also show the mean over the data sets.
    """

    id: str
    place: str
    title: str
    blocks: tuple[Block, ...]
    columns: tuple[str, ...] = ("A_last", "A_new", "FGT", "FWT")
    curves: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    table: str = ""
    baseline: str = ""
    average: bool = False

    def cells(self) -> list[Cell]:
        found = {cell.key: cell for block in self.blocks for cell in cells_of(block)}
        return list(found.values())


def cells_of(block: Block) -> Iterator[Cell]:
    for steps in block.steps:
        for buffer in block.buffers:
            for method in block.methods:
                yield Cell(block, steps, buffer, method)


# -- the blocks

ABLATIONS = ("BaCE (W0=1, alpha=0)", "BaCE (W0=1)", "BaCE (alpha=0)", "BaCE")
RIVALS = ("ER", "BiC", "LUCIR", "PODNet", "DDE", "DER++", "CLS-ER", "FOSTER", "MEMO", "BEEF")
ONCE = {"MTL": {"only_last": True}}  # tables print joint training after the last task only
# The paper uses herding for every method, and its BaCE without both effects is within 0.9 of its DER++, so that DER++
# has a teacher. In tables that quote DER++ from other papers, it is the original.
# the paper scores neighbours with the student at every step; our default reads older scores
AS_DEFINED: dict[str, dict[str, Any]] = {"BaCE": {"neighbour_scores": "exact"}}
READ = {"DER++": {"logits": "teacher"}}
QUOTED = {"DER++": {"logits": "stored"}}

CIFAR = Block("cifar100", "CIFAR-100", (20, 10), (100, 500), own=READ)
CIFAR_20 = replace(CIFAR, steps=(20,))
# L2P's own recipe has no replay; the printed rows are its authors' variant, which replays and trains the encoder
PROMPTS = {"L2P": {"recipe": "5-datasets"}}
FIVE = Block("five-datasets", "5-datasets", (5,), (250, 500), own={**ONCE, **PROMPTS, **QUOTED})
TEXT = Block("topics", "AGNews>DBPedia1>DBPedia2>Yahoo1>Yahoo2", (5,), (100, 500), own=ONCE)
NER = Block("entities", "OntoNotes5>MIT Movie>I2B2>MIT Restaurant>CoNLL2003", (5,), (100, 500), own=ONCE)


def _hard(benchmark: str, dataset: str, buffer: int, per_class: int, desk: int) -> Block:
    """A block with ten tasks, a fixed number of examples per class and alpha = 2."""
    return Block(
        benchmark,
        dataset,
        (10,),
        (buffer,),
        own={"BaCE": {"alpha": 2.0}, **READ},
        desk_buffers={buffer: buffer // per_class * desk},
        per_class={"full": per_class, "desk": desk},
        studies=("probing", "tracking", "bias"),
    )


HARD = (
    _hard("omnibenchmark", "OmniBenchmark", 1500, 5, 5),
    _hard("imagenet-r", "ImageNet-R", 4000, 20, 10),
    _hard("objectnet", "ObjectNet", 1000, 5, 5),
    _hard("vtab", "VTAB", 250, 5, 5),
)
HARD_METHODS = ("ER", "BiC", "LUCIR", "IL2M", "DER++", "CLS-ER", "BaCE", "BaCE + bias correction")
CONFUSED = ("LUCIR", "IL2M", "BiC", "BaCE", "BaCE + bias correction")
VARIANTS = tuple(f"BaCE (effect_new={name})" for name in ("same", "different", "uniform", "random", "reverse"))


def _deit(benchmark: str, dataset: str, steps: int, buffer: int, adapter: int, lr: float, epochs: int) -> Block:
    """Kim et al.'s protocol: a frozen DeiT-S with adapters, their learning rate and epochs, no augmentation, random
    memory. BaCE keeps its own augmentation and memory."""
    full = {"backbone.name": DEIT, "train.lr": lr, "train.epochs": epochs, "train.batch_size": 64}
    return Block(
        benchmark,
        dataset,
        (steps,),
        (buffer,),
        own={**QUOTED, "L2P": {"recipe": "cifar100"}},
        settings={"backbone.adapter": adapter},
        rivals={"benchmark.augment": False, "memory.select": "random"},
        full=full,
        desk={"backbone.freeze": 0},  # adapters in every block
        desk_buffers={2000: 400, 200: 40},
        group=f"deit-{benchmark}",
    )


DEITS = (
    _deit("cifar10", "CIFAR-10", 5, 200, 64, 0.005, 20),
    _deit("cifar100", "CIFAR-100", 10, 2000, 128, 0.001, 40),
    _deit("cifar100", "CIFAR-100", 20, 2000, 128, 0.005, 40),
    _deit("tiny-imagenet", "Tiny-ImageNet", 5, 2000, 128, 0.005, 15),
    _deit("tiny-imagenet", "Tiny-ImageNet", 10, 2000, 128, 0.005, 10),
)
WITHOUT_MEMORY = ("HAT", "OWM", "SLDA", "PASS", "L2P")
WITH_MEMORY = ("iCaRL", "A-GEM", "EEIL", "GD", "DER++", "HAL", "MORE", "ROW", "BaCE")

# The protocol of methods for pre-trained encoders (LAMDA-PILOT): all tasks have equal size, there is one class order,
# and crops of pixels are not normalised. Methods have their own recipes; these are the remaining settings of the run.
PTM = {
    "benchmark.class_order": "numpy",
    "benchmark.seed": 1993,
    "benchmark.crop": "area",
    "backbone.normalise": False,
    "train.weight_decay": 5e-4,
    "memory.select": "herding",
}
PTM_FREE = ("SimpleCIL", "APER", "FeCAM", "SLCA", "EASE", "MOS")
PTM_OWN: dict[str, dict[str, Any]] = {
    "L2P": {"recipe": "cifar100", "length": 5, "top": 5, "gamma": 0.1},
    **{name: {"mode": "concat"} for name in ("iCaRL", "MEMO", "FOSTER")},
}


def _ptm(benchmark: str, dataset: str, classes: int, steps: tuple[int, ...], **changes: Any) -> tuple[Block, ...]:
    """Blocks without memory, some of them with settings of their own, and blocks with 20 examples per class."""
    full = {"backbone.name": "vit-b16-in21k", "train.epochs": 20, "train.batch_size": 128}
    total = 20 * classes
    block = Block(
        benchmark,
        dataset,
        steps,
        (0,),
        own=PTM_OWN,
        settings={**PTM, **changes},
        full=full,
        desk={"backbone.freeze": 0},  # adapters, LoRA and prompts in every block
        group=f"ptm-{benchmark}",
    )
    full_replay = {**full, "train.lr": 1e-3}
    replay = replace(
        block, buffers=(total,), full=full_replay, per_class={"full": 20, "desk": 2}, desk_buffers={total: 2 * classes}
    )
    foster = {f"method.{stage}_epochs": 20 for stage in ("init", "boost", "compress")}
    no_minimum = {**full, "method.tune_steps": 0}  # the authors' epochs and batches, however few examples a task has
    return (
        block.of(*PTM_FREE),
        block.of("DualPrompt", "SD-LoRA", full=no_minimum),
        *(  # the authors divide 100 components among the tasks
            block.of("CODA-Prompt", steps=(n,), own={"CODA-Prompt": {"components": 100 // n}}, full=no_minimum)
            for n in steps
        ),
        block.of("RanPAC", desk={**block.desk, "method.M": 2000}),  # 10,000 would keep 800 MB
        block.of(
            "L2P",
            settings={**block.settings, "train.weight_decay": 0.0},
            full={**full, "train.epochs": 5, "train.batch_size": 16},
        ),
        replay.of("iCaRL", "MEMO"),
        replay.of("FOSTER", full={**full_replay, **foster}),
    )


PTMS = (
    *_ptm("cifar100", "CIFAR-100", 100, (10, 20)),
    *_ptm("imagenet-r", "ImageNet-R", 200, (10, 40)),
    *_ptm("imagenet-a", "ImageNet-A", 200, (10,)),
    *_ptm("cub", "CUB-200", 200, (20,)),
    *_ptm("omnibenchmark", "OmniBenchmark", 300, (10,)),
    *_ptm("vtab", "VTAB", 50, (5,), **{"benchmark.class_order": None}),
)

PROBED = ("probing", "tracking")
MEMORIES = (100, 200, 500, 1000, 2000, "all")
PROBES = (
    CIFAR_20.with_controls("SEQ", buffers=(0,), studies=PROBED),
    CIFAR_20.of("ER", buffers=(100, 200), studies=PROBED),
    CIFAR_20.of("MTL", buffers=("inf",), studies=PROBED),
)
# -- the entries

_TABLES = (
    Entry(
        "cifar100",
        "Table II",
        "split CIFAR-100, 20 and 10 steps: every method and BaCE's ablations",
        (CIFAR.with_controls(*RIVALS, *ABLATIONS), CIFAR.of("MTL", buffers=("inf",))),
        table="cifar100",
    ),
    Entry(
        "five_datasets",
        "Table III",
        "SVHN, MNIST, CIFAR-10, notMNIST, Fashion-MNIST in a row",
        (
            FIVE.with_controls("ER", "GDumb", "BiC", "DER++", "Co2L", "CLS-ER", "FOSTER", "MEMO", "BEEF", *ABLATIONS),
            FIVE.of("L2P"),
            FIVE.of("MTL", buffers=("inf",)),
        ),
        ("A_last", "A_new", "FGT"),
        table="five_datasets",
    ),
    Entry(
        "alpha",
        "Table IV",
        "BaCE's weight of the distillation on new data, alpha",
        (CIFAR.of("BaCE (alpha=0)", "BaCE (alpha=0.01)", "BaCE (alpha=0.1)", "BaCE"),),
        ("A_last", "delta_A_last", "A_new"),
        table="alpha",
        baseline="BaCE (alpha=0)",
    ),
    Entry(
        "deit",
        "Table V",
        "DeiT-S/16 that never saw the classes, with adapters",
        (
            *(block.of(*WITHOUT_MEMORY, buffers=(0,)) for block in DEITS),
            *(block.with_controls(*WITH_MEMORY) for block in DEITS),
        ),
        ("A_last",),
        table="deit",
        average=True,
    ),
    Entry(
        "challenging",
        "Table VI",
        "OmniBenchmark, ImageNet-R, ObjectNet, VTAB: accuracy, probing accuracy, distance of old minus new classes",
        tuple(block.with_controls(*HARD_METHODS) for block in HARD),
        ("Acc", "Prob.Acc", "Feat.Embed.Dist"),
        table="challenging",
    ),
    Entry(
        "text",
        "Table VIII",
        "continual text classification with BERT, five tasks",
        (TEXT.with_controls("Sparse-ER", "ER", "MBPA", "MBPA++", "IDBR", "BaCE"), TEXT.of("MTL", buffers=("inf",))),
        table="text",
    ),
    Entry(
        "ner",
        "Table IX",
        "continual named-entity recognition with BERT, five corpora",
        (
            NER.with_controls("Sparse-ER", "ER", "MBPA", "MBPA++", "ExtendNER", "CFNER", "BaCE"),
            NER.of("MTL", buffers=("inf",)),
        ),
        table="ner",
    ),
)

_FIGURES = (
    Entry(
        "f1",
        "Figure 1",
        "observed and probing accuracy over 20 steps: SEQ, replay, joint training",
        PROBES,
        ("A_observed", "A_probing", "gap"),
        curves=("observed", "probing"),
        table="prose",
    ),
    Entry(
        "f2",
        "Figure 2",
        "feature-embedding distance of each task over 20 steps",
        PROBES,
        ("distance_old", "distance_new", "distance_growth"),
        matrices=("distance",),
    ),
    Entry(
        "f3",
        "Figure 3",
        "distance, accuracy, forgetting and probing against the size of the memory",
        (PROBES[0], CIFAR_20.of("ER", buffers=MEMORIES, studies=PROBED)),
        ("A_last", "Prob.Acc", "FGT", "distance_all", "distance_all_avg", "distance_old", "distance_new"),
    ),
    Entry(
        "f6",
        "Figure 6",
        "neighbours of new samples in the teacher's feature space, 5-datasets",
        (FIVE.of("BaCE", buffers=(500,), studies=("gallery",)),),
        ("neighbour_purity", "chance_purity"),
    ),
    Entry(
        "f7",
        "Figure 7",
        "what Effect_new adds, by W0",
        (CIFAR.of(*(f"BaCE (W0={w})" for w in (0.5, 0.8, 0.9)), "BaCE", "BaCE (W0=0.99)", "BaCE (W0=1)"),),
        ("A_last", "delta_A_last"),
        baseline="BaCE (W0=1)",
    ),
    Entry(
        "f8",
        "Figure 8",
        "number of neighbours K: accuracy and time",
        (CIFAR_20.of("ER", "BaCE (W0=1)", "BaCE (K=1)", "BaCE (K=3)", "BaCE", "BaCE (K=10)", buffers=(500,)),),
        ("A_last", "seconds"),
    ),
    Entry(
        "f9",
        "Figure 9",
        "confusion between tasks, OmniBenchmark",
        (HARD[0].of(*CONFUSED),),
        ("imbalance", "old_accuracy", "new_accuracy", "bias_alpha", "bias_beta"),
        matrices=("task_confusion",),
        table="prose",
    ),
    Entry(
        "f10",
        "Figure 10",
        "variants of Effect_new on the four hard data sets",
        tuple(block.of("BaCE", *VARIANTS, studies=()) for block in HARD),
        ("A_last",),
    ),
    Entry(
        "f11",
        "Figure 11",
        "average accuracy after each task, split CIFAR-100",
        (CIFAR.of(*RIVALS, *ABLATIONS), CIFAR.of("MTL", buffers=("inf",))),
        ("A_avg",),
        curves=("A",),
    ),
    Entry(
        "f12",
        "Figure 12",
        "neighbours of new samples in the teacher's feature space, CIFAR-100",
        (CIFAR_20.of("BaCE", buffers=(500,), studies=("gallery",)),),
        ("neighbour_purity", "chance_purity"),
    ),
    Entry(
        "f13",
        "Figure 13",
        "confusion between tasks, VTAB",
        (HARD[3].of(*CONFUSED),),
        ("imbalance", "old_accuracy", "new_accuracy", "bias_alpha", "bias_beta"),
        matrices=("task_confusion",),
        table="prose",
    ),
)

_PTM = Entry(
    "ptm",
    "LAMDA-PILOT",
    "the protocol of methods for pre-trained encoders: six sets, tasks of equal size, numpy's class order of seed 1993",
    PTMS,
    ("A_last", "A_avg"),
    table="ptm",
)

# ER with as many passes as BaCE in 5 epochs (desk scale: 3), by the methods' declared cost
LONGER = replace(CIFAR_20, buffers=(500,), full={"train.epochs": 11}, desk={"train.epochs": 6}, group="cifar100-longer")
# methods that leave words labelled O to their teacher learn those of replayed sentences as class 0
LABELLED = replace(NER, settings={"train.replay_o": "label"}, group="entities-replay-o-label")
CONTROLS = Entry(
    "controls",
    "text",
    "runs that claims need but no table or figure has",
    (
        CIFAR.with_controls("SEQ", "LwF", "EWC", "BaCE", buffers=(0,)),
        CIFAR_20.of("BaCE (beta=1)", "BaCE (beta=0.99)", "BaCE (beta=0.5)", "BaCE (beta=0)"),
        CIFAR_20.of("BaCE", "BaCE (W0=1)", buffers=(100,), studies=PROBED),
        LONGER.of("ER"),
        FIVE.with_controls("SEQ", buffers=(0,)),
        *(block.of("BaCE (alpha=1)") for block in HARD),
        TEXT.with_controls("SEQ", "LwF", "EWC", buffers=(0,)),
        NER.of("SEQ", "LwF", "EWC", buffers=(0,)),  # one span: O is a class of every task
        LABELLED.with_controls("ExtendNER", "CFNER", "BaCE"),
    ),
)
ENTRIES: dict[str, Entry] = {entry.id: entry for entry in (*_TABLES, *_FIGURES, CONTROLS, _PTM)}


# -- the soft-max of SEQ, LwF and EWC

Span = Literal["seen", "new"]
SPANS: dict[Span, dict[str, str]] = {  # rows by the classes that the soft-max spans; the bare name has its default
    "seen": {"LwF": "LwF (span=seen)", "EWC": "EWC (span=seen)"},
    "new": {"SEQ": "SEQ (span=new)"},
}


def with_span(cell: Cell, span: Span) -> Cell:
    """The cell of SEQ, LwF or EWC with this span; other cells are not changed. Entities have one span."""
    if cell.block.benchmark == NER.benchmark:
        return cell
    return replace(cell, method=SPANS[span].get(cell.method, cell.method))


def find_entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise ConfigError(
            f"the paper has no entry '{name}'.{closest_name(name, ENTRIES)} `bace paper list` shows them all."
        )
    return ENTRIES[name]


def studies_of(cell: Cell) -> tuple[str, ...]:
    """The studies of this cell's run: all that any entry needs."""
    return _all_studies().get(cell.key, cell.block.studies)


@functools.cache
def _all_studies() -> dict[tuple[str, int, Buffer, str], tuple[str, ...]]:
    found: dict[tuple[str, int, Buffer, str], tuple[str, ...]] = {}
    for entry in ENTRIES.values():
        for block in entry.blocks:
            for cell in cells_of(block):
                found[cell.key] = tuple(dict.fromkeys((*found.get(cell.key, ()), *block.studies)))
    return found


# -- printed numbers

PublishedKey = tuple[str, str, str, str, str, str]  # table, dataset, steps, buffer, method, metric


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it."""

    mean: float
    std: float | None
    note: str


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of published.csv, claims.csv or ptm.csv, whose notes name the sources."""
    return list(csv.DictReader((files("bace.paper") / name).read_text(encoding="utf-8").splitlines()))


@functools.cache
def all_published() -> dict[PublishedKey, Printed]:
    found: dict[PublishedKey, Printed] = {}
    for row in (*rows_of("published.csv"), *rows_of("ptm.csv")):
        if row["mean"] and row["method"]:
            key = (row["table"], row["dataset"], row["steps"], row["buffer"], row["method"], row["metric"])
            found.setdefault(key, Printed(float(row["mean"]), float(row["std"]) if row["std"] else None, row["note"]))
    return found


def published(table: str, cell: Cell, metric: str) -> Printed | None:
    """The number that the paper prints at this place, if any."""
    key = (table, cell.block.dataset, str(cell.steps), str(cell.buffer), cell.method, metric)
    return all_published().get(key)


def published_average(table: str, method: str, metric: str) -> Printed | None:
    """The printed mean over the data sets of a table."""
    for (printed_in, dataset, _, _, printed_method, name), value in all_published().items():
        if (printed_in, dataset, printed_method, name) == (table, "Average", method, metric):
            return value
    return None
