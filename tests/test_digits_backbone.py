"""The embedded micro ViT is small, complete, and better on digits than random weights, although it never saw one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestCentroid
from torch import Tensor
from transformers import ViTModel

import bace

FOLDER = Path(bace.__file__).parent / "data" / "digits_vit"
BAR = 0.75  # nearest class mean on frozen features: 0.82 as shipped, about 0.3 with random weights, 0.90 on raw pixels


@pytest.fixture(scope="module")
def inputs() -> Tensor:  # (1797, 3, 16, 16)
    stored = torch.tensor(load_digits().images * 255 / 16).to(torch.uint8)
    size = json.loads((FOLDER / "preprocessor_config.json").read_text())["size"]
    large = F.interpolate(stored[:, None].float(), size=(size["height"], size["width"]), mode="bicubic").clamp(0, 255)
    return ((large / 255 - 0.5) / 0.5).repeat(1, 3, 1, 1)


@torch.no_grad()
def nearest_mean_accuracy(model: ViTModel, inputs: Tensor) -> float:
    features = model.eval()(inputs).last_hidden_state[:, 0].numpy()
    labels = load_digits().target
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return float(NearestCentroid().fit(features[train], labels[train]).score(features[test], labels[test]))


def test_folder_takes_at_most_3_megabytes() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 3_000_000


def test_every_weight_is_used_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, info = ViTModel.from_pretrained(FOLDER, add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with safe_open(FOLDER / "model.safetensors", framework="pt") as stored:
        assert len(stored.keys()) == len(model.state_dict())


def test_frozen_features_tell_digits_apart_far_better_than_random_weights(inputs: Tensor) -> None:
    trained = ViTModel.from_pretrained(FOLDER, add_pooling_layer=False)
    accuracy = nearest_mean_accuracy(trained, inputs)
    assert accuracy > BAR
    torch.manual_seed(0)
    assert accuracy > nearest_mean_accuracy(ViTModel(trained.config, add_pooling_layer=False), inputs) + 0.3
