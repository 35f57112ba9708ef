"""Random views of pictures are pure functions of (key, example); clean views are resized and normalised."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Tensor

from bace.data.batch import MIRRORED
from bace.data.modalities.image import Images
from bace.errors import DataError
from bace.randomness import derive, uniform

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(count: int, channels: int = 3, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), generator=rng).to(torch.uint8)


def view(images: Images, examples: list[int], key: int | None) -> Tensor:
    return images.inputs(torch.tensor(examples), key, CPU)["pixel_values"]


def normalised(pixels: np.ndarray) -> np.ndarray:  # (channels, height, width) in 0..255
    pixels = np.repeat(pixels, 3 // len(pixels), axis=0).astype(np.float64) / 255
    return (pixels - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]


def oracle(pixels: Tensor, example: int, key: int, *, padding: int, window: int | None, flip: bool) -> np.ndarray:
    """Slice one picture at a time: lane 0 gives the top, lane 1 the left, and lane 2 decides whether it is mirrored."""
    picture = pixels[example].numpy()
    height, width = (window, window) if window else picture.shape[1:]
    if window is None:
        picture = np.pad(picture, ((0, 0), (padding, padding), (padding, padding)))
    down, right, mirror = uniform(key, torch.tensor([example]), 3)[:, 0].tolist()
    top = int(down * (picture.shape[1] - height + 1))
    left = int(right * (picture.shape[2] - width + 1))
    picture = picture[:, top : top + height, left : left + width]
    return normalised(picture[:, :, ::-1] if flip and mirror < 0.5 else picture)


@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    padding=st.integers(0, 4),
    window=st.one_of(st.none(), st.integers(1, 3)),
    flip=st.booleans(),
    key=st.integers(0, 2**63 - 1),
)
@settings(max_examples=80, deadline=None)
def test_crop_and_flip_equal_slicing_one_picture_at_a_time(channels, height, width, padding, window, flip, key):
    if window is None:
        height = width  # avoids resizing
    pixels = pictures(6, channels, height, width)
    images = Images(pixels, size=window or width, mean=MEAN, std=STD, flip=flip, padding=padding, window=window)
    got = view(images, [5, 0, 3, 3], key).numpy()
    for row, example in zip(got, [5, 0, 3, 3], strict=True):
        expected = oracle(pixels, example, key, padding=padding, window=window, flip=flip)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@given(st.lists(st.integers(0, 19), min_size=1, max_size=20), st.integers(0, 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_a_view_is_the_same_in_any_batch(examples, key):
    images = Images(pictures(20), size=8)
    together = view(images, examples, key)
    alone = torch.cat([view(images, [example], key) for example in examples])
    assert torch.equal(together, alone)


def test_a_view_is_the_same_in_any_batch_when_resized_too():
    images = Images(pictures(20), size=20)
    everything = view(images, list(range(20)), 5)
    torch.testing.assert_close(view(images, [7, 3], 5), everything[[7, 3]])


def test_another_key_gives_other_views():
    images = Images(pictures(50), size=8)
    keys = [derive(0, "view", 0, "main", epoch, 0, 0) for epoch in range(4)]
    views = [view(images, list(range(50)), key) for key in keys]
    for i in range(4):
        for j in range(i):
            same = [torch.equal(a, b) for a, b in zip(views[i], views[j], strict=True)]
            assert sum(same) < 10  # 1 in 162 by chance: 9 x 9 offsets, mirrored or not
    assert torch.equal(view(images, list(range(50)), keys[0]), views[0])


def test_offsets_and_mirrors_are_uniform():
    """A picture with distinct pixels shows where its view was cut; the test is chi-square over 20,000 views."""
    count, padding = 20_000, 2
    one = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    images = Images(one.expand(count, 1, 4, 4), size=4, mean=(0, 0, 0), std=(1, 1, 1), padding=padding)
    got = (view(images, list(range(count)), 77)[:, 0] * 255).round().int().numpy()
    padded = np.pad(one[0, 0].numpy(), padding).astype(np.int32)
    cuts = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            cut = padded[top : top + 4, left : left + 4]
            for mirrored in (False, True):
                cuts[(cut[:, ::-1] if mirrored else cut).tobytes()] = (top, left, mirrored)
    assert len(cuts) == 50
    found = [cuts[np.ascontiguousarray(picture).tobytes()] for picture in got]
    frequency = np.array([found.count(place) for place in set(cuts.values())])
    assert stats.chisquare(frequency).pvalue > 1e-3


def test_window_mode_cuts_at_random_in_training_and_in_the_middle_otherwise():
    pixels = pictures(4, 3, 10, 13)
    images = Images(pixels, size=6, mean=MEAN, std=STD, window=6)
    clean = view(images, [2], None)[0].numpy()
    np.testing.assert_allclose(clean, normalised(pixels[2, :, 2:8, 3:9].numpy()), atol=1e-5)
    corners = {tuple(view(images, [2], key)[0].flatten().tolist()) for key in range(300)}
    assert len(corners) > 60  # out of 5 x 8 places, mirrored or not
    with pytest.raises(DataError, match=r"window 11 is larger than the pictures, \(10, 13\)"):
        Images(pixels, size=6, window=11)


def test_a_window_as_large_as_the_picture_is_the_picture():
    pixels = pictures(2)
    images = Images(pixels, size=8, mean=MEAN, std=STD, window=8, flip=False)
    assert torch.equal(view(images, [0, 1], 9), view(images, [0, 1], None))


# -- the clean view


@pytest.mark.parametrize(("side", "size"), [(8, 8), (8, 20), (32, 224), (28, 14), (30, 17)])
def test_the_clean_view_is_resized_bicubically_and_normalised(side, size):
    """The oracle is PIL's antialiased bicubic on float pictures, which neither rounds nor clips on the way."""
    pixels = pictures(2, 3, side, side, seed=3)
    got = view(Images(pixels, size=size, mean=MEAN, std=STD), [1, 0], None)
    assert got.shape == (2, 3, size, size)
    assert got.dtype == torch.float32
    for row, example in zip(got, (1, 0), strict=True):
        channels = [Image.fromarray(channel.float().numpy()) for channel in pixels[example]]  # mode F
        resized = [np.asarray(c.resize((size, size), Image.Resampling.BICUBIC)) for c in channels]
        np.testing.assert_allclose(row.numpy(), normalised(np.stack(resized).clip(0, 255)), atol=1e-4)


