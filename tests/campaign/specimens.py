"""Valid files of every format that bace reads, ways to damage them, and files that would run code."""

import csv
import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from campaign.disk import learner
from campaign.mutations import STRANGE, mutated, strange_json
from campaign.work import Work

Make = Callable[[Path, random.Random], None]
PICTURES = ("png", "jpg", "gif", "bmp", "webp", "tiff", "ppm", "alpha.png", "palette.png", "16bit.png", "announced.png")
TEXTS = ("csv", "jsonl", "conll", "made-up csv", "made-up jsonl", "made-up conll")
PARQUET = ("texts", "pictures", "metadata")
PUBLISHED = ("idx", "idx.gz", "cifar", "svhn")
WEIGHTS = ("safetensors", "safetensors header", "config", "timm", "npz", "pth")
MARKER = "code was run"


class Specimens:
    def __init__(self, work: Work) -> None:
        self.work = work

    # -- pictures

    def picture(self, kind: str) -> Make:
        suffix = kind.split(".")[-1]

        def make(place: Path, rng: random.Random) -> None:
            for name in ("ant", "bee"):
                (place / "train" / name).mkdir(parents=True)
                drawn(0, 9).save(place / "train" / name / "whole.png")
            path = place / "train" / "ant" / f"spoilt.{suffix}"
            content = announced(rng) if kind == "announced.png" else mutated(encoded(kind, rng), rng)
            path.write_bytes(content)
            if rng.random() < 0.1:
                path.rename(path.with_suffix(rng.choice((".jpg", ".png", ".webp", ".gif"))))

        return make

    # -- texts and entities

    def texts(self, kind: str) -> Make:
        suffix = kind.split(" ")[-1]
        conll = suffix == "conll"

        def make(place: Path, rng: random.Random) -> None:
            whole = self.work.tiny.folder / ("sentences/train.conll" if conll else "texts/train.csv")
            content = whole.read_bytes()
            if suffix == "jsonl":
                rows = list(csv.DictReader(io.StringIO(content.decode())))
                content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            made = MADE_UP[suffix](rng) if kind.startswith("made-up") else mutated(content, rng)
            (place / f"train.{suffix}").write_bytes(made)
            changes = {
                "benchmark.path": str(place),
                "method": "SEQ",
                "benchmark.tasks": 1,
                "benchmark.test_fraction": 0.2,
            }
            settings = self.work.tiny.settings("token" if conll else "text", **changes)
            (place / "settings.json").write_text(json.dumps(settings))

        return make

    # -- Parquet

    def parquet(self, kind: str) -> Make:
        def make(place: Path, rng: random.Random) -> None:
            if kind == "pictures":
                cells = [{"bytes": encoded("png", rng), "path": None} for _ in range(6)]
                table = pa.table({"image": cells, "label": [0, 1] * 3})
            else:
                table = pa.table({"text": ["w1 w2 w3", "w11 w12"] * 20, "label": [0, 1] * 20})
            features = {"label": {"_type": "ClassLabel", "names": ["ant", "bee"]}}
            about: Any = {"info": {"features": features}}
            if kind == "metadata":
                about = strange_json(about, rng)
            described = json.dumps(about).encode()
            described = mutated(described, rng) if kind == "metadata" and rng.random() < 0.3 else described
            written = io.BytesIO()
            packing = rng.choice(("snappy", "gzip", "zstd", "none"))
            pq.write_table(table.replace_schema_metadata({"huggingface": described}), written, compression=packing)
            content = written.getvalue()
            if kind != "metadata":
                tail = rng.random() < 0.5  # the footer, where Parquet keeps its schema
                half = len(content) // 2
                content = content[:half] + mutated(content[half:], rng) if tail else mutated(content, rng)
            (place / "train.parquet").write_bytes(content)

        return make

    # -- data sets as published

    def published(self, kind: str) -> Make:
        def make(place: Path, rng: random.Random) -> None:
            pixels = np.random.default_rng(0).integers(0, 256, (6, 32 * 32 * 3), dtype=np.uint8)
            if kind.startswith("idx"):
                files = {
                    "train-images-idx3-ubyte": bytes([0, 0, 8, 3]) + struct.pack(">3I", 6, 28, 28) + bytes(6 * 28 * 28),
                    "train-labels-idx1-ubyte": bytes([0, 0, 8, 1]) + struct.pack(">I", 6) + bytes([0, 1] * 3),
                }
                spoilt = rng.choice(list(files))
                packed = kind.endswith("gz")
                if packed and rng.random() < 0.5:  # damaged inside the archive, which is intact
                    files[spoilt] = mutated(files[spoilt], rng)
                    spoilt = ""
                if packed and rng.random() < 0.1:  # a packed file that expands to an enormous size
                    files["train-images-idx3-ubyte"] += bytes(300_000_000)
                for name, content in files.items():
                    content = gzip.compress(content, 1) if packed else content
                    content = mutated(content, rng) if name == spoilt else content
                    (place / (name + ".gz" * packed)).write_bytes(content)
            elif kind == "cifar":
                contents = {
                    "data_batch_1": pickle.dumps({b"data": pixels, b"labels": [0, 1] * 3}, protocol=2),
                    "test_batch": pickle.dumps({b"data": pixels, b"labels": [0, 1] * 3}, protocol=2),
                    "batches.meta": pickle.dumps({b"label_names": [b"ant", b"bee"]}, protocol=2),
                }
                spoilt = rng.choice(("data_batch_1", "batches.meta"))
                for name, content in contents.items():
                    (place / name).write_bytes(mutated(content, rng) if name == spoilt else content)
            else:
                from scipy.io import savemat

                written = io.BytesIO()
                arrays = {"X": pixels.reshape(6, 32, 32, 3).transpose(1, 2, 3, 0), "y": np.array([[1], [10]] * 3)}
                savemat(written, arrays, do_compression=rng.random() < 0.5)
                (place / "train_32x32.mat").write_bytes(mutated(written.getvalue(), rng))

        return make

    # -- weights

    def weights(self, kind: str) -> Make:
        def make(place: Path, rng: random.Random) -> None:
            vit = place / "vit"
            whole = Path(self.work.tiny.vit)
            if kind in ("safetensors", "safetensors header", "config"):
                shutil.copytree(whole, vit)
                file = vit / ("config.json" if kind == "config" else "model.safetensors")
                if kind == "config":
                    content = json.dumps(strange_json(json.loads(file.read_text()), rng)).encode()
                    content = mutated(content, rng) if rng.random() < 0.2 else content
                else:
                    content = file.read_bytes()
                    content = spoilt_header(content, rng) if kind.endswith("header") else mutated(content, rng)
                file.write_bytes(content)
                return
            tensors = timm_tensors() if kind != "npz" else jax_tensors()
            name = rng.choice(list(tensors))
            if rng.random() < 0.5:  # the file is intact, but one of its tensors is strange
                tensors[name] = rng.choice(
                    (
                        torch.zeros(0),
                        torch.zeros(1),
                        torch.zeros(3, 3, 3, 3, 3),
                        torch.full_like(tensors[name], float("nan")),
                        tensors[name].to(torch.int8),
                        tensors[name].to(torch.complex64),
                        tensors[name][..., :1],
                        tensors[name][None],
                    )
                ).contiguous()
                if rng.random() < 0.2:
                    del tensors[name]
                spoil = False
            else:
                spoil = True
            file = place / f"weights.{'safetensors' if kind == 'timm' else kind}"
            if kind == "timm":
                save_file(tensors, file)
            elif kind == "npz":
                (np.savez_compressed if rng.random() < 0.5 else np.savez)(
                    file, **{n: t.numpy() for n, t in tensors.items()}
                )
            else:
                torch.save(rng.choice((tensors, {"model": tensors}, {"state_dict": tensors, "epoch": 3})), file)
            if spoil:
                file.write_bytes(mutated(file.read_bytes(), rng))

        return make

    # -- code

    def code(self, kind: str) -> Make:
        touch = Touch(str(self.work.folder / MARKER))

        def make(place: Path, rng: random.Random) -> None:
            source = f"import pathlib; pathlib.Path({touch.path!r}).touch()\n"
            if kind == "a pickle of weights":
                (place / "weights.bin").write_bytes(pickle.dumps({"model": touch}))
            elif kind == "a zipped pickle of weights":
                torch.save({"model": touch}, place / "weights.pth")
            elif kind == "pickled arrays of weights":
                np.savez(place / "weights.npz", cls=np.array([touch], dtype=object))
            elif kind == "a module beside a ViT":
                shutil.copytree(self.work.tiny.vit, place / "vit")
                about = json.loads((place / "vit" / "config.json").read_text())
                about |= {"auto_map": {"AutoModel": "modeling.Evil", "AutoConfig": "modeling.Evil"}}
                (place / "vit" / "config.json").write_text(json.dumps(about))
                (place / "vit" / "modeling.py").write_text(source + "class Evil: pass\n")
            elif kind == "a pickle of CIFAR":
                for name in ("data_batch_1", "test_batch", "batches.meta"):
                    (place / name).write_bytes(pickle.dumps({b"labels": touch}, protocol=2))
            elif kind == "a PostScript file named .png":
                (place / "train" / "ant").mkdir(parents=True)
                drawing = (
                    f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({touch.path}) (w) file closefile\nshowpage\n"
                )
                (place / "train" / "ant" / "picture.png").write_text(drawing)
            elif kind == "a YAML file":
                text = f"""method: !!python/object/apply:os.system ["touch '{touch.path}'"]\n"""
                (place / "settings.yaml").write_text(text)
            else:
                (place / "theirs.py").write_text(source + "from bace.methods.seq import SEQ\nclass Mine(SEQ): pass\n")
                name_a_method(self.work, place, kind)

        return make


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


