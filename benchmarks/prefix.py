"""The gain of the cache of frozen blocks, for ER on ViT-Tiny at 112 pixels with 8 of 12 blocks frozen and clean views.

The first epoch fills the cache. The later epochs are compared with the same epochs without a cache.
"""

import torch
from common import Bar, begun, least, pictures, second_epoch, small_vit, step_times
from torch import Tensor

from bace.config.schema import Backbone, Training
from bace.data.modalities.image import Images
from bace.models.encoder import freeze_prefix, keep_prefix
from bace.models.frozen_prefix import PrefixCaches
from bace.models.heads import CosineHead
from bace.models.model import Model


def epoch(pixels: Tensor, shape: dict[str, int], frozen: int, batch: int, caches: PrefixCaches | None) -> list[float]:
    """The seconds of each step of a second task's epoch."""
    encoder = small_vit(**shape)
    freeze_prefix(encoder, frozen)
    data = Images(pixels, size=shape["side"], augment=False)
    if caches is not None:
        keep_prefix(encoder, Backbone(cache=4000), torch.float32, caches, data)
    training = Training(epochs=1, batch_size=batch, threads=1)
    return step_times(second_epoch(*begun("ER", data, Model(encoder, CosineHead(encoder.width)), training, batch)))


def bars(tiny: bool) -> dict[str, Bar]:
    shape = (
        {"width": 32, "depth": 3, "side": 32, "patch": 16}
        if tiny
        else {"width": 192, "depth": 12, "side": 112, "patch": 16}
    )
    frozen, examples, batch, repeat = (2, 64, 16, 1) if tiny else (8, 512, 64, 3)
    pixels, _ = pictures(2 * examples, shape["side"])
    caches = PrefixCaches()
    epoch(pixels, shape, frozen, batch, caches)  # fills the cache
    with_cache, without = [], []
    for _ in range(repeat):
        with_cache.append(epoch(pixels, shape, frozen, batch, caches))
        without.append(epoch(pixels, shape, frozen, batch, None))
    return {
        "epoch of ER without the prefix cache over one with it": Bar(
            least(without) / least(with_cache), 2.5, least=True
        )
    }
