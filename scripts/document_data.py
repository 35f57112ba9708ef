"""Write docs/data.md from the declarations of benchmarks, public sets and backbones.

python scripts/document_data.py
"""

from document_methods import ROOT, table

from bace.config.parse import config_from
from bace.data.benchmarks import BENCHMARKS, Benchmark
from bace.data.check import sets_of
from bace.models.backbones import KNOWN

HEADER = """# Data and backbones

Made by `python scripts/document_data.py` from the declarations in `data/benchmarks.py`, `data/datasets.py` and
`models/backbones.py`; a test fails if it is not up to date.

    bace check data                      # every public set: present, subset, wrong count or missing, and how to get it
    bace check data five-datasets        # the sets of one benchmark; the exit status is 2 if one is missing or wrong
    bace check backbone vit-b16          # loads it: width, layers, parameters, input, normalisation, licence

## Where data are found

1. `--benchmark.path`: the folder that holds the sets' folders; for a benchmark of one set also that set's own folder, a
   file, or a hub id.
2. The environment variable `BACE_DATA`: a folder with one folder a set, named as in the table below.
3. The hub, for sets that have a hub id: fetched at first use by `datasets`, into its cache.

A set's folder holds its files as they were published (the layout below), Parquet files named after their splits
(`train-00000-of-00001.parquet`), or class folders (`train/<class>/*.jpg`, `test/<class>/*.jpg`). The folder that an
archive makes when it is unpacked (`cifar-100-python`) is found both inside the set's folder and in its place. CIFAR's
pickles are read without running anything that is in them.

The examples are counted from lists and headers. A set of which only a part is here is a *subset*: it can be used, and a
run on all of it warns that its results cannot be compared with published ones.

Pictures are decoded when a run begins, each once, into one tensor of bytes; above 2 GB it is a memory-mapped file in
`BACE_CACHE` (default `~/.cache/bace`), which vanishes with the process. OmniBenchmark at 256 pixels takes 19 GB there;
`--benchmark.image_size 128` a quarter of that. Pictures of different sizes become squares of 256 pixels, or of
`benchmark.image_size`; grey ones get three channels.
"""

SETS = """
## Sets

Classes, training and test examples as published; for entities types and sentences. A dash: editions differ.
The paper prints 50,000 training pictures for MNIST; the set has 60,000, and all are used.

"""

LAYOUTS = """
### Layouts and sources

"""

BENCHMARKS_TEXT = """
## Benchmarks

The defaults are the paper's settings; every number is a setting (`bace run --benchmark NAME --print_config`). A desk
version is the same declaration with other numbers: few pictures a class, ViT-Tiny at 112 pixels (for texts MiniLM), so
that two CPU cores can run it. ImageNet-R, ObjectNet and OmniBenchmark take their classes in the order of NumPy's
permutation with seed 1993 of the folder names sorted as text, VTAB in the order of its folders.

"""

BACKBONES = """
## Backbones

A backbone is a name of this table, a hub id, a folder in the layout of transformers (`save_pretrained`) or of timm's
hub repositories, or a weights file of a plain ViT: `.npz` of Google, `.safetensors` or a PyTorch file (`.pth`, `.pt`,
`.bin`) with timm's names. PyTorch files are read with `weights_only=True`.

Names and relative paths are looked for in the folder one is in, then in the folder that `BACE_MODELS` names (default:
the folder `models` beside `BACE_DATA`), as `NAME`, `NAME.pth`, `NAME.safetensors`, `NAME.npz` or the last part of the
hub id; then on the hub.

`deit-small-611` is DeiT-S/16, without distillation token, trained on the 611 classes of ImageNet that are unlike those
of CIFAR and Tiny-ImageNet. Its file is not on the hub: get the checkpoint from the authors' pages and put it there as
`deit-small-611.pth`. Files with `deit` in their name are normalised with ImageNet's mean and deviation, other ViT files
with 0.5; a `preprocessor_config.json` beside the file overrules both.

"""


def sets_table() -> str:
    rows = []
    for corpus, modality in sets_of(None):
        numbers = [f"{number:,}" for number in corpus.counts] if corpus.counts else ["-"] * 3
        used = [name for name, benchmark in BENCHMARKS.items() if corpus in benchmark.corpora]
        rows.append([corpus.folder, modality, *numbers, corpus.hub or "-", ", ".join(used)])
    return table(("set", "modality", "classes", "train", "test", "hub id", "benchmarks"), rows)


def layouts_table() -> str:
    rows = [
        [corpus.folder, corpus.layout.replace("<", "&lt;"), corpus.unpacked or "-", corpus.terms]
        for corpus, _ in sets_of(None)
    ]
    return table(("set", "layout", "folder of the archive", "from, terms"), rows)


def benchmarks_table() -> str:
    return table(
        ("name", "what", "tasks", "backbone", "memory", "a class, training / test"),
        [described(benchmark) for benchmark in BENCHMARKS.values() if benchmark.corpora],
    )


def described(benchmark: Benchmark) -> list[str]:
    config = config_from({"benchmark": benchmark.name})
    several = len(benchmark.corpora) > 1
    limits = [config.benchmark[f"{split}_per_class"] or "all" for split in ("train", "test")]
    memory = f"{config.memory.per_class} a class" if config.memory.per_class else str(config.memory.size)
    size = f", {config.backbone.image_size} pixels" if config.backbone.image_size else ""
    adapter = f", adapters of {config.backbone.adapter}" if config.backbone.adapter else ""
    return [
        f"`{benchmark.name}`",
        benchmark.note,
        "by set" if several else str(config.benchmark["tasks"]),
        f"{config.backbone.name}{size}{adapter}",
        memory,
        " / ".join(map(str, limits)),
    ]


def backbones_table() -> str:
    return table(
        ("name", "family", "width", "layers", "note", "hub id", "terms"),
        [
            [
                f"`{known.name}`",
                known.family,
                str(known.width),
                str(known.depth),
                known.note,
                known.hub or "-",
                known.terms,
            ]
            for known in KNOWN
        ],
    )


def document() -> str:
    parts = (HEADER, SETS, sets_table(), LAYOUTS, layouts_table(), BENCHMARKS_TEXT, benchmarks_table())
    return "".join((*parts, BACKBONES, backbones_table()))


if __name__ == "__main__":
    (ROOT / "docs" / "data.md").write_text(document())
