"""Half precision in training, and the other settings that trade exactness for speed."""

import json
from pathlib import Path

import pytest
import torch
from checks import assert_same, copying_at, final_state

import bace
from bace.config.parse import config_from
from bace.core.stage import Stage
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.experiments.assemble import assemble, prepare_torch

FLOAT16 = {"train.precision": "float16"}


@pytest.fixture(scope="module", autouse=True)
def _probed() -> None:
    try:
        prepare_torch(config_from({"benchmark": "digits", **FLOAT16}))
    except ConfigError:
        pytest.skip("float16 does not work on this CPU")


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "epoch"]


def test_a_run_in_float16_has_the_losses_of_float32_and_resumes_exactly(tiny, tmp_path):
    changes = {"method": "bace", "train.momentum": 0.0}  # without momentum the optimiser leaves nothing in a checkpoint
    bace.run(tiny.settings("image", **changes), out=tmp_path / "full")
    points = [("step", 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", copying_at(points, tmp_path))
        bace.run(tiny.settings("image", **changes, **FLOAT16), out=tmp_path / "copied")
    half, full = torch.tensor(losses(tmp_path / "copied")), torch.tensor(losses(tmp_path / "full"))
    torch.testing.assert_close(half, full, rtol=0.02, atol=0.02)
    assert not torch.equal(half, full)
    bace.run(resume=tmp_path / "step-5")
    assert_same(final_state(tmp_path / "copied"), final_state(tmp_path / "step-5"))


def one_step(tiny, factor: float) -> tuple[Trainer, list[torch.Tensor], list[torch.Tensor]]:
    """The weights before and after a step whose loss is multiplied by a factor."""
    config = config_from(tiny.settings("image", method="seq", **FLOAT16))
    method, stream = assemble(config)
    trainer, task = Trainer(method, stream, config), stream[0]
    trainer.enter(task)
    method.grow(task)
    (stage,) = method.stages(task)
    trainer.optimiser = trainer.begin_optimiser(stage, {"all": list(method.model.parameters())})
    before = [p.detach().clone() for p in method.model.parameters()]
    scaled = Stage(**{**vars(stage), "loss": lambda batch: method.loss(batch) * factor})
    trainer.step(scaled, stream.batch(task.train[:4]), list(method.model.parameters()))
    return trainer, before, [p.detach() for p in method.model.parameters()]


def test_gradients_are_those_without_a_scale_and_weights_stay_float32(tiny):
    trainer, before, after = one_step(tiny, 1.0)
    assert trainer.scaler.get_scale() == 1024
    moved = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    assert 0 < max(moved) < 1  # 1,024 times as far if the scale were not removed
    assert {p.dtype for p in after} == {torch.float32}


def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_shrinks(tiny):
    trainer, before, after = one_step(tiny, 1e7)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert trainer.scaler.get_scale() == 512


def test_features_and_logits_are_float32(tiny):
    features = []
    for precision in ({}, FLOAT16):
        method, stream = assemble(config_from(tiny.settings("image", method="seq", **precision)))
        stream.begin(stream[0], torch.zeros(0, dtype=torch.int64))
        method.grow(stream[0])
        out = method.model(stream.batch(stream[0].train[:4]))
        assert out.features.dtype == out.logits.dtype == torch.float32
        features.append(out.features)
    torch.testing.assert_close(*features, rtol=0.01, atol=0.01)
    assert not torch.allclose(*features, rtol=0, atol=1e-6)  # they were computed in half precision


def test_the_layout_of_pictures_changes_nothing_but_rounding(tiny):
    features = []
    for channels_last in (False, True):
        changes = {"method": "seq", "train.channels_last": channels_last}
        method, stream = assemble(config_from(tiny.settings("image", **changes)))
        stream.begin(stream[0], torch.zeros(0, dtype=torch.int64))
        features.append(method.model(stream.batch(stream[0].train[:4])).features)
    torch.testing.assert_close(*features, rtol=1e-5, atol=1e-6)


def test_compiled_blocks_keep_the_names_of_their_parameters(tiny):
    plain, _ = assemble(config_from(tiny.settings("image", method="seq")))
    compiled, _ = assemble(config_from(tiny.settings("image", method="seq", **{"train.compile": True})))
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert all(block._compiled_call_impl is not None for block in compiled.model.encoder.blocks)


def test_determinism_and_tf32_are_settings(tiny):
    try:
        for asked in (False, True):
            prepare_torch(config_from(tiny.settings("image", **{"train.deterministic": asked, "train.tf32": asked})))
            assert torch.are_deterministic_algorithms_enabled() == asked
            assert torch.backends.cuda.matmul.allow_tf32 == asked
    finally:
        prepare_torch(config_from(tiny.settings("image")))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
