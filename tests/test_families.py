"""Every family of encoders learns, including the special features of CLIP, DeBERTa and sentence-transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_encoders import FAMILIES, IMAGES, TEXTS, WIDTH, save, tiny_inputs, tiny_model
from torch import Tensor

import bace
from bace.config.parse import config_from
from bace.errors import ConfigError, DataError
from bace.experiments.assemble import load_backbone
from bace.experiments.run_folder import read_description
from bace.models.image_encoder import ImageEncoder
from bace.models.loading import describe_backbone, load_encoder
from bace.models.text_encoder import TextEncoder


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


# -- runs


@pytest.fixture(scope="module")
def folders(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of each family; text families have the tokenizer of conftest.py."""
    found = {}
    calm = dict.fromkeys(("hidden_dropout_prob", "attention_dropout", "mlp_dropout", "dropout"), 0.1)
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        save(tiny_model(family, **calm, **({"vocab_size": 70} if family in TEXTS else {})), folder)
        for name in ("tokenizer.json", "tokenizer_config.json") if family in TEXTS else ():
            shutil.copy(Path(tiny.bert) / name, folder)
        found[family] = str(folder)
    return found


@pytest.mark.parametrize("method", ["SLDA", "ER"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_two_tasks(tiny: Any, folders: dict[str, str], family: str, method: str) -> None:
    changes = {
        "backbone": folders[family],
        "backbone.freeze": 1,
        "benchmark.tasks": [2, 2],
        "train.epochs": 12,
        "train.lr": 0.005,
        "train.head_lr": 0.05,
        "measure.fwt": False,
        "method": method,
    }
    modality = "image" if family in IMAGES else "text"
    run = bace.run(tiny.settings(modality, **changes, **({"benchmark.max_length": 16} if modality == "text" else {})))
    assert run.metrics["A_last"] > 45  # chance is 25


@pytest.mark.parametrize("family", ["deberta-v2", "modernbert"])
def test_words_of_sentences_are_rows_in_the_new_families_too(tiny: Any, folders: dict[str, str], family: str) -> None:
    changes = {"backbone": folders[family], "benchmark.tasks": [2, 2], "method": "ER", "benchmark.max_length": 16}
    assert bace.run(tiny.settings("token", **changes, **{"train.epochs": 8})).metrics["A_last"] > 30


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_without_gradient_in_small_parts_give_the_same(
    folders: dict[str, str], family: str, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples that do not fit into the processor's cache together pass the blocks one after another."""
    encoder, inputs = load_encoder(folders[family]).eval(), tiny_inputs(family)
    sizes: list[int] = []
    encoder.blocks[0].register_forward_pre_hook(lambda block, given: sizes.append(len(given[0])))
    whole = encoder(inputs, pooled=pooled)  # gradients are on, so it is never divided
    monkeypatch.setattr("bace.models.encoder.CACHED", 1)
    before = encoder.passes.total
    with torch.no_grad():
        parts = encoder(inputs, pooled=pooled)
    examples = len(whole)
    assert sizes == [examples] + [1] * examples
    assert encoder.passes.total - before == pytest.approx(examples)
    close(parts, whole)


# -- CLIP


def test_the_image_tower_of_a_whole_clip_loads_with_its_normalisation(tmp_path: Path) -> None:
    text = {"vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = tiny_model("clip")
    both = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision.config.to_dict(), projection_dim=8)
    ).eval()
    both.vision_model.load_state_dict(vision.state_dict())
    both.save_pretrained(tmp_path)
    content = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "crop_size": 24, "size": 24}
    write(tmp_path / "preprocessor_config.json", content)
    encoder = load_encoder(str(tmp_path))
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.mean, encoder.std, encoder.image_size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 24)
    assert describe_backbone(str(tmp_path))["family"] == "clip"
    inputs = tiny_inputs("clip")
    with torch.no_grad():
        feature = encoder.pool(encoder(inputs), inputs)
        close(feature, vision(**inputs).pooler_output)
        close(both.visual_projection(feature), both.get_image_features(**inputs).pooler_output)


