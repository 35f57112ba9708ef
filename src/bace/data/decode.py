"""Pictures from files, PIL and arrays into one uint8 tensor, in memory or in a mapped file."""

import errno
import math
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import track
from torch import Tensor

from bace.data import picture_store
from bace.errors import ConfigError, DataError
from bace.files import inside

Size = int | tuple[int, int]  # the side of a square, or height and width
DEFAULT_SIZE = 256  # pictures of unequal sizes become squares of this side
MEMORY_LIMIT = 2 * 1024**3  # bytes; larger picture tensors live in a memory-mapped file
STORED_FROM = 5000  # pictures; decoding fewer is faster than looking them up
MOST_PIXELS = 64_000_000  # in one picture: 192 MB in colour
MOST_SIDE = 65_535  # pixels, as in JPEG; even a short row costs time
MOST_BYTES = 256 * 1024**2  # in the file of one picture
LARGE = 4_000_000  # pixels; larger pictures are decoded one at a time, so that memory stays bounded
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # others, such as EPS, would start other programs
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
PICTURE_COLUMNS = ("image", "img", "picture", "file_name", "filename", "path")  # in tables, the likeliest first


class PictureOptions(TypedDict, total=False):
    """How pictures are read. Other examples do not use these options.

    image_size: the side of the central square that every picture is cut and resized to. By default pictures stay as
        they are if all have one size, and become squares of 256 pixels otherwise.
    channels: 3, or 1 for grey. Transparent pictures are laid over white; a picture's EXIF rotation is applied.
    memory_limit: bytes above which the pictures live in a memory-mapped file (in BACE_CACHE, default ~/.cache/bace).
    decode: False leaves pictures in their files, so that all or some can be decoded later (`Pictures`).
    """

    image_size: Size | None
    channels: int
    memory_limit: int
    decode: bool


def check_options(options: PictureOptions) -> None:
    image_size, channels = options.get("image_size"), options.get("channels", 3)
    if image_size is not None and min(image_size if isinstance(image_size, tuple) else (image_size,)) < 1:
        raise ConfigError(f"image_size is {image_size}: give a number of pixels, or None.")
    if channels not in (1, 3):
        raise ConfigError(f"channels is {channels}: give 3 (colour) or 1 (grey).")


