"""Write docs/data.md from the declarations of benchmarks, public sets and backbones.

python scripts/document_data.py
"""

from document_methods import ROOT, table

from bace.config.parse import config_from
from bace.data.benchmarks import BENCHMARKS, Benchmark
from bace.data.check import sets_of
from bace.models.backbones import KNOWN

HEADER = """# Data and backbones

`python scripts/document_data.py` generates this page from the declarations in `data/benchmarks.py`, `data/datasets.py`
and `models/backbones.py`. A test fails if the page is out of date.

    bace check data                      # every public set: present, subset, wrong count or missing, and how to get it
    bace check data five-datasets        # the sets of one benchmark; the exit status is 2 if one is missing or wrong
    bace check backbone vit-b16          # loads it: width, layers, parameters, input, normalisation, licence

## Where data is found

1. `--benchmark.path` names the folder that holds one folder per dataset. For a benchmark with one dataset, it may also
   name the dataset's own folder, a file, or a hub id.
2. The environment variable `BACE_DATA` names a folder with one folder per dataset, named as in the table below.
3. Datasets with a hub id are downloaded from the hub on first use, by the package `datasets` and into its cache.

A dataset's folder holds its files as they were published (the layouts below), Parquet files named after their splits
(`train-00000-of-00001.parquet`), or class folders (`train/<class>/*.jpg`, `test/<class>/*.jpg`). If unpacking an
archive creates a folder (`cifar-100-python`), that folder may lie inside the dataset's folder or take its place.
CIFAR's pickles are read without running any code in them.

Examples are counted from lists and headers. If only a part of a dataset is present, it is called a *subset*. It can be
used, but a run on all of it warns that its results are not comparable with published ones.

Texts and sentences without words (an empty cell, or only blanks) are left out of training and test data. A warning
names the file, their number and the first of their rows. It is an error if a class has no other examples, if a label is
missing, or if an empty text is in a list that is given to `partial_fit`. `bace predict` answers every row, including
empty ones.

Images are decoded once, when a run begins, into one tensor of bytes. From 5,000 images on, the tensor is a
memory-mapped file in the folder `.bace` beside the data (or in `BACE_CACHE`, default `~/.cache/bace`, if the data
cannot be written). Later runs and other processes map the same file and decode nothing, unless a source file, its time
or the image size has changed. You may delete `.bace` at any time. Other tensors above 2 GB are in a file in
`BACE_CACHE`, which is deleted when the process ends. OmniBenchmark at 256 pixels takes 19 GB, and a quarter of
that with `--benchmark.image_size 128`. Images of different sizes become squares of 256 pixels, or of
`benchmark.image_size`. Grey images get three channels.

With `--backbone.freeze K --backbone.cache MB`, the output of the lowest K blocks is computed once for every repeated
view, for all epochs, teachers, tests, methods and seeds of a comparison ([performance.md](performance.md)). Clean views
are always repeated. A random view is repeated only within its epoch. `--benchmark.views 4` trains on four random views
of each image and draws one of them each time, so that all of them are soon in the cache.
"""

SETS = """
## Datasets

The table shows the published numbers of classes, training examples and test examples; for entities, it shows types and
sentences. A dash means that editions differ. The paper prints 50,000 training images for MNIST; the dataset has 60,000,
and we use all of them.

"""

LAYOUTS = """
### Layouts and sources

"""

BENCHMARKS_TEXT = """
## Benchmarks

The defaults are the paper's settings, and every number is a setting (`bace run --benchmark NAME --print_config`). A
desk version is the same declaration with other numbers, so that two CPU cores can run it: few images per class and
ViT-Tiny at a small image size, or MiniLM for texts. ImageNet-R, ImageNet-A, ObjectNet, CUB-200 and OmniBenchmark take
their classes in the order of NumPy's permutation with seed 1993 of the folder names sorted as text. VTAB takes them in
the order of its folders. ImageNet-A and CUB-200 are not in the paper; `bace paper run ptm` uses them (docs/paper.md).

"""

BACKBONES = """
## Backbones

A backbone is one of:

- a name from this table,
- a hub id,
- a folder in the layout of transformers (`save_pretrained`) or of timm's hub repositories. The families are ViT, DeiT,
  DINOv2 and CLIP (its image tower) for images, and BERT, RoBERTa, DistilBERT, DeBERTa (v3, and v2 without convolution)
  and ModernBERT for texts. Adapters, LoRA, prompts, gates and frozen blocks work in all of them,
- a folder of sentence-transformers: `modules.json` with a transformer of these families, a pooling (`cls`, `mean` or
  `max`) and optionally `Normalize`, which define the feature of a text,
- a weights file of a plain ViT: Google's `.npz`, or `.safetensors` or a PyTorch file (`.pth`, `.pt`, `.bin`) with
  timm's names. PyTorch files are read with `weights_only=True`.

Names and relative paths are looked up in the current folder and then in the folder that `BACE_MODELS` names (default:
the folder `models` beside `BACE_DATA`), as `NAME`, `NAME.pth`, `NAME.safetensors`, `NAME.npz` or the last part of the
hub id, and then on the hub.

Images are normalised by the `preprocessor_config.json` in the folder. Without one, ViT uses 0.5, CLIP uses its own mean
and standard deviation, and the other families use ImageNet's. `backbone.normalise = false` leaves pixels in [0, 1]. The
feature of CLIP is its class token before the projection. `backbone.pooling` chooses the feature of a text (`class`,
`mean`, `max`). By default a folder of sentence-transformers defines it, and otherwise it is the class token.

`deit-small-611` is DeiT-S/16 without distillation token, trained on the 611 classes of ImageNet that are unlike those
of CIFAR and Tiny-ImageNet. Its file is not on the hub: get the checkpoint from the authors' pages and save it in the
folder of models as `deit-small-611.pth`. ViT files with `deit` in their name are normalised with ImageNet's mean and
standard deviation, other ViT files with 0.5. A `preprocessor_config.json` beside the file overrides both.

"""


def sets_table() -> str:
    rows = []
    for corpus, modality in sets_of(None):
        numbers = [f"{number:,}" for number in corpus.counts] if corpus.counts else ["-"] * 3
        used = [name for name, benchmark in BENCHMARKS.items() if corpus in benchmark.corpora]
        rows.append([corpus.folder, modality, *numbers, corpus.hub or "-", ", ".join(used)])
    return table(("dataset", "modality", "classes", "train", "test", "hub id", "benchmarks"), rows)


def layouts_table() -> str:
    rows = [
        [corpus.folder, corpus.layout.replace("<", "&lt;"), corpus.unpacked or "-", corpus.terms]
        for corpus, _ in sets_of(None)
    ]
    return table(("dataset", "layout", "folder of the archive", "source and terms"), rows)


def benchmarks_table() -> str:
    return table(
        ("name", "content", "tasks", "backbone", "memory", "training / test examples per class"),
        [described(benchmark) for benchmark in BENCHMARKS.values() if benchmark.corpora],
    )


def described(benchmark: Benchmark) -> list[str]:
    config = config_from({"benchmark": benchmark.name})
    several = len(benchmark.corpora) > 1
    limits = [config.benchmark[f"{split}_per_class"] or "all" for split in ("train", "test")]
    memory = f"{config.memory.per_class} per class" if config.memory.per_class else str(config.memory.size)
    size = f", {config.backbone.image_size} pixels" if config.backbone.image_size else ""
    adapter = f", adapters of {config.backbone.adapter}" if config.backbone.adapter else ""
    return [
        f"`{benchmark.name}`",
        benchmark.note,
        "by dataset" if several else str(config.benchmark["tasks"]),
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