def name_a_method(work: Work, place: Path, kind: str) -> None:
    """Write a run or a learner whose files name a class in the current working directory."""
    from campaign.folders import with_sums

    own = {"name": "theirs.Mine", "span": "seen"}
    if kind.endswith("run"):
        shutil.copytree(work.straight("ER", "image")[0], place / "run")
        newest = max((place / "run" / "checkpoints").iterdir())
        about = json.loads((place / "run" / "run.json").read_text())
        about["config"]["method"] = own
        (place / "run" / "run.json").write_text(json.dumps(about))
        state = json.loads((newest / "state.json").read_text())
        state["run"] = about
    else:
        shutil.copytree(learner(work), place / "learner")
        newest = max((place / "learner").iterdir())
        state = json.loads((newest / "state.json").read_text())
        state["given"]["method"] = own
    (newest / "state.json").write_text(json.dumps(state))
    with_sums(newest)


# -- pictures


def drawn(seed: int, side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encoded(kind: str, rng: random.Random) -> bytes:
    image, options = drawn(rng.randrange(100), 9), {}
    if kind == "alpha.png":
        image.putalpha(drawn(1, 9).convert("L"))
    elif kind == "palette.png":
        image = image.quantize(16)
        options = {"transparency": 3}
    elif kind == "16bit.png":
        image = Image.fromarray(np.arange(81, dtype=np.uint16).reshape(9, 9) * 700)
    elif kind == "jpg":
        exif = Image.Exif()
        exif[0x0112] = rng.randrange(1, 9)
        options = {"exif": exif}
    elif kind == "gif":
        options = {"save_all": True, "append_images": [drawn(2, 9)]}
    written = io.BytesIO()
    formats = {"jpg": "JPEG", "tiff": "TIFF", "ppm": "PPM", "gif": "GIF", "bmp": "BMP", "webp": "WEBP"}
    image.save(written, formats.get(kind, "PNG"), **options)
    return written.getvalue()


def announced(rng: random.Random) -> bytes:
    """Return a small PNG that announces a large image, with all, some or none of the pixels."""
    width, height = rng.choice(
        ((13_000, 13_000), (7_999, 7_999), (2**31 - 1, 1), (1, 60_000_000), (0, 0), (60_000, 1_000))
    )
    depth, colour = rng.choice(((8, 2), (8, 6), (16, 2), (16, 6), (1, 0), (8, 3)))
    bits = depth * {0: 1, 2: 3, 3: 1, 6: 4}[colour]
    size = min((width * bits // 8 + 2) * height, rng.choice((0, 10_000, 400_000_000)))
    packer = zlib.compressobj(1)
    pixels = b"".join(packer.compress(bytes(min(2**24, size - i))) for i in range(0, size, 2**24)) + packer.flush()
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))]
    parts += [(b"PLTE", bytes(768))] * (colour == 3) + [(b"IDAT", pixels), (b"IEND", b"")]
    whole = b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
    )
    return b"\x89PNG\r\n\x1a\n" + whole


