"""Tiny backbones and data sets, made once, and the paths of the real ones."""

import copy
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
if os.access("/dev/shm", os.W_OK):  # checkpoints wait milliseconds each for the disk, and tests write thousands
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for numpy and for processes of tests, which share the cores

import hypothesis
import pytest
import torch

from bace.models.encoder import Encoder
from bace.models.loading import load_encoder

torch.set_num_threads(int(os.environ.get("BACE_TEST_THREADS", "1")))
hypothesis.settings.register_profile("same examples in every run", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same examples in every run")

ROOT = Path(__file__).parent.parent


def shared(variable: str, folder: str) -> Path | None:
    path = Path(os.environ.get(variable, ROOT.parent / "shared" / folder))
    return path if path.exists() else None


@pytest.fixture(scope="session")
def real_data() -> Path:
    path = shared("BACE_DATA", "data")
    return path or pytest.skip("the real data are not here: set BACE_DATA")


@pytest.fixture(scope="session")
def real_models() -> Path:
    path = shared("BACE_MODELS", "models")
    return path or pytest.skip("the pre-trained models are not here: set BACE_MODELS")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items if getattr(session.config.option, "loadgroup", False) else ():
        if (group := item.get_closest_marker("xdist_group")) and not item.nodeid.endswith(f"@{group.args[0]}"):
            raise pytest.UsageError("this pytest and this pytest-xdist do not keep the tests of a group in one process")
    gc.freeze()  # modules and tests stay to the end, so the collector need not scan them again


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Tiny"]:
    """Read backbones from their files once, and give every run in this process a copy."""
    made = Tiny(tmp_path_factory.mktemp("tiny"))
    with read_once(made.folder):
        yield made


@contextmanager
def read_once(folder: Path) -> Iterator[None]:
    """Inside this block, a backbone in this folder is read from its file once, and every run gets a copy."""

    @functools.cache
    def read(name: str, image_size: int | None, dtype: torch.dtype) -> Encoder:
        return load_encoder(name, image_size=image_size)

    def load(name: str, *, image_size: int | None = None) -> Encoder:
        if not Path(name).is_relative_to(folder):
            return load_encoder(name, image_size=image_size)
        return copy.deepcopy(read(name, image_size, torch.get_default_dtype()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.assemble.load_encoder", load)
        yield


@pytest.fixture
def double() -> Iterator[None]:
    """Run in double precision, in which a formula differs from its oracle by 1e-12 on every instruction set."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def formulas_in_double(request: pytest.FixtureRequest) -> Iterator[None]:
    """All formula tests and the fixtures that their modules share."""
    if request.path.parent.name == "formulas":
        request.getfixturevalue("tiny")  # first, so that its weights are single, whichever module asks for them
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


WORDS = [f"w{i}" for i in range(60)]
TYPES = ["person", "place", "thing", "event", "time"]


class Tiny:
    """Backbones with two small blocks and data sets with five classes, in the layouts that users have."""

    classes = ("ant", "bee", "cat", "dog", "eel")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vit, self.bert = str(folder / "vit"), str(folder / "bert")
        save_vit(folder / "vit")
        save_bert(folder / "bert")
        _save_pictures(folder / "pictures", self.classes)
        _save_texts(folder / "texts", self.classes)
        _save_sentences(folder / "sentences")

    def settings(self, modality: str, **changes: object) -> dict[str, object]:
        """A run of three tasks of 2, 1 and 2 classes in about a second."""
        base = {
            "benchmark.tasks": [2, 1, 2],
            "train.epochs": 2,
            "train.batch_size": 8,
            "train.lr": 0.01,
            "train.optimiser": "sgd",
            "memory.size": 10,
            "measure.fwt": True,
        }
        kind = {
            "image": {"benchmark": "my-images", "benchmark.path": str(self.folder / "pictures"), "backbone": self.vit},
            "text": {"benchmark": "my-texts", "benchmark.path": str(self.folder / "texts"), "backbone": self.bert},
            "token": {
                "benchmark": "my-entities",
                "benchmark.path": str(self.folder / "sentences"),
                "backbone": self.bert,
            },
        }[modality]
        return {**base, **kind, **changes}


def save_vit(folder: Path, blocks: int = 2) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        initializer_range=0.2,
    )
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)


def save_bert(folder: Path, blocks: int = 2) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, "##s", "very"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def _save_pictures(folder: Path, classes: tuple[str, ...]) -> None:
    from PIL import Image

    rng = torch.Generator().manual_seed(1)
    for name in classes:
        pattern = torch.rand(3, 8, 8, generator=rng)
        for split, count in (("train", 10), ("test", 6)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                noisy = (0.75 * pattern + 0.25 * torch.rand(3, 8, 8, generator=rng)) * 255
                Image.fromarray(noisy.to(torch.uint8).permute(1, 2, 0).numpy()).save(folder / split / name / f"{i}.png")


def _save_texts(folder: Path, classes: tuple[str, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    folder.mkdir()
    for split, count in (("train", 10), ("test", 6)):
        lines = ["text,label"]
        for i in range(count * len(classes)):
            c = i % len(classes)
            length = int(torch.randint(4, 9, (1,), generator=rng))
            own = torch.randint(0, 8, (length,), generator=rng) + 10 * c
            lines.append(" ".join(WORDS[w] for w in own.tolist()) + f",{classes[c]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def _save_sentences(folder: Path) -> None:
    """Sentences of background words with an entity or two; each type has its own words."""
    rng = torch.Generator().manual_seed(3)
    folder.mkdir()
    for split, count in (("train", 10), ("test", 6)):
        lines = []
        for i in range(count * len(TYPES)):
            c = i % len(TYPES)
            for _ in range(int(torch.randint(1, 4, (1,), generator=rng))):
                lines.append(f"{WORDS[int(torch.randint(50, 60, (1,), generator=rng))]} O")
            lines.append(f"{WORDS[10 * c + int(torch.randint(0, 4, (1,), generator=rng))]} B-{TYPES[c]}")
            lines.append(f"{WORDS[10 * c + 4 + int(torch.randint(0, 4, (1,), generator=rng))]}s I-{TYPES[c]}")
            if i % 4 == 0:  # a second entity, sometimes of another task's type
                other = (c + 1) % len(TYPES)
                lines.append(f"{WORDS[10 * other]} B-{TYPES[other]}")
            lines.append("w55 O\n")
        (folder / f"{split}.conll").write_text("\n".join(lines) + "\n")