# -- DeBERTa


@pytest.mark.parametrize("wrong", [{"conv_kernel_size": 3}, {"relative_attention": False}])
def test_a_deberta_that_is_not_cut_into_equal_blocks_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no relative positions, or a convolution .* use DeBERTa-v3"):
        load_encoder(save(tiny_model("deberta-v2", **wrong), tmp_path))


def test_deberta_of_version_2_with_its_own_projections_of_distances_loads(tmp_path: Path) -> None:
    changes = {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 2, "norm_rel_ebd": "none"}
    model = tiny_model("deberta-v2", **changes)
    inputs = tiny_inputs("deberta-v2")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(load_encoder(save(model, tmp_path))(inputs)[real], model(**inputs).last_hidden_state[real])


# -- sentence-transformers


def as_sentence_folder(folder: Path, pooling: Any, *, normalise: bool, module: str = "models") -> str:
    kinds = ["Transformer", "Pooling", "Normalize"] if normalise else ["Transformer", "Pooling"]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = zip(kinds, paths, strict=False)
    write(folder / "modules.json", [{"type": f"sentence_transformers.{module}.{k}", "path": p} for k, p in listed])
    write(folder / "1_Pooling" / "config.json", pooling)
    return str(folder)


def flags(*modes: str) -> dict[str, Any]:
    """The pooling settings as versions before 5 wrote them."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    return {"word_embedding_dimension": WIDTH} | {f"pooling_mode_{name}": name in modes for name in names}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("mode", ["cls", "mean", "max"])
def test_a_sentence_folder_gives_the_features_of_sentence_transformers(
    tmp_path: Path, folders: dict[str, str], mode: str, normalise: bool
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(folders["bert"])
    parts = [transformer, modules.Pooling(WIDTH, mode), *([modules.Normalize()] if normalise else [])]
    theirs = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path))
    encoder = load_encoder(str(tmp_path))
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        found = encoder.pool(encoder(inputs), inputs)
        close(found, theirs(dict(inputs))["sentence_embedding"])
    assert (float(found.norm(dim=1).max()) == pytest.approx(1, abs=1e-5)) == normalise


@pytest.mark.parametrize(("mode", "pooling"), [("cls_token", "class"), ("mean_tokens", "mean"), ("max_tokens", "max")])
def test_the_flags_of_older_folders_say_the_pooling(
    tmp_path: Path, folders: dict[str, str], mode: str, pooling: str
) -> None:
    shutil.copytree(folders["distilbert"], tmp_path / "x")
    encoder = load_encoder(as_sentence_folder(tmp_path / "x", flags(mode), normalise=True))
    assert isinstance(encoder, TextEncoder)
    assert (encoder.pooling, encoder.normalised) == (pooling, True)
    about = describe_backbone(str(tmp_path / "x"))
    assert (about["pooling"], about["normalisation"]) == (pooling, "unit length")


def test_a_transformer_in_a_folder_of_its_own_is_found(tmp_path: Path, folders: dict[str, str]) -> None:
    shutil.copytree(folders["bert"], tmp_path / "0_Transformer")
    folder = as_sentence_folder(tmp_path, flags("mean_tokens"), normalise=False)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write(tmp_path / "modules.json", modules)
    inputs = tiny_inputs("bert")
    assert torch.equal(load_encoder(folder)(inputs), load_encoder(folders["bert"])(inputs))


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        (flags("cls_token", "max_tokens"), "pools by cls and max"),
        (flags("mean_sqrt_len_tokens"), "pools by mean_sqrt_len_tokens"),
        ({"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        ({"pooling_mode": ["mean", "max"]}, "pools by mean and max"),
    ],
)
def test_other_poolings_are_refused_by_name(tmp_path: Path, folders: dict[str, str], pooling: Any, named: str) -> None:
    shutil.copytree(folders["bert"], tmp_path / "x")
    with pytest.raises(ConfigError, match=named):
        load_encoder(as_sentence_folder(tmp_path / "x", pooling, normalise=False))


def test_sentence_folders_with_other_modules_or_damaged_lists_are_refused(
    tmp_path: Path, folders: dict[str, str]
) -> None:
    shutil.copytree(folders["bert"], tmp_path / "x")
    folder = as_sentence_folder(tmp_path / "x", flags("mean_tokens"), normalise=True)
    listed = tmp_path / "x" / "modules.json"
    modules = json.loads(listed.read_text())
    write(listed, [*modules[:2], {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    with pytest.raises(ConfigError, match=r"modules Transformer, Pooling, Dense; supported are"):
        load_encoder(folder)
    for damaged in ({"a": 1}, [1], [{"type": "Transformer"}], [{"type": "Transformer", "path": "../../elsewhere"}]):
        write(listed, damaged)
        with pytest.raises(DataError, match=r"modules\.json is not a list of modules with type and path"):
            load_encoder(folder)


def test_features_that_are_pooled_do_not_depend_on_padding(tmp_path: Path, folders: dict[str, str]) -> None:
    shutil.copytree(folders["bert"], tmp_path / "x")
    encoder = load_encoder(folders["bert"])
    inputs = tiny_inputs("bert")
    for pooling in ("mean", "max"):
        encoder.pooling = pooling
        with torch.no_grad():
            together = encoder.pool(encoder(inputs), inputs)
            for i, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
                alone = {key: value[i : i + 1, :length] for key, value in inputs.items()}
                close(together[i], encoder.pool(encoder(alone), alone)[0])


# -- backbone.pooling


def backbone_of(tiny: Any, modality: str, **changes: Any) -> Any:
    return load_backbone(config_from(tiny.settings(modality, **changes)))


def test_the_setting_chooses_the_pooling_and_by_default_the_folder_does(tiny: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny.bert, tmp_path / "x")
    folder = as_sentence_folder(tmp_path / "x", {"pooling_mode": "mean"}, normalise=True)
    found = {
        pooling: backbone_of(tiny, "text", backbone=folder, **{"backbone.pooling": pooling})
        for pooling in ("own", "class", "mean", "max")
    }
    assert {p: (e.pooling, e.normalised) for p, e in found.items()} == {
        "own": ("mean", True),
        "class": ("class", False),
        "mean": ("mean", False),
        "max": ("max", False),
    }
    assert backbone_of(tiny, "text").pooling == "class"
    with pytest.raises(ConfigError, match=r"backbone\.pooling is mean, but only texts are pooled"):
        backbone_of(tiny, "image", **{"backbone.pooling": "mean"})


def test_a_run_with_mean_pooling_can_be_loaded_and_predicts_as_it_scored(tiny: Any, tmp_path: Path) -> None:
    settings = tiny.settings("text", method="SLDA", **{"backbone.pooling": "mean", "benchmark.tasks": 5})
    run = bace.run(settings, out=tmp_path / "run")
    assert read_description(tmp_path / "run").settings().backbone.pooling == "mean"
    lines = [line.split(",") for line in (tiny.folder / "texts" / "test.csv").read_text().splitlines()[1:]]
    said = bace.load(tmp_path / "run").predict([text for text, _ in lines])
    right = 100 * sum(a == label for a, (_, label) in zip(said, lines, strict=True)) / len(lines)
    assert right == pytest.approx(run.metrics["A"][-1], abs=1e-6)


def test_pixels_that_are_not_normalised_stay_between_black_and_white(tiny: Any) -> None:
    encoder = backbone_of(tiny, "image", **{"backbone.normalise": False})
    assert (encoder.mean, encoder.std) == ((0.0,) * 3, (1.0,) * 3)
    assert backbone_of(tiny, "image").mean == (0.5,) * 3
    run = bace.run(tiny.settings("image", method="SLDA", **{"backbone.normalise": False, "measure.fwt": False}))
    assert run.metrics["A_last"] > 45
