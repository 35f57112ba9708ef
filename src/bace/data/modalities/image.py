"""Pictures: uint8 tensors in, normalised float batches out; crop, flip, resize on whole batches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.data.batch import MIRRORED, Modality, View
from bace.errors import DataError
from bace.randomness import uniform


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

    modality: Modality = "image"
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