# -- made-up tables

WORDS = (
    "w1",
    "w2 w3",
    "",
    " ",
    "a,b",
    'say "w4"',
    "é",
    "\u2028",
    "\u202e",
    "\0",
    "\ufeff",
    "w" * 200_000,
    "\t",
    "'",
    "\\",
    "🎈",
    "\r",
)
LABELS = ("ant", "bee", "1", "01", "-1", "1.0", "True", "", " ant ", "ANT", "nan", "O", "ünter", "../x", "=1+1")


def made_up_csv(rng: random.Random) -> bytes:
    header = rng.choice(
        (["text", "label"], ["label", "text"], ["text"], ["text", "text"], ["text", "label", "x"], ["a", "b"])
    )
    written = io.StringIO()
    writer = csv.writer(written, delimiter=rng.choice(",,,;\t"), quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))
    writer.writerow(header)
    for _ in range(rng.choice((0, 1, 3, 30))):
        cells = [rng.choice(LABELS) if name == "label" else rng.choice(WORDS) for name in header]
        writer.writerow(cells[: rng.choice((len(cells),) * 20 + (0, 1))])
    return written.getvalue().encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16")), "replace")


def made_up_jsonl(rng: random.Random) -> bytes:
    lines = []
    for _ in range(rng.choice((1, 3, 30))):
        row: Any = {"text": rng.choice(WORDS), "label": rng.choice((*LABELS, 1, 0))}
        if rng.random() < 0.2:
            row = rng.choice((strange_json(row, rng), strange_json(row, rng), rng.choice(STRANGE)))
        line = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if rng.random() < 0.03:
            line = rng.choice(
                (b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b"{", b'{"text": 1e999, "label": "a"}')
            )
        lines.append(line)
    return b"\n".join(lines)


