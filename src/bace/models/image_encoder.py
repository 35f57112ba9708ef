"""The base class of encoders of pictures."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bace.errors import ConfigError, DataError
from bace.models.encoder import Encoder

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageEncoder(Encoder):
    """An encoder of pictures: `pixel_values` (examples, channels, height, width), normalised, float.

    Attributes:
        channels, patch: the inputs that it takes; both sides of a picture must be multiples of `patch`.
        channels_last: the channels of a pixel are adjacent in memory.
        image_size: the preferred side of pictures. Other sizes work, too: positions are interpolated.
        mean, std: the numbers that normalise pixels in [0, 1], one per channel.
    """

    modality = "image"
    movable = "pixel_values"
    norm_at = "layernorm"
    attention_end = "attention.o_proj"
    mlp_end = "mlp.fc2"
    mlp_branch = ("layernorm_after", "mlp")
    query_and_value = ("attention.q_proj", "attention.v_proj")
    key = "attention.k_proj"
    attention_norm = "layernorm_before"
    takes_prefixes = True
    channels_last = False
    default_mean: ClassVar[tuple[float, ...]] = IMAGENET_MEAN
    default_std: ClassVar[tuple[float, ...]] = IMAGENET_STD

    def __init__(
        self, model: nn.Module, preprocessing: dict[str, Any] | None = None, image_size: int | None = None
    ) -> None:
        """`preprocessing` is the content of a preprocessor_config.json."""
        super().__init__(model)
        self.channels: int = self.config.num_channels
        self.patch: int = self.config.patch_size
        preprocessing = preprocessing or {}
        # DINOv2's table is for 518 pixels, but its pictures are cropped to 224, so the preprocessing decides.
        crop = preprocessing.get("crop_size") if preprocessing.get("do_center_crop", True) else None
        if isinstance(crop, dict):
            crop = crop.get("height")
        self.image_size: int = (crop or self.config.image_size) if image_size is None else image_size
        if self.image_size < 1 or self.image_size % self.patch:
            raise ConfigError(f"image size {self.image_size} is not a multiple of the backbone's patch, {self.patch}.")
        normalised = preprocessing.get("do_normalize", True)
        self.mean = self._per_channel(preprocessing, "image_mean", self.default_mean if normalised else (0.0,) * 3)
        self.std = self._per_channel(preprocessing, "image_std", self.default_std if normalised else (1.0,) * 3)

    def _per_channel(self, preprocessing: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        found = preprocessing.get(key) if preprocessing.get("do_normalize", True) else None
        numbers = default[: self.channels] if found is None else found
        if not isinstance(numbers, list | tuple) or len(numbers) != self.channels:
            raise DataError(
                f"the backbone takes {self.channels} channels, but its {key} is {numbers!r}. "
                f"Give {self.channels} numbers as {key} in its preprocessor_config.json."
            )
        return tuple(float(number) for number in numbers)

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), None
        pixels = inputs["pixel_values"]
        channels, height, width = pixels.shape[1:]
        if channels != self.channels or height % self.patch or width % self.patch:
            raise DataError(
                f"pictures of {channels} x {height} x {width} do not fit the backbone: it takes {self.channels} "
                f"channels and sides that are multiples of {self.patch}."
            )
        if self.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return self._embed(pixels), None

    def patch_map(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        inputs: dict[str, Tensor],
    ) -> Tensor:  # (examples, width, height, width of the grid)
        """The patches in their places, without the tokens before them (class token, distillation token)."""
        height, width = (side // self.patch for side in inputs["pixel_values"].shape[2:])
        return hidden[:, -height * width :].transpose(1, 2).reshape(len(hidden), -1, height, width)

    def clamp(self, moved: Tensor) -> Tensor:  # (examples, channels, height, width)
        mean, std = (moved.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return moved.clamp(-mean / std, (1 - mean) / std)  # pixels are in [0, 1] before they are normalised

    def example(self) -> dict[str, Tensor]:
        return {"pixel_values": torch.zeros(1, self.channels, self.image_size, self.image_size)}

    def reads(self) -> dict[str, str]:
        mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in (self.mean, self.std))
        side = self.image_size
        return {
            "input": f"pictures of {side} x {side}, {self.channels} channels, in patches of {self.patch}",
            "normalisation": f"mean {mean}; std {std}",
        }

    def _embed(self, pixels: Tensor) -> Tensor:
        # At the table's own size this is the table itself.
        return cast(Tensor, self.embeddings(pixels, interpolate_pos_encoding=True))
