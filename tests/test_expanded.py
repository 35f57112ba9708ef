"""Models that grow by one branch per task, for all families of encoders."""

from typing import Any

import pytest
import torch
from tiny_encoders import DEPTH, FAMILIES, WIDTH, save, tiny_inputs, tiny_model

from bace.data.batch import Batch
from bace.models.adapters import add_adapters
from bace.models.encoder import Encoder, freeze_prefix
from bace.models.expanded import Expanded, Forked
from bace.models.heads import WideningHead
from bace.models.loading import load_encoder
from bace.models.model import Model
from bace.randomness import generator


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save(tiny_model(family), tmp_path_factory.mktemp(family)) for family in FAMILIES}


def batch_of(family: str) -> Batch:
    inputs = tiny_inputs(family)
    ids = torch.arange(len(next(iter(inputs.values()))))
    return Batch(inputs, torch.zeros_like(ids), ids, ids)


def grown(kind: Any, encoder: Encoder, tasks: int) -> Any:
    """A model with this many tasks of two classes, whose branches differ."""
    model = kind(encoder, WideningHead(WIDTH))
    for task in range(tasks):
        if task:
            model.add_branch() if kind is Expanded else model.add_tip()
            newest = model.others[-1]
            with torch.no_grad():
                for i, p in enumerate(p for p in newest.parameters() if p.requires_grad):
                    p += 0.1 * torch.randn(p.shape, generator=generator(task, i))
        model.head.grow(2, generator(0, task))
    return model.eval()


@pytest.mark.parametrize("kind", [Expanded, Forked])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_branch_is_the_plain_model_bit_for_bit(folders: dict[str, str], family: str, kind: Any) -> None:
    model = grown(kind, load_encoder(folders[family]), 1)
    plain = Model(model.encoder, model.head).eval()
    for one, other in zip(model(batch_of(family)), plain(batch_of(family)), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("kind", [Expanded, Forked])
@pytest.mark.parametrize("family", FAMILIES)
def test_branches_stand_side_by_side_in_features_and_taps(folders: dict[str, str], family: str, kind: Any) -> None:
    model = grown(kind, load_encoder(folders[family]), 3)
    batch = batch_of(family)
    out = model(batch, taps=True)
    assert out.features.shape == (len(batch), 3 * WIDTH)
    assert out.logits.shape == (len(batch), 6)
    assert len(out.taps) == DEPTH
    assert all(tap.shape[2] == 3 * WIDTH for tap in out.taps)
    torch.testing.assert_close(out.logits, model.head(out.features))
    parts = out.features.split(WIDTH, 1)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[1], parts[2])
    last = [tap[:, 0] for tap in out.taps[-1].split(WIDTH, 2)]
    for tip, (part, tap) in enumerate(zip(parts, last, strict=True)):
        norm = model.encoders[tip].norm if kind is Expanded else model.tips[tip][1]
        torch.testing.assert_close(norm(tap), part)


def test_the_newest_encoder_can_be_passed_alone(folders: dict[str, str]) -> None:
    model = grown(Expanded, load_encoder(folders["vit"]), 3)
    batch = batch_of("vit")
    alone = model(batch, newest=True)
    torch.testing.assert_close(alone.features, model(batch).features[:, -WIDTH:])
    assert alone.logits.shape == (len(batch), 0)


@pytest.mark.parametrize("kind", [Expanded, Forked])
def test_only_the_newest_branch_trains_and_drops(folders: dict[str, str], kind: Any) -> None:
    model = grown(kind, load_encoder(folders["bert"]), 3).train()
    *old, new = model.encoders if kind is Expanded else model.tips
    for branch in old:
        assert not any(module.training for module in branch.modules() if module is not branch)
        assert not any(p.requires_grad for p in branch.parameters())
    assert all(module.training for module in new.modules() if module is not new)
    assert all(p.requires_grad for p in new.parameters())
    batch, features = batch_of("bert"), []
    for name in ("main", "other", "main"):
        model.dropout_seed = lambda: 7
        features.append(model(batch, name=name).features)
    assert torch.equal(features[0], features[2])  # each named pass has its own dropout
    assert not torch.equal(features[0][:, -WIDTH:], features[1][:, -WIDTH:])
    if kind is Expanded:  # here no trained part comes before the old branches
        assert torch.equal(features[0][:, :WIDTH], features[1][:, :WIDTH])


@pytest.mark.parametrize("kind", [Expanded, Forked])
@pytest.mark.parametrize("way", ["adapters", "prefix"])
def test_what_is_never_trained_is_kept_once(folders: dict[str, str], kind: Any, way: str) -> None:
    def half_frozen(seed: int) -> Encoder:
        encoder = load_encoder(folders["vit"])
        add_adapters(encoder, 4, generator(seed)) if way == "adapters" else freeze_prefix(encoder, DEPTH)
        return encoder

    encoder = half_frozen(0)
    own = [name for name, p in encoder.named_parameters() if p.requires_grad]
    model = grown(kind, encoder, 3)
    kept = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("head."))
    trained = sum(p.numel() for p in model.others[-1].parameters() if p.requires_grad)
    assert kept == sum(p.numel() for p in encoder.parameters()) + 2 * trained
    assert 0 < trained < kept / 4
    branches = model.encoders if kind is Expanded else model.tips
    first, second = (dict(branch.named_parameters()) for branch in branches[:2])
    shared = {name for name in first if first[name] is second[name]}
    assert 0 < len(shared) < len(first)
    if kind is Expanded:
        assert shared == set(first) - set(own)
        assert trained == model.trained_size
    # a checkpoint holds every name and restores what is shared
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = grown(kind, half_frozen(1), 3)
    again.load_state_dict(state)
    assert torch.equal(again(batch_of("vit")).logits, model(batch_of("vit")).logits)
