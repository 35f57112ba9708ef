"""The cached outputs of frozen blocks for pictures are the same numbers, computed once for each repeated view."""

import copy
import json

import pytest
import torch
from checks import assert_same, copying_at, final_state
from tiny_encoders import DEPTH, IMAGES, PATCH, SIZE, WIDTH, save, tiny_model
from torch import Tensor

import bace
from bace.data.batch import MIRRORED, Batch, Keyed
from bace.data.modalities.image import Images
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.frozen_prefix import PictureCache, PrefixCaches
from bace.models.loading import load_encoder

CPU = torch.device("cpu")
BYTES = ((SIZE // PATCH) ** 2 + 1) * WIDTH * 4  # bytes kept for one image by a ViT


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save(tiny_model(family), tmp_path_factory.mktemp(family)) for family in IMAGES}


def keeping(folder: str, fixed: int = 9, passing: int = 0, half: bool = False, **options: int) -> Encoder:
    """An encoder with two frozen blocks and an empty cache."""
    encoder = load_encoder(folder)
    freeze_prefix(encoder, 2)
    room = options.pop("room", 1_000_000)
    encoder.cache = PictureCache(2, room, half, fixed, passing, **options)
    return encoder


def some(count: int = 6, **options: object) -> Images:
    pixels = torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0))
    return Images(pixels.to(torch.uint8), size=SIZE, **options)


def shown(data: Images, examples: list[int], view: int | None = None) -> dict[str, Tensor]:
    return data.inputs(torch.tensor(examples), view, CPU)


def pictures_run(encoder: Encoder, inputs: dict[str, Tensor]) -> list[int]:
    """The number of pictures that each block receives in one pass."""
    counts = [0] * DEPTH

    def count(block: int, pictures: int) -> None:
        counts[block] += pictures

    hooks = [
        block.register_forward_pre_hook(lambda _, args, i=i: count(i, len(args[0])))
        for i, block in enumerate(encoder.blocks)
    ]
    with torch.no_grad():
        encoder(inputs)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("family", IMAGES)
def test_pictures_read_the_same_with_and_without_a_cache(folders, family):
    encoder, data = keeping(folders[family]), some()
    with torch.no_grad():
        first, second = encoder(shown(data, [4, 1, 4, 0])), encoder(shown(data, [4, 1, 4, 0]))
        mixed = encoder(shown(data, [2, 0, 3]))  # one is cached, two are not
        torch.testing.assert_close(first[0], first[2], rtol=0, atol=2e-5)  # a batch rounds by position
        torch.testing.assert_close(mixed[1], first[3], rtol=0, atol=2e-5)
        encoder.cache = None
        torch.testing.assert_close(first, encoder(shown(data, [4, 1, 4, 0])), rtol=0, atol=2e-5)
        torch.testing.assert_close(mixed, encoder(shown(data, [2, 0, 3])), rtol=0, atol=2e-5)
    assert torch.equal(first, second)


def test_gradients_of_the_blocks_above_are_those_without_a_cache(folders):
    encoder, data = keeping(folders["vit"]), some()
    gradients = []
    with torch.inference_mode():
        encoder(shown(data, [3]))  # training uses what a test computed
    for _ in range(2):
        encoder.zero_grad()
        encoder(shown(data, [0, 3, 5]))[:, 0].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None})
        encoder.cache = None
    cached, plain = gradients
    assert cached.keys() == plain.keys()
    assert cached
    for name, gradient in cached.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5)


def test_frozen_blocks_read_a_picture_once(folders):
    encoder, data = keeping(folders["vit"]), some()
    assert pictures_run(encoder, shown(data, [0, 2, 2])) == [2, 2, 3]  # a repeated image is passed once
    assert pictures_run(encoder, shown(data, [0, 2])) == [0, 0, 2]
    assert pictures_run(copy.deepcopy(encoder), shown(data, [2, 3])) == [1, 1, 2]  # a teacher shares the cache
    with encoder.uncached():
        assert pictures_run(encoder, shown(data, [0, 2])) == [2, 2, 2]


def test_what_is_kept_of_a_picture_does_not_depend_on_its_batch(folders):
    together, alone, data = keeping(folders["vit"]), keeping(folders["vit"]), some()
    with torch.no_grad():
        both = together(shown(data, [0, 1, 2]))
        for i in (2, 0, 1):
            alone(shown(data, [i]))
        assert torch.equal(both, alone(shown(data, [0, 1, 2])))


