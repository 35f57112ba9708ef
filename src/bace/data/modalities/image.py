"""Pictures: uint8 tensors in, normalised float batches out; crop, flip, resize on whole batches."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor

from bace.data import decode
from bace.data.batch import MIRRORED, View
from bace.data.decode import PictureOptions, Pictures, Size
from bace.data.files import Raw, in_memory
from bace.data.modality import Examples, Inputs, Modality, Table
from bace.data.settings import DataSettings
from bace.errors import ConfigError, DataError
from bace.randomness import uniform

THUMBNAIL = 64  # pixels of a side, at most


class Image(Modality):
    name, plural, encoder, own_data = "image", "images", "image", "my-images"
    input_names = decode.PICTURE_COLUMNS
    input_kinds = ("picture",)
    asked_kinds = ("string",)  # a column of paths
    picture_input = "pixel_values"

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        def cells(rows: Sequence[int]) -> Iterator[Any]:
            for row, (value,) in zip(rows, raw.values(columns, rows), strict=True):
                if isinstance(value, np.ndarray | Tensor):
                    pixels = decode.as_uint8(decode.channels_last(value[None]))[0]
                    yield PIL.Image.fromarray((pixels[..., 0] if pixels.shape[-1] == 1 else pixels).numpy())
                else:
                    yield decode.picture_of(value, raw.folder, raw.where(row))

        pictures = Pictures(cells, rows, raw.where)
        return decode.decode_pictures([pictures], *_settings(options)) if options.get("decode", True) else pictures

    def recognises(self, examples: Any) -> bool:
        if isinstance(examples, np.ndarray | Tensor):
            return examples.ndim in (3, 4)
        return all(isinstance(item, str) and Path(item).suffix.lower() in decode.IMAGE_SUFFIXES for item in examples)

    def from_array(self, array: Any, options: PictureOptions) -> Tensor:
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
        images = Images(
            pixels,
            size=encoder.image_size,
            mean=encoder.mean,
            std=encoder.std,
            augment=settings.augment,
            flip=settings.flip and flips(tables),
            padding=min(4, -(-stored // 8)),  # 4 for pictures of 28 and 32, less for smaller ones
            window=round(0.875 * stored) if stored >= 128 else None,  # 224 of 256
        )
        return images, [len(table) for table in tables]

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        pixels = kept.get("pixels", torch.zeros(0, 3, 1, 1, dtype=torch.uint8))
        return Images(pixels, size=pixels.shape[-1])

    def picture(self, data: Examples) -> tuple[int, int] | None:
        assert isinstance(data, Images)
        return data.pixels.shape[2], data.pixels.shape[3]

    def disturbed(self, inputs: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Turned by 180 degrees."""
        return {**inputs, "pixel_values": inputs["pixel_values"].rot90(2, (2, 3))}

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
        augment: random views in training (crop and, if `flip`, horizontal mirror); off: training sees clean pictures.
        flip: for all pictures, or for each (examples,).
        window: None: training views are cut out of the picture padded by `padding`, at its own size. A number: they
            are a random window of that side and the clean view is the central one (pictures stored larger).
    """

    modality: Modality = IMAGE
    row_start = positions = lengths = None  # a row an example, all of one size

    def __init__(
        self,
        pixels: Tensor,
        *,
        size: int,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        augment: bool = True,
        flip: bool | Tensor = True,
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
        self.augment, self.padding, self.window = augment, padding, window
        self.flip = torch.as_tensor(flip)
        # one multiplication and one addition: (x / 255 - mean) / std
        self.scale = 1.0 / (255.0 * torch.tensor(std)).view(1, 3, 1, 1)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.pixels)

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        pixels = self.pixels[examples].to(device)
        if view is None or view == MIRRORED or not self.augment:
            pixels = self._clean(pixels)
        else:
            pixels = self._random(pixels, examples, view)
        if view == MIRRORED and self.augment:
            pixels = self._mirror(pixels, self._flips(examples))
        values = pixels.to(self.scale.dtype)
        if values.shape[-1] != self.size or values.shape[-2] != self.size:
            values = F.interpolate(values, (self.size, self.size), mode="bicubic", antialias=True).clamp_(0, 255)
        if values.shape[1] == 1:
            values = values.expand(-1, 3, -1, -1).contiguous()
        return {"pixel_values": values.mul_(self.scale.to(device)).add_(self.shift.to(device))}

    def _clean(self, pixels: Tensor) -> Tensor:
        if self.window is None:
            return pixels
        top, left = ((side - self.window) // 2 for side in pixels.shape[2:])
        return pixels[:, :, top : top + self.window, left : left + self.window]

    def _random(self, pixels: Tensor, examples: Tensor, view: int) -> Tensor:
        """Each picture's crop and flip are a hash of (view, example): the same in any batch."""
        height, width = (self.window, self.window) if self.window else pixels.shape[2:]
        padded = pixels if self.window else F.pad(pixels, [self.padding] * 4)
        room = torch.tensor([[padded.shape[2] - height + 1], [padded.shape[3] - width + 1]])
        chance = uniform(view, examples, 3)
        top, left = (chance[:2] * room).long().to(pixels.device)
        # windows is a view (examples, channels, tops, lefts, height, width): picking one per picture copies only that
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        cut = windows[torch.arange(len(pixels), device=pixels.device), :, top, left]
        return self._mirror(cut, self._flips(examples) & (chance[2] < 0.5))

    def _flips(self, examples: Tensor) -> Tensor:  # (examples,) or ()
        return self.flip[examples] if self.flip.ndim else self.flip

    def _mirror(
        self, pixels: Tensor, which: Tensor
    ) -> Tensor:  # (examples, channels, height, width), (examples,) or ()
        if not which.any():
            return pixels
        return torch.where(which.to(pixels.device).view(-1, 1, 1, 1), pixels.flip(3), pixels)

    # what Learner keeps when the user's data is gone

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return {"pixels": self.pixels[examples].clone()}

    def prepend(self, kept: dict[str, Tensor]) -> None:
        if kept["pixels"].shape[1:] != self.pixels.shape[1:]:
            raise DataError(
                f"these pictures have shape {tuple(self.pixels.shape[1:])}, the ones learned before "
                f"{tuple(kept['pixels'].shape[1:])}: resize them alike"
            )
        self.pixels = torch.cat([kept["pixels"], self.pixels])