def made_up_conll(rng: random.Random) -> bytes:
    tags = ("O", "O", "B-person", "I-person", "I-place", "B-", "B-B-x", "o", "PER", "B-é", "I-", "-", "B- x", "O ")
    lines = []
    for _ in range(rng.choice((1, 5, 60))):
        word = rng.choice(("w1", "w2", "w55", "-DOCSTART-", "a\u00a0b", "\u2028", "🎈", "w" * 10_000, "\0", "#"))
        tag = rng.choice(tags) if rng.random() < 0.1 else rng.choice(tags[:4])
        lines.append(rng.choice((f"{word} {tag}", f"{word}\t{tag}", f"{word} NN x {tag}", "", f"{word} {tag}")))
    return rng.choice(("\n", "\n", "\r\n", "\r")).join(lines).encode()


MADE_UP: dict[str, Callable[[random.Random], bytes]] = {
    "csv": made_up_csv,
    "jsonl": made_up_jsonl,
    "conll": made_up_conll,
}


def csv_labels(file: Path) -> set[str]:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = [row for row in csv.reader(opened) if row]
    column = [name.strip().lower() for name in rows[0]].index("label")
    return {row[column].strip() for row in rows[1:]}


def jsonl_labels(file: Path) -> set[str]:
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    return {str(json.loads(line)["label"]).strip() for line in lines if line.strip()}