def test_changed_pictures_are_never_found(folders):
    encoder, data = keeping(folders["vit"]), some()
    inputs = shown(data, [0, 1])
    encoder(inputs)
    turned = {**inputs, "pixel_values": inputs["pixel_values"].rot90(2, (2, 3))}
    assert pictures_run(encoder, turned) == [2, 2, 2]


def test_taps_pass_it_by(folders):
    encoder, data = keeping(folders["vit"]), some()
    assert len(encoder(shown(data, [0, 1]), taps=True)[1]) == DEPTH
    assert isinstance(encoder.cache, PictureCache)
    assert not encoder.cache.slots


def test_picked_and_joined_batches_keep_their_keys():
    data = some()

    def batch(examples: list[int], view: int | None) -> Batch:
        ids = torch.tensor(examples)
        return Batch(data.inputs(ids, view, CPU), ids, ids, ids)

    both = Batch.cat(batch([0, 1], None), batch([2, 3], 7))
    picked = both.pick(torch.tensor([3, 1]))
    assert isinstance(both.inputs, Keyed)
    assert isinstance(picked.inputs, Keyed)
    expected = [*keys(data, [0, 1]), *keys(data, [2, 3], 7)]
    assert both.inputs.keys_of_examples.tolist() == expected
    assert picked.inputs.keys_of_examples.tolist() == [expected[3], expected[1]]


def keys(data: Images, examples: list[int], view: int | None = None) -> list[int]:
    inputs = shown(data, examples, view)
    assert isinstance(inputs, Keyed)
    return inputs.keys_of_examples.tolist()


@pytest.mark.parametrize("options", [{}, {"window": 28}, {"views": 3}, {"flip": False, "padding": 2}])
def test_equal_keys_are_equal_pictures_and_no_others(options):
    data = some(**options)
    seen: dict[int, Tensor] = {}
    for view in (None, MIRRORED, *range(60)):
        inputs = shown(data, [0, 5], view)
        for key, picture in zip(keys(data, [0, 5], view), inputs["pixel_values"], strict=True):
            assert torch.equal(seen.setdefault(key, picture), picture)
    fixed = [picture for key, picture in seen.items() if key >= 0]
    assert all(not torch.equal(a, b) for i, a in enumerate(fixed) for b in fixed[:i])


def test_random_views_are_counted_and_the_same_in_every_epoch_and_run():
    data = some(views=3)
    views = [keys(data, [0, 1], view) for view in range(100)]
    assert [len(set(column)) for column in zip(*views, strict=True)] == [3, 3]
    chosen = [column[0] for column in views]
    assert all(20 < chosen.count(key) < 47 for key in set(chosen))  # each is drawn about equally often
    assert set(keys(some(), [0, 1], 5)).isdisjoint(chosen)  # without a number, views do not repeat
    assert all(key < 0 for key in keys(some(), [0, 1], 5))


def test_without_augmentation_every_view_is_the_clean_one():
    data = some(augment=False)
    assert keys(data, [0, 1], 5) == keys(data, [0, 1])
    assert data.repeated == 1


def test_random_views_replace_random_views_and_never_clean_ones(folders):
    encoder, data = keeping(folders["vit"], fixed=2, passing=2), some()
    assert pictures_run(encoder, shown(data, [0, 1])) == [2, 2, 2]
    for view in range(5):
        pictures_run(encoder, shown(data, [3, 4], view))
    assert pictures_run(encoder, shown(data, [3, 4], 4)) == [0, 0, 2]  # the newest
    assert pictures_run(encoder, shown(data, [3, 4], 3)) == [2, 2, 2]
    assert pictures_run(encoder, shown(data, [0, 1])) == [0, 0, 2]
    assert isinstance(encoder.cache, PictureCache)
    assert len(encoder.cache.slots) == 4


def test_a_full_cache_keeps_no_more_and_stays_right(folders):
    encoder, data = keeping(folders["vit"], room=2 * BYTES + 1, passing=9), some()
    with torch.no_grad():
        full, again = encoder(shown(data, [0, 1, 2])), encoder(shown(data, [0, 1, 2]))
    assert torch.equal(full, again)
    assert pictures_run(encoder, shown(data, [0, 1, 2])) == [1, 1, 3]
    assert encoder.cache is not None
    assert encoder.cache.memory_wanted() == 0


