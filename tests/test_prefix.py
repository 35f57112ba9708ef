"""The cached outputs of frozen blocks for texts are the same numbers, computed once, in bounded memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from checks import assert_same, copying_at, final_state
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_encoders import DEPTH, TEXTS, WIDTH, save, tiny_inputs, tiny_model
from torch import Tensor, nn

import bace
from bace.config.schema import Backbone
from bace.data.modalities.text import Texts
from bace.models.encoder import freeze_prefix, keep_prefix
from bace.models.frozen_prefix import PrefixCache, PrefixCaches, TextCache
from bace.models.loading import load_encoder
from bace.models.text_encoder import TextEncoder

NO_TEXTS = Texts(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save(tiny_model(family), tmp_path_factory.mktemp(family)) for family in (*TEXTS, "vit")}


def keeping(folder: str, blocks: int = 2, megabytes: int = 1) -> TextEncoder:
    """An encoder with frozen blocks and an empty cache."""
    encoder = load_encoder(folder)
    assert isinstance(encoder, TextEncoder)
    freeze_prefix(encoder, blocks)
    encoder.cache = TextCache(blocks, megabytes * 1_000_000)
    return encoder


def texts(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 50, mask.shape, generator=torch.Generator().manual_seed(seed)).where(mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


def blocks_run(encoder: TextEncoder, inputs: dict[str, Tensor]) -> list[int]:
    """The number of texts that each block receives in one pass."""
    counts = [0] * DEPTH

    def count(block: int) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            counts[block] += len(args[0])

        return add

    hooks = [block.register_forward_pre_hook(count(i)) for i, block in enumerate(encoder.blocks)]
    with torch.no_grad():
        encoder(inputs)
    for hook in hooks:
        hook.remove()
    return counts


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.integers(1, DEPTH),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(0, 999),
)
def test_texts_read_the_same_with_and_without_a_cache(folders, family, blocks, lengths, seed):
    encoder, inputs = keeping(folders[family], blocks), texts(lengths, seed)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        first, second = encoder(inputs), encoder(inputs)
        encoder.cache = None
        torch.testing.assert_close(first[real], encoder(inputs)[real], rtol=0, atol=2e-5)
    assert torch.equal(first, second)


def test_gradients_of_the_blocks_above_are_those_without_a_cache(folders):
    encoder, inputs = keeping(folders["bert"]), texts([7, 3, 9])
    gradients = []
    for _ in range(2):
        encoder.zero_grad()
        encoder(inputs)[:, 0].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None})
        encoder.cache = None
    cached, plain = gradients
    assert cached.keys() == plain.keys()
    assert cached
    for name, gradient in cached.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5)


def test_frozen_blocks_read_a_text_once(folders):
    encoder = keeping(folders["bert"])
    assert blocks_run(encoder, texts([4, 6])) == [2, 2, 2]
    assert blocks_run(encoder, texts([4, 6])) == [0, 0, 2]
    assert blocks_run(copy.deepcopy(encoder), texts([4, 6])) == [0, 0, 2]  # a teacher shares the cache
    with encoder.uncached():
        assert blocks_run(encoder, texts([4, 6])) == [2, 2, 2]
    assert blocks_run(encoder, texts([4, 6])) == [0, 0, 2]


def test_what_is_found_counts_as_passed(folders):
    encoder, inputs = keeping(folders["bert"]), texts([4, 6])
    passes = []
    for _ in range(2):
        with torch.no_grad():
            encoder(inputs)
        passes.append(encoder.passes.total)
    assert passes == pytest.approx([2, 4])


def test_what_is_kept_of_a_text_does_not_depend_on_its_batch(folders):
    together, alone = keeping(folders["bert"]), keeping(folders["bert"])
    inputs = texts([5, 11, 8])
    with torch.no_grad():
        together(inputs)
        for i, length in ((2, 8), (0, 5), (1, 11)):
            alone({name: value[i : i + 1, :length] for name, value in inputs.items()})
    assert together.cache is not None
    assert alone.cache is not None
    assert together.cache.kept.keys() == alone.cache.kept.keys()
    assert all(torch.equal(alone.cache.kept[key], kept) for key, kept in together.cache.kept.items())


def test_a_text_read_in_a_test_can_be_trained_on(folders):
    encoder, inputs = keeping(folders["bert"]), texts([4, 6])
    with torch.inference_mode():
        encoder(inputs)
    encoder(inputs)[:, 0].sum().backward()
    assert all(p.grad is not None for p in encoder.blocks[2].parameters())


def test_types_of_tokens_are_part_of_a_text(folders):
    encoder = keeping(folders["bert"])
    inputs = {**texts([4]), "token_type_ids": torch.zeros(1, 4, dtype=torch.int64)}
    with torch.no_grad():
        one, other = encoder(inputs), encoder({**inputs, "token_type_ids": torch.ones(1, 4, dtype=torch.int64)})
    assert not torch.allclose(one, other, atol=1e-3)


def test_a_full_cache_keeps_no_more_and_stays_right(folders):
    encoder, inputs = keeping(folders["bert"]), texts([5, 5, 5])
    encoder.cache = TextCache(2, room=2 * 5 * WIDTH * 4)  # room for two of the three texts
    with torch.no_grad():
        full, again = encoder(inputs), encoder(inputs)
    assert len(encoder.cache.kept) == 2
    assert encoder.cache.room == 0
    assert torch.equal(full, again)
    assert blocks_run(encoder, inputs) == [1, 1, 3]  # the third is read again


def test_taps_and_word_vectors_pass_it_by(folders):
    encoder, inputs = keeping(folders["bert"]), tiny_inputs("bert")
    _, taps = encoder(inputs, taps=True)
    assert len(taps) == DEPTH
    encoder(encoder.relax(inputs))
    assert encoder.cache is not None
    assert not encoder.cache.kept


def test_encoders_with_the_same_frozen_weights_share_what_is_kept(folders):
    caches = PrefixCaches()

    def kept(family: str, blocks: int, precision: torch.dtype = torch.float32) -> PrefixCache | None:
        encoder = load_encoder(folders[family])
        assert isinstance(encoder, TextEncoder)
        freeze_prefix(encoder, blocks)
        keep_prefix(encoder, Backbone(cache=1), precision, caches, NO_TEXTS)
        return encoder.cache

    first = kept("bert", 2)
    assert first is not None
    assert kept("bert", 2) is first
    assert kept("bert", 1) is not first
    assert kept("roberta", 2) is not first
    assert kept("bert", 2, torch.bfloat16) is not kept("bert", 2)
    assert list(caches.newest.values()) == [kept("bert", 2)]  # earlier outputs are dropped


def test_encoders_of_another_shape_share_nothing(folders):
    caches, found = PrefixCaches(), []
    for heads in (1, 2):  # the same weights with another number of heads
        encoder = load_encoder(folders["bert"])
        assert isinstance(encoder, TextEncoder)
        encoder.config.num_attention_heads = heads
        freeze_prefix(encoder, 2)
        keep_prefix(encoder, Backbone(cache=1), torch.float32, caches, NO_TEXTS)
        found.append(encoder.cache)
    assert found[0] is not found[1]


def test_a_learner_keeps_nothing_of_its_texts(tiny):
    learner = bace.Learner("er", memory=10, backbone=tiny.bert, **{"backbone.freeze": 1, "backbone.cache": 10})
    learner.partial_fit(["w1 w2", "w3 w4", "w1 w5"], ["a", "b", "a"])
    assert learner.method is not None
    assert [module.cache for module in learner.method.modules() if isinstance(module, TextEncoder)] == [None]


def test_a_run_says_how_much_it_may_keep_of_texts(tiny):
    settings = tiny.settings("text", method="er", **{"backbone.freeze": 1, "backbone.cache": 10, "train.epochs": 1})
    told: list[str] = []
    bace.run(settings, tell=told.append)
    assert any("10.0 MB more for the cached outputs of frozen blocks (backbone.cache)" in line for line in told)


def test_runs_that_are_given_the_same_caches_compute_what_is_kept_once(tiny):
    settings = tiny.settings("text", method="er", **{"backbone.freeze": 1, "backbone.cache": 10, "train.epochs": 1})
    caches = PrefixCaches()
    bace.run(settings, caches=caches)
    (cache,) = caches.newest.values()
    first = dict(cache.kept)
    bace.run(settings, caches=caches, seed=1)
    assert first
    assert list(caches.newest.values()) == [cache]
    assert all(cache.kept[text] is kept for text, kept in first.items())
    other = PrefixCaches()
    bace.run(settings, caches=other)
    (anew,) = other.newest.values()
    assert anew.kept.keys() == first.keys()
    assert all(anew.kept[text] is not kept for text, kept in first.items())


def test_nothing_frozen_is_nothing_to_keep(folders):
    encoder = load_encoder(folders["bert"])
    assert isinstance(encoder, TextEncoder)
    keep_prefix(encoder, Backbone(cache=1), torch.float32, PrefixCaches(), NO_TEXTS)
    assert encoder.cache is None


@pytest.mark.usefixtures("double")  # in double precision, rounding changes no score
@pytest.mark.parametrize("modality", ["text", "token"])
@pytest.mark.parametrize("method", ["bace", "derpp"])
def test_a_run_with_a_cache_scores_as_without_and_resumes_exactly(tiny, tmp_path, modality, method):
    changes = {"method": method, "backbone.freeze": 1}
    plain = bace.run(tiny.settings(modality, **changes))
    points = [("step", 5), ("evaluate", 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", copying_at(points, tmp_path))
        cached = bace.run(tiny.settings(modality, **changes, **{"backbone.cache": 10}), out=tmp_path / "copied")
    assert cached.metrics["A"] == plain.metrics["A"]
    assert cached.metrics["passes"] == pytest.approx(plain.metrics["passes"])
    for kind, count in points:
        bace.run(resume=tmp_path / f"{kind}-{count}")
        assert_same(final_state(tmp_path / "copied"), final_state(tmp_path / f"{kind}-{count}"))