def conll_types(file: Path) -> set[str]:
    lines = [line.replace("\t", " ").strip(" ").split(" ") for line in file.read_text(encoding="utf-8-sig").split("\n")]
    return {fields[-1][2:] for fields in lines if len(fields) > 1 and fields[-1] != "O" and fields[0] != "-DOCSTART-"}


SIMPLE_READERS = {".csv": csv_labels, ".jsonl": jsonl_labels, ".conll": conll_types}


# -- weights


def spoilt_header(content: bytes, rng: random.Random) -> bytes:
    """Return safetensors with a header that describes the same numbers differently."""
    length = int.from_bytes(content[:8], "little")
    header = strange_json(json.loads(content[8 : 8 + length]), rng)
    if rng.random() < 0.5:
        name = rng.choice([name for name in header if name != "__metadata__"])
        if isinstance(header[name], dict):
            strange = {
                "dtype": rng.choice(("F64", "I8", "BF16", "F8_E4M3", "X", "BOOL", "f32", "C64")),
                "shape": rng.choice(([2**40, 2**40], [0], [-1], [2**63], [], [1.5], [10**9])),
                "data_offsets": rng.choice(([0, 0], [0, 2**62], [10, 4], [-4, 0], [0], [4, 8])),
            }
            key = rng.choice(list(strange))
            header[name][key] = strange[key]
    written = json.dumps(header).encode("utf-8", "surrogatepass")
    announced_length = rng.choice((len(written), len(written), len(written), 0, 2**63, len(written) + 8, 10**8))
    return announced_length.to_bytes(8, "little") + written + content[8 + length :]


def timm_tensors() -> dict[str, Any]:
    """Return a ViT of width 64 with one block, under timm's names."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"cls_token": (1, 1, 64), "pos_embed": (1, 5, 64), "patch_embed.proj.weight": (64, 3, 4, 4)}
    shapes |= {
        "patch_embed.proj.bias": (64,),
        "norm.weight": (64,),
        "norm.bias": (64,),
        "head.weight": (2, 64),
        "head.bias": (2,),
    }
    for name, (out, into) in {
        "attn.qkv": (192, 64),
        "attn.proj": (64, 64),
        "mlp.fc1": (128, 64),
        "mlp.fc2": (64, 128),
    }.items():
        shapes |= {f"blocks.0.{name}.weight": (out, into), f"blocks.0.{name}.bias": (out,)}
    for name in ("norm1", "norm2"):
        shapes |= {f"blocks.0.{name}.weight": (64,), f"blocks.0.{name}.bias": (64,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def jax_tensors() -> dict[str, Any]:
    """Return the same ViT under the names of Google's JAX checkpoints."""
    rng = torch.Generator().manual_seed(0)
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    shapes: dict[str, tuple[int, ...]] = {"cls": (1, 1, 64), "Transformer/posembed_input/pos_embedding": (1, 5, 64)}
    shapes |= {"embedding/kernel": (4, 4, 3, 64), "embedding/bias": (64,), "head/bias": (2,)}
    shapes |= {f"Transformer/encoder_norm/{end}": (64,) for end in ("scale", "bias")}
    shapes |= {f"{attention}/{part}/kernel": (64, 2, 32) for part in ("query", "key", "value")}
    shapes |= {f"{attention}/{part}/bias": (2, 32) for part in ("query", "key", "value")}
    shapes |= {f"{attention}/out/kernel": (2, 32, 64), f"{attention}/out/bias": (64,)}
    shapes |= {f"{block}/MlpBlock_3/Dense_0/kernel": (64, 128), f"{block}/MlpBlock_3/Dense_0/bias": (128,)}
    shapes |= {f"{block}/MlpBlock_3/Dense_1/kernel": (128, 64), f"{block}/MlpBlock_3/Dense_1/bias": (64,)}
    shapes |= {f"{block}/LayerNorm_{n}/{end}": (64,) for n in (0, 2) for end in ("scale", "bias")}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