def picture_of(value: Any, folder: Path | None, where: str) -> bytes | Path | Image.Image:
    """Something to open from a cell of a source: bytes, a path, a PIL picture, or a hub cell with bytes and path."""
    given = value
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.strip():
        value = Path(value)
    if isinstance(value, Path):
        try:
            return inside(folder, value) if folder is not None else value
        except ValueError as error:
            raise DataError(f"{where}: {error}. Pictures lie beside the file that lists them, or below it.") from error
    if isinstance(value, bytes | Image.Image):
        return value
    raise DataError(f"{where}: this is not a picture: {str(given)[:80]!r}. Expected a picture, its bytes or its path.")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of one source that are not decoded yet.

    cells: gives pictures to open, at ascending rows of the source.
    rows:  the rows of these pictures.
    where: the name of a row in error messages.
    data: the folder of the source, in which decoded pictures are stored; None if they are not stored.
    """

    cells: Callable[[Sequence[int]], Iterator[Any]]
    rows: Sequence[int]
    where: Callable[[int], str]
    data: Path | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> "Pictures":
        return replace(self, rows=[self.rows[i] for i in indices])


def decode_pictures(
    parts: Sequence[Pictures], image_size: Size | None, channels: int = 3, memory_limit: int = MEMORY_LIMIT
) -> Tensor:  # (pictures of all parts, channels, height, width)
    """The pictures of all parts, one after the other, in one tensor. Each source is read once, from front to back, and
    each picture is written straight to its place, so no picture is held twice."""
    starts = list(accumulate((len(part) for part in parts), initial=0))
    by_source: dict[Any, list[tuple[int, int, Pictures]]] = {}  # row, place, part
    for start, part in zip(starts, parts, strict=False):
        wanted = ((row, place, part) for place, row in enumerate(part.rows, start))
        by_source.setdefault(part.cells, []).extend(wanted)
    order = [item for items in by_source.values() for item in sorted(items, key=lambda item: item[:2])]

    def pictures() -> Iterator[Any]:
        for cells, items in by_source.items():
            yield from cells(sorted(row for row, _, _ in items))

    def where(i: int) -> str:
        row, _, part = order[i]
        return part.where(row)

    places = [place for _, place, _ in order]

    def stack(room: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        stacked = _stack_equal(pictures(), places, where, image_size, channels, room)
        if stacked is None:  # unequal sizes
            stacked = _stack_equal(pictures(), places, where, DEFAULT_SIZE, channels, room)
        return cast(Tensor, stacked)

    def in_memory(shape: tuple[int, ...]) -> Tensor:
        return allocate(shape, memory_limit)

    data = parts[0].data
    if data is None or len(places) < STORED_FROM:
        return stack(in_memory)
    key = picture_store.fingerprint(pictures(), (places, image_size, channels, DEFAULT_SIZE))
    if key is None:
        return stack(in_memory)
    if (found := picture_store.find(key, data)) is not None:
        return found
    with picture_store.draft(key, data) as draft:
        stacked = stack(lambda shape: room if (room := draft.allocate(shape)) is not None else in_memory(shape))
        return stacked if (kept := draft.finished()) is None else kept


def _stack_equal(
    pictures: Iterator[Any],
    places: Sequence[int],
    where: Callable[[int], str],
    image_size: Size | None,
    channels: int,
    room: Callable[[tuple[int, ...]], Tensor],
) -> Tensor | None:  # (count, channels, height, width), or nothing as soon as two sizes differ
    def decode(block: list[tuple[int, Any]]) -> list[npt.NDArray[np.uint8]]:
        return [_decode(picture, where(i), image_size, channels) for i, picture in block]

    def decode_all() -> Iterator[npt.NDArray[np.uint8]]:
        items = enumerate(pictures)
        while ahead := list(islice(items, 32 * workers)):  # limits how much is read ahead
            blocks = [ahead[i : i + 32] for i in range(0, len(ahead), 32)]
            for block in pool.map(decode, blocks) if len(blocks) > 1 else map(decode, blocks):
                yield from block

    # Pillow decodes and resizes without the interpreter lock, so threads help; a job for each small picture would not.
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        count = len(places)
        decoded: Iterable[npt.NDArray[np.uint8]] = decode_all()
        if count > 2000 and sys.stderr.isatty():
            decoded = track(decoded, "Decoding pictures", count, console=Console(stderr=True), transient=True)
        found = iter(decoded)
        first = list(islice(found, 32))
        if len({pixels.shape for pixels in first}) > 1:  # checked before allocating all at the size of the first
            return None
        result: Tensor | None = None
        for place, pixels in zip(places, chain(first, found), strict=True):
            if result is None:
                result = room((count, *pixels.shape))
                target = result.numpy()
            if pixels.shape != target.shape[1:]:
                return None
            target[place] = pixels
    return result


def _decode(picture: Any, where: str, image_size: Size | None, channels: int) -> npt.NDArray[np.uint8]:
    """One picture as (channels, height, width)."""
    try:
        if isinstance(picture, Image.Image):
            image = _plain(picture, channels)
        else:
            with Image.open(_checked(picture), formats=FORMATS) as opened:
                pixels = opened.width * opened.height
                if pixels > MOST_PIXELS or max(opened.size) > MOST_SIDE:
                    most = f"at most {MOST_PIXELS:,} are read, {MOST_SIDE:,} a side"
                    raise ValueError(f"{opened.width} x {opened.height} pixels; {most}")
                with _one_at_a_time if pixels > LARGE else nullcontext():
                    image = _plain(opened, channels)
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error on broken bytes
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            named = Path(str(picture)).suffix.lower() in IMAGE_SUFFIXES
            what = "Check the path." if named else "Pictures are expected; texts need a model of texts."
            raise DataError(f"{where}: there is no picture '{str(picture)[:200]}'. {what}") from error
        file = f" '{picture}'" if isinstance(picture, Path) and str(picture) not in where else ""
        why = f"it is none of {', '.join(FORMATS)}" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{where}: the picture{file} cannot be decoded ({why}). Replace or remove it.") from error
    if image_size is not None:
        height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
        if image.size != (width, height):  # crop the centre to that shape and scale it; Pillow's bicubic antialiases
            image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    array = np.asarray(image)
    return array.transpose(2, 0, 1) if channels == 3 else array[None]


_one_at_a_time = threading.Lock()


def _checked(picture: bytes | Path) -> BytesIO | Path:
    """Check that Pillow may open this: an ordinary file (a pipe would never end) that is not too large."""
    if isinstance(picture, Path):
        found = picture.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not an ordinary file")
    size = len(picture) if isinstance(picture, bytes) else found.st_size
    if size > MOST_BYTES:
        raise ValueError(f"{size:,} bytes; at most {MOST_BYTES:,} are read")
    return BytesIO(picture) if isinstance(picture, bytes) else picture


def _plain(image: Image.Image, channels: int) -> Image.Image:
    """The picture upright and opaque, with 8 bits, in RGB or grey."""
    image.load()
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if sixteen_bits:  # Pillow would clip to 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits, Pillow mode {image.mode}, have no fixed range; save it with 8 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if channels == 3 else "L")


def channels_last(array: npt.NDArray[Any] | Tensor) -> Tensor:  # (examples, height, width, 1, 3 or 4)
    layouts = [-1, 1] if isinstance(array, np.ndarray) else [1, -1]  # the axis of the channels, likelier one first
    given = tuple(array.shape)
    if len(given) == 3:
        array, layouts = array[..., None], [-1]
    axes = [axis for axis in layouts if array.ndim == 4 and array.shape[axis] in (1, 3, 4)]
    if not axes or 0 in given[1:]:
        flat = " Put one picture in a list; reshape rows of pixels." if len(given) == 2 else ""
        raise DataError(
            f"pictures of shape {given}: expected (examples, height, width), (examples, height, width, channels) or "
            f"(examples, channels, height, width), with 1, 3 or 4 channels.{flat}"
        )
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "uif":
            raise DataError(f"pictures of type {array.dtype}: expected integers in 0..255 or floats in 0..1.")
        if array.dtype != np.uint8:
            floats = np.float32 if array.dtype.itemsize <= 4 else np.float64
            array = array.astype(floats if array.dtype.kind == "f" else np.int64, copy=False)
        tensor = torch.from_numpy(array if array.flags.writeable and min(array.strides) >= 0 else array.copy())
    else:
        if array.dtype == torch.bool or array.is_complex():
            raise DataError(f"pictures of type {array.dtype}: expected integers in 0..255 or floats in 0..1.")
        tensor = array.detach().cpu()
    return tensor if axes[0] == -1 else tensor.permute(0, 2, 3, 1)


def as_uint8(pixels: Tensor) -> Tensor:
    if pixels.dtype == torch.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    top = 1.0 if pixels.is_floating_point() else 255.0
    if not (math.isfinite(low) and low >= 0 and high <= top):
        scale = " Divide them by the largest possible value, such as 255." if low >= 0 and top == 1 else ""
        raise DataError(
            f"pixels of type {str(pixels.dtype).removeprefix('torch.')} from {low:g} to {high:g}: "
            f"expected integers in 0..255 or floats in 0..1.{scale}"
        )
    return (pixels * 255).round().to(torch.uint8) if top == 1 else pixels.to(torch.uint8)


def from_pixels(pixels: Tensor, channels: int, memory_limit: int) -> Tensor:  # (examples, height, width, 1, 3 or 4) ->
    """A copy as uint8 (examples, channels, height, width), with the colours treated as in pictures from files."""
    examples, height, width, depth = pixels.shape
    result = allocate((examples, channels, height, width), memory_limit)
    for start in range(0, examples, 1024):
        block = as_uint8(pixels[start : start + 1024])
        if depth == 4:  # over white
            colour, alpha = block[..., :3].to(torch.int32), block[..., 3:].to(torch.int32)
            block = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)
        if depth != 1 and channels == 1:  # ITU-R 601 luma in the fixed-point form that Pillow uses
            red, green, blue = block.to(torch.int32).unbind(-1)
            block = ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8)[..., None]
        result[start : start + 1024] = block.permute(0, 3, 1, 2)  # one channel is broadcast to all
    return result


def allocate(shape: tuple[int, ...], memory_limit: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor; above the limit it is in a memory-mapped file, which vanishes with the process however that ends."""
    size = math.prod(shape) * dtype.itemsize
    if size <= memory_limit:
        return torch.empty(shape, dtype=dtype)
    folder = picture_store.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".pixels", dir=folder)
        try:
            # Reserve the blocks now: writing to a mapped file on a full disk would kill the process.
            getattr(os, "posix_fallocate", lambda file, _, length: os.truncate(file, length))(handle, 0, size)
            tensor = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
        finally:
            os.close(handle)
            with suppress(PermissionError):  # Windows keeps mapped files
                os.unlink(name)
    except OSError as error:
        raise DataError(
            f"{size / 1e9:.1f} GB of pictures do not fit in {folder} ({error.strerror}). "
            "Set BACE_CACHE to a folder with room, or choose a smaller image_size or limit_per_class."
        ) from error
    return tensor