def test_above_a_size_what_is_kept_is_in_a_file_that_vanishes(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("BACE_CACHE", str(tmp_path))
    mapped, plain, data = keeping(folders["vit"], in_memory=0), keeping(folders["vit"]), some()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(mapped(shown(data, [0, 1])), plain(shown(data, [0, 1])))
    assert mapped.cache is not None
    assert mapped.cache.memory_wanted() == 0
    assert list(tmp_path.iterdir()) == []


def test_half_precision_takes_half_the_room_and_rounds_what_is_computed_too(folders):
    half, plain, data = keeping(folders["vit"], half=True), keeping(folders["vit"]), some()
    with torch.no_grad():
        first, second = half(shown(data, [0, 1])), half(shown(data, [0, 1]))
        torch.testing.assert_close(first, plain(shown(data, [0, 1])), rtol=0, atol=0.02)
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert isinstance(half.cache, PictureCache)
    assert half.cache.kept is not None
    assert half.cache.kept.dtype == torch.float16


def test_an_accelerator_passes_pictures_in_parts_of_one_size(folders, monkeypatch):
    encoder, data = keeping(folders["vit"]), some(5)
    assert isinstance(encoder.cache, PictureCache)
    monkeypatch.setattr("bace.models.frozen_prefix.AT_ONCE", 2)
    sizes = []

    def compute(inputs: dict[str, Tensor]) -> Tensor:
        sizes.append(len(inputs["pixel_values"]))
        return inputs["pixel_values"].mean((2, 3))[:, None]  # (pictures, 1, 3)

    class Elsewhere(torch.Tensor):
        """Pictures that claim not to be on the CPU."""

        device = torch.device("meta")  # type: ignore[assignment]

    pixels = shown(data, [0, 1, 2, 3, 4])["pixel_values"]
    new = encoder.cache._computed(pixels.as_subclass(Elsewhere), [4, 0, 2], compute)
    assert sizes == [2, 2]  # the last batch is filled up
    torch.testing.assert_close(new.as_subclass(torch.Tensor), pixels[[4, 0, 2]].mean((2, 3))[:, None])


CACHED = {"backbone.freeze": 1, "backbone.cache": 10}


def test_runs_of_a_comparison_share_what_is_kept_unless_the_pictures_differ(tiny):
    settings = tiny.settings("image", method="er", **CACHED, **{"train.epochs": 1, "benchmark.augment": False})
    caches = PrefixCaches()
    bace.run(settings, caches=caches)
    (cache,) = caches.newest.values()
    assert isinstance(cache, PictureCache)
    taken = cache.fixed_taken
    bace.run(settings, caches=caches, seed=1)
    bace.run(settings | {"method": "bace"}, caches=caches)
    assert list(caches.newest.values()) == [cache]
    assert cache.fixed_taken == taken == 5 * 16  # every picture once
    bace.run(settings | {"benchmark.class_order": ["eel", "ant", "bee", "cat", "dog"]}, caches=caches)
    assert list(caches.newest.values()) != [cache]


def losses(folder) -> list[float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "epoch"]


@pytest.mark.parametrize("views", [{"benchmark.augment": False}, {"benchmark.views": 2}, {}])
@pytest.mark.parametrize("method", ["er", "bace"])
def test_a_run_has_the_losses_of_one_without_a_cache_and_resumes_exactly(tiny, tmp_path, method, views):
    changes = {"method": method, "backbone.freeze": 1, **views}
    plain = bace.run(tiny.settings("image", **changes), out=tmp_path / "plain")
    points = [("step", 5), ("evaluate", 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", copying_at(points, tmp_path))
        cached = bace.run(tiny.settings("image", **{**changes, **CACHED}), out=tmp_path / "copied")
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "copied")), torch.tensor(losses(tmp_path / "plain")), rtol=1e-6, atol=1e-6
    )
    assert cached.metrics["passes"] == pytest.approx(plain.metrics["passes"])
    for kind, count in points:
        bace.run(resume=tmp_path / f"{kind}-{count}")
        assert_same(final_state(tmp_path / "copied"), final_state(tmp_path / f"{kind}-{count}"))