def test_resizing_never_leaves_the_range_of_pixels():
    checker = (torch.arange(64).view(8, 8) + torch.arange(8)[:, None]) % 2 * 255
    images = Images(checker.to(torch.uint8).view(1, 1, 8, 8), size=27, mean=(0, 0, 0), std=(1, 1, 1))
    got = view(images, [0], None)
    assert got.min() >= 0
    assert got.max() == 1  # without clipping it would overshoot


def test_pictures_that_are_not_square_become_square():
    assert view(Images(pictures(2, 3, 6, 9), size=12), [0, 1], None).shape == (2, 3, 12, 12)
    assert view(Images(pictures(2, 3, 6, 9), size=12), [0, 1], 3).shape == (2, 3, 12, 12)


def test_without_augmentation_every_view_is_the_clean_one():
    images = Images(pictures(5), size=8, augment=False)
    assert torch.equal(view(images, [1, 2], 17), view(images, [1, 2], None))


@pytest.mark.parametrize("key", [None, 4])
def test_grey_is_repeated_to_three_channels(key):
    grey = pictures(3, 1)
    got = view(Images(grey, size=12, mean=MEAN, std=STD), [0, 2], key)
    expected = view(Images(grey.repeat(1, 3, 1, 1), size=12, mean=MEAN, std=STD), [0, 2], key)
    assert got.shape == (2, 3, 12, 12)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "pixels",
    [torch.zeros(2, 2, 4, 4, dtype=torch.uint8), torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.uint8)],
)
def test_other_pictures_are_refused_with_their_shape(pixels):
    with pytest.raises(DataError, match="expected uint8 of shape") as error:
        Images(pixels, size=4)
    assert str(tuple(pixels.shape)) in str(error.value)


@pytest.mark.parametrize("size", [8, 20])
def test_the_pictures_are_never_changed(size):
    pixels = pictures(6)
    before = pixels.clone()
    images = Images(pixels, size=size)
    for key in (None, 1, 2):
        view(images, [0, 1, 2, 3, 4, 5], key).add_(100).zero_()
    images.take(torch.tensor([1]))["pixels"].zero_()
    assert torch.equal(pixels, before)


def test_taken_pictures_come_first_when_they_are_prepended():
    old, new = Images(pictures(5, seed=1), size=8), Images(pictures(3, seed=2), size=8)
    kept = old.take(torch.tensor([4, 0]))
    expected = [view(old, [4, 0], None), view(new, [0, 1, 2], None)]
    new.prepend(kept)
    assert len(new) == 5
    assert torch.equal(view(new, [0, 1, 2, 3, 4], None), torch.cat(expected))
    with pytest.raises(DataError, match="resize them alike"):
        Images(pictures(1, 3, 9, 9), size=8).prepend(kept)


@pytest.mark.parametrize("window", [None, 5])
def test_the_mirrored_view_is_the_clean_one_left_to_right_where_training_mirrors(window):
    pixels = pictures(3)
    for augment, flip in ((True, True), (True, False), (False, True)):
        images = Images(pixels, size=8 if window is None else 5, augment=augment, flip=flip, window=window)
        clean = view(images, [0, 1, 2], None)
        expected = torch.tensor(clean.numpy()[..., ::-1].copy()) if augment and flip else clean
        assert torch.equal(view(images, [0, 1, 2], MIRRORED), expected)
