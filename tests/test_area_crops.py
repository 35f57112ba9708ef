"""Random views of random area and aspect ratio (`benchmark.crop = area`)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import bace
from bace.data.batch import MIRRORED
from bace.data.modalities.image import AreaCrops, Images

CPU = torch.device("cpu")


def images(kind: type[Images], count: int = 400, height: int = 32, width: int = 32, **options: Any) -> Any:
    pixels = torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(0))
    return kind(pixels.to(torch.uint8), size=16, **options)


def test_parts_have_areas_forms_and_places_of_the_whole_range_and_lie_in_the_picture() -> None:
    top, left, height, width = images(AreaCrops, 4000, 64, 64).boxes(torch.arange(4000), 7).T
    assert int(top.min()) == int(left.min()) == 0
    assert int((top + height).max()) == int((left + width).max()) == 64
    share = (height * width) / 64**2
    assert float(share.min()) == pytest.approx(0.05, abs=0.01)
    assert float(share.max()) > 0.95
    # uniform from 5 to 100 %; some large parts do not fit and are drawn again, which lowers the mean a little
    assert 0.45 < float(share.mean()) < 0.525
    form = (width / height)[share > 0.2].log()
    assert float(form.abs().max()) == pytest.approx(torch.tensor(4 / 3).log().item(), abs=0.06)
    assert float(form.mean()) == pytest.approx(0, abs=0.02)
    small = share < 0.3
    assert float(((top + height / 2)[small] / 64).mean()) == pytest.approx(0.5, abs=0.03)


def test_a_picture_that_no_part_fits_shows_its_central_square() -> None:
    top, left, height, width = images(AreaCrops, 400, 4, 400).boxes(torch.arange(400), 7).T
    central = (height == 4) & (width == 4) & (top == 0) & (left == 198)
    assert int(central.sum()) > 100  # parts of 5 % and more have 80 pixels, and few of them are four wide
    assert ((top + height <= 4) & (left + width <= 400)).all()


def test_a_view_is_the_part_resized_and_mirrored_half_of_the_time() -> None:
    data = images(AreaCrops, mean=(0.0,) * 3, std=(1.0,) * 3)
    examples = torch.arange(400)
    seen = data.inputs(examples, 7, CPU)["pixel_values"]
    mirrored = 0
    for i, (top, left, height, width) in enumerate(data.boxes(examples, 7).tolist()):
        part = data.pixels[i : i + 1, :, top : top + height, left : left + width].float()
        expected = F.interpolate(part, (16, 16), mode="bilinear", antialias=True)[0] / 255
        plain = torch.allclose(seen[i], expected, atol=1e-5)
        mirrored += not plain
        assert plain or torch.allclose(seen[i], expected.flip(2), atol=1e-5)
    assert 150 < mirrored < 250
    assert float(seen.min()) >= 0
    assert float(seen.max()) <= 1


def test_a_view_does_not_depend_on_the_batch_and_another_draw_is_another_view() -> None:
    data = images(AreaCrops)
    together = data.inputs(torch.arange(10), 7, CPU)["pixel_values"]
    assert torch.equal(data.inputs(torch.tensor([6]), 7, CPU)["pixel_values"][0], together[6])
    assert not torch.equal(data.inputs(torch.arange(10), 8, CPU)["pixel_values"], together)


def test_clean_and_mirrored_views_are_the_central_window_as_of_other_crops() -> None:
    area, window = (images(kind, window=28) for kind in (AreaCrops, Images))
    examples = torch.arange(5)
    for view in (None, MIRRORED):
        of_area, of_window = (data.inputs(examples, view, CPU)["pixel_values"] for data in (area, window))
        assert torch.equal(of_area, of_window)
    still = images(AreaCrops, window=28, augment=False)
    assert torch.equal(still.inputs(examples, 7, CPU)["pixel_values"], area.inputs(examples, None, CPU)["pixel_values"])


def test_a_run_takes_the_crops_and_small_pictures_then_show_their_centre(tiny: Any, tmp_path: Any) -> None:
    changes = {"method": "ER", "benchmark.crop": "area", "measure.fwt": False}
    run = bace.run(tiny.settings("image", **changes), out=tmp_path / "run")
    again = bace.run(tiny.settings("image", **changes))
    assert run.matrix == again.matrix
    assert run.matrix != bace.run(tiny.settings("image", method="ER", **{"measure.fwt": False})).matrix
