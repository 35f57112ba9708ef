"""Pictures are stored as uint8 tensors and become normalised float batches, with crop, flip and resize."""

import base64
import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor

from bace.data import decode
from bace.data.batch import MIRRORED, Keyed, View, moved
from bace.data.decode import PictureOptions, Pictures, Size
from bace.data.files import Raw, in_memory
from bace.data.modality import Examples, Inputs, Modality, Table
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError
from bace.randomness import derive, uniform

THUMBNAIL = 64  # pixels of a side, at most


class Image(Modality):
    name, plural, encoder, own_data = "image", "images", "image", "my-images"
    input_names = decode.PICTURE_COLUMNS
    input_kinds = ("picture",)
    asked_kinds = ("string",)  # a column of paths
    picture_input = "pixel_values"
    file_suffixes = frozenset(decode.IMAGE_SUFFIXES)

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        def cells(rows: Sequence[int]) -> Iterator[Any]:
            for row, (value,) in zip(rows, raw.values(columns, rows), strict=True):
                if isinstance(value, np.ndarray | Tensor):
                    pixels = decode.as_uint8(decode.channels_last(value[None]))[0]
                    yield PIL.Image.fromarray((pixels[..., 0] if pixels.shape[-1] == 1 else pixels).numpy())
                else:
                    yield decode.picture_of(value, raw.folder, raw.where(row))

        place = Path(raw.source)
        data = place if place.is_dir() else place.parent if place.is_file() else None
        pictures = Pictures(cells, rows, raw.where, data)
        return decode.decode_pictures([pictures], *_settings(options)) if options.get("decode", True) else pictures

    def recognises(self, examples: Any) -> bool:
        if isinstance(examples, np.ndarray | Tensor):
            return examples.ndim in (3, 4)
        return all(isinstance(item, str) and Path(item).suffix.lower() in decode.IMAGE_SUFFIXES for item in examples)

    def from_array(self, array: Any, options: PictureOptions) -> Tensor:
        if array.ndim == 3 and array.shape[-1] == 3:  # not many grey pictures, three pixels wide
            raise DataError(f"an array of shape {tuple(array.shape)} is one picture in colour: put it in a list.")
        if array.ndim == 3 and len(array) == 3:
            warnings.warn(
                f"an array of shape {tuple(array.shape)} is read as three grey pictures: put it in a list if it is one "
                "picture in colour",
                stacklevel=4,
            )
        pixels, (image_size, channels, memory_limit) = decode.channels_last(array), _settings(options)
        if image_size is None or tuple(pixels.shape[1:3]) == image_size:
            return decode.from_pixels(pixels, channels, memory_limit)
        return cast(Tensor, self.read(in_memory(list(pixels.numpy()), "image"), ["image"], range(len(pixels)), options))

    def check_encoder(self, encoder: Any, backbone: str) -> None:
        super().check_encoder(encoder, backbone)
        if encoder.channels != 3:
            raise ConfigError(
                f"backbone '{backbone}' takes pictures of {encoder.channels} channels: choose one that takes 3 (colour)"
            )

    def encode(self, tables: Sequence[Table], settings: DataSettings, encoder: Any) -> tuple[Examples, list[int]]:
        pixels = all_pixels([table.inputs for table in tables if len(table)], settings.image_size)
        stored = min(pixels.shape[-2:])
        area = settings.crop == "area"
        images = (AreaCrops if area else Images)(
            pixels,
            size=encoder.image_size,
            mean=encoder.mean,
            std=encoder.std,
            augment=settings.augment,
            flip=settings.flip and flips(tables),
            views=settings.views,
            padding=min(4, -(-stored // 8)),  # 4 for pictures of 28 and 32, less for smaller ones
            window=round(0.875 * stored) if stored >= 128 or area else None,  # 224 of 256
        )
        return images, [len(table) for table in tables]

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        pixels = kept.get("pixels", torch.zeros(0, 3, 1, 1, dtype=torch.uint8))
        return Images(pixels, size=pixels.shape[-1])

    def picture(self, data: Examples) -> tuple[int, int] | None:
        assert isinstance(data, Images)
        return data.pixels.shape[2], data.pixels.shape[3]

    def disturbed(self, inputs: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """The pictures turned by 180 degrees."""
        return {**inputs, "pixel_values": inputs["pixel_values"].rot90(2, (2, 3))}

    def from_lines(self, lines: Iterable[str], source: str) -> list[tuple[str, Any]]:
        """Each line names a picture's file."""
        return [(line.strip(), Path(line.strip())) for line in lines if line.strip()]

    def from_rows(self, raw: Raw, columns: Sequence[str]) -> list[tuple[str, Any]]:
        cells = enumerate(raw.values(columns, range(raw.count)))
        return [(raw.where(row), decode.picture_of(value, raw.folder, raw.where(row))) for row, (value,) in cells]

    def view(self, data: Any, example: int, row: int, backbone: Callable[[], str]) -> dict[str, Any]:
        return {"image": thumbnail(data.pixels[example])}


def _settings(options: PictureOptions) -> tuple[Size | None, int, int]:
    """Image size, channels and memory limit."""
    return options.get("image_size"), options.get("channels", 3), options.get("memory_limit", decode.MEMORY_LIMIT)


def all_pixels(inputs: Sequence[Inputs], image_size: int | None) -> Tensor:  # (examples, channels, height, width)
    """The pictures of all tables, one after the other."""
    if promised := [pictures for pictures in inputs if isinstance(pictures, Pictures)]:
        return decode.decode_pictures(promised, image_size)
    tensors = [pixels for pixels in inputs if isinstance(pixels, Tensor)]
    shapes = {tuple(pixels.shape[1:]) for pixels in tensors}
    if len(shapes) > 1:
        raise DataError(f"pictures of different shapes in one stream: {sorted(shapes)}; give them one size")
    return torch.cat(tensors)


def flips(tables: Sequence[Table]) -> bool | Tensor:  # (examples,)
    """Which pictures may be mirrored."""
    if len({table.mirror for table in tables}) == 1:
        return tables[0].mirror
    return torch.cat([torch.full((len(table),), table.mirror) for table in tables])


def thumbnail(pixels: Tensor) -> str:  # (1 or 3, height, width) uint8
    """A PNG in base64."""
    picture = PIL.Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((THUMBNAIL, THUMBNAIL))  # never larger than it was
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


IMAGE = Image()


class Images:
    """Pictures of one size, kept as uint8.

    Args:
        pixels: uint8 (examples, channels, height, width) with 1 or 3 channels; grey is repeated to 3 for the encoder.
        size: side of the square that the encoder takes; pictures are resized to it (bicubic, antialiased).
        mean, std: normalisation of the encoder, per channel, for values in [0, 1].
        augment: show random views in training (crop and, with `flip`, mirror); otherwise training sees clean pictures.
        flip: for all pictures, or for each (examples,).
        views: the number of random views of each picture; 0 means all crops and flips.
        window: with None, training views are cut out of the picture padded by `padding`, at its own size. With a
            number, they are a random window of that side, and the clean view is the central one (for pictures that are
            stored larger).
    """

    modality: Modality = IMAGE
    row_start = positions = lengths = None  # one row per example, all of one size

    def __init__(
        self,
        pixels: Tensor,
        *,
        size: int,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        augment: bool = True,
        flip: bool | Tensor = True,
        views: int = 0,
        padding: int = 4,
        window: int | None = None,
    ) -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
            raise DataError(
                f"pictures are {pixels.dtype} of shape {tuple(pixels.shape)}: expected uint8 of shape "
                "(examples, channels, height, width) with 1 or 3 channels"
            )
        if window is not None and window > min(pixels.shape[2:]):
            raise DataError(f"window {window} is larger than the pictures, {tuple(pixels.shape[2:])}: make it smaller")
        self.pixels, self.size = pixels, size
        self.augment, self.views, self.padding, self.window = augment, views, padding, window
        self.flip = torch.as_tensor(flip)
        self.normalisation = (tuple(mean), tuple(std))
        # one multiplication and one addition: (x / 255 - mean) / std
        self.scale = 1.0 / (255.0 * torch.tensor(std)).view(1, 3, 1, 1)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, 3, 1, 1)
        self.constants: dict[torch.device, tuple[Tensor, Tensor]] = {}  # both, on each device that was asked for
        # (2, 1): the numbers of possible tops and lefts of a view, and the top and left of the clean view
        sides = torch.tensor(pixels.shape[2:])[:, None]
        self.room = torch.full_like(sides, 2 * padding + 1) if window is None else sides - window + 1
        self.centre = torch.div(self.room - 1, 2, rounding_mode="floor")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def random_views(self) -> bool:
        return self.augment

    @property
    def repeated(self) -> int:
        """The number of views of a picture that repeat: the clean one, and the random ones if `views` limits them."""
        return 1 + self.views * self.augment

    def fingerprint(self) -> str:
        """A hash that is the same for pictures with the same views and keys."""
        about = (tuple(self.pixels.shape), self.size, self.normalisation, self.padding, self.window, self.views)
        digest = hashlib.blake2b(repr((*about, self.scale.dtype)).encode())
        digest.update(self.pixels.contiguous().numpy().data)
        return digest.hexdigest()

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        random = view is not None and view != MIRRORED and self.augment
        if random:
            assert view is not None
            corner, flips = self._drawn(examples, view)
        else:
            corner = self.centre.expand(2, len(examples))
            flips = (self._flips(examples) & (view == MIRRORED and self.augment)).expand(len(examples))
        values = moved(self._cut(examples, corner, flips), device).to(self.scale.dtype)
        if values.shape[-1] != self.size or values.shape[-2] != self.size:
            values = F.interpolate(values, (self.size, self.size), mode="bicubic", antialias=True).clamp_(0, 255)
        if values.shape[1] == 1:
            values = values.expand(-1, 3, -1, -1).contiguous()
        if device not in self.constants:
            self.constants[device] = (self.scale.to(device), self.shift.to(device))
        scale, shift = self.constants[device]
        keys = ((examples * self.room[0] + corner[0]) * self.room[1] + corner[1]) * 2 + flips
        return Keyed({"pixel_values": values.mul_(scale).add_(shift)}, -1 - keys if random and not self.views else keys)

    def _drawn(self, examples: Tensor, view: int) -> tuple[Tensor, Tensor]:  # (2, examples) tops and lefts, (examples,)
        """Each picture's crop and flip are a hash of (view, example): the same in any batch."""
        if self.views:  # one of a few numbered views, which are the same in every run
            number = (uniform(view, examples, 1)[0] * self.views).long()
            chance = uniform(derive("views"), examples * self.views + number, 3)
        else:
            chance = uniform(view, examples, 3)
        return (chance[:2] * self.room).long(), self._flips(examples) & (chance[2] < 0.5)

    def _cut(self, examples: Tensor, corner: Tensor, flips: Tensor) -> Tensor:  # (examples, channels, height, width)
        """The views with these corners, (2, examples), of the padded pictures. Each picture is copied once, which is
        faster than padding, cutting and mirroring whole batches one after the other."""
        source, pad = self.pixels.numpy(), 0 if self.window else self.padding
        height, width = (self.window, self.window) if self.window else source.shape[2:]
        views = np.zeros((len(examples), source.shape[1], height, width), np.uint8)
        places = zip(examples.tolist(), *(corner - pad).tolist(), flips.tolist(), strict=True)
        for view, (example, top, left, flip) in zip(views, places, strict=True):
            # rows and columns of the view that lie in the picture, if any do
            high, first = max(0, -top), max(0, -left)
            low, last = max(high, min(height, source.shape[2] - top)), max(first, min(width, source.shape[3] - left))
            found = source[example, :, top + high : top + low, left + first : left + last]
            if flip:
                view[:, high:low, width - last : width - first] = found[:, :, ::-1]
            else:
                view[:, high:low, first:last] = found
        return torch.from_numpy(views)

    def _flips(self, examples: Tensor) -> Tensor:  # (examples,) or ()
        return self.flip[examples] if self.flip.ndim else self.flip

    # examples that a Learner keeps when the user's data are gone

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return {"pixels": self.pixels[examples].clone()}

    def prepend(self, kept: dict[str, Tensor]) -> None:
        if kept["pixels"].shape[1:] != self.pixels.shape[1:]:
            raise DataError(
                f"these pictures have shape {tuple(self.pixels.shape[1:])}, but the learned ones have "
                f"{tuple(kept['pixels'].shape[1:])}: resize them alike"
            )
        self.pixels = torch.cat([kept["pixels"], self.pixels])


class AreaCrops(Images):
    """Pictures whose random views are parts with a random area and shape, resized (Szegedy et al., Going Deeper with
    Convolutions, CVPR 2015): 5 to 100 % of the area, from a third higher to a third wider than square."""

    TRIES = 10  # a part that is too wide or too high is drawn again; then the central square is taken

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        if view is None or view == MIRRORED or not self.augment:
            return super().inputs(examples, view, device)
        parts = []
        for pixels, (top, left, height, width) in zip(
            self.pixels[examples].to(device), self.boxes(examples, view).tolist(), strict=True
        ):
            part = pixels[None, :, top : top + height, left : left + width].to(self.scale.dtype)
            parts.append(F.interpolate(part, (self.size, self.size), mode="bilinear", antialias=True))
        values = torch.cat(parts).expand(-1, 3, -1, -1)
        flips = moved(self._flips(examples) & (uniform(view, examples, 1)[0] < 0.5), device)
        values = torch.where(flips[:, None, None, None], values.flip(3), values)
        # without keys: no view repeats
        return {"pixel_values": values * self.scale.to(device) + self.shift.to(device)}

    def boxes(self, examples: Tensor, view: int) -> Tensor:  # (examples, 4): top, left, height, width
        """Each picture's part is a hash of (view, example): the same in any batch."""
        rows, columns = self.pixels.shape[2:]
        chance = uniform(view, examples, 3 + 2 * self.TRIES)  # the first decides the flip
        area = rows * columns * (0.05 + 0.95 * chance[3::2])  # (tries, examples)
        form = torch.exp(math.log(4 / 3) * (2 * chance[4::2] - 1))  # width over height, 3/4 to 4/3
        height, width = (side.round().long().clamp(min=1) for side in ((area / form).sqrt(), (area * form).sqrt()))
        square = torch.full_like(height[:1], min(rows, columns))
        height, width = torch.cat([height, square]), torch.cat([width, square])
        first = ((height <= rows) & (width <= columns)).long().argmax(0, keepdim=True)
        height, width = height.gather(0, first)[0], width.gather(0, first)[0]
        room = torch.stack([rows - height + 1, columns - width + 1])
        top, left = torch.where(first[0] == self.TRIES, (room - 1) // 2, (chance[1:3] * room).long())
        return torch.stack([top, left, height, width], 1)
