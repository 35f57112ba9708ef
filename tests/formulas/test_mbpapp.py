"""MBPA++ equals its parents bit for bit over whole runs (Sparse-ER without adaptation, MBPA without replay). Tests
check the keys and the budget of the shared memory. It resumes exactly between two rare steps on memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_resume_equals_the_straight_run, counted_run
from steps import assert_equal_bits, make, weights
from torch import Tensor

import bace
from bace.core.trainer import Trainer
from bace.errors import ConfigError
from bace.methods import find_method
from bace.methods.mbpapp import MBPApp
from bace.methods.sparseer import SparseER

FAST = {"K": 3, "steps": 4, "lr_local": 0.02}
MODALITIES = ["image", "text", "token"]


@pytest.mark.parametrize("modality", MODALITIES)
def test_without_steps_it_is_sparse_er_bit_for_bit(tiny: Any, modality: str) -> None:
    off: dict[str, Any] = {"name": "mbpa++", "every": 3, "steps": 0}
    sparse, both = (bace.run(tiny.settings(modality, method=m)) for m in ({"name": "sparse-er", "every": 3}, off))
    assert sparse.matrix == both.matrix
    assert_equal_bits(weights(sparse.method.model), weights(both.method.model))
    assert_equal_bits(
        {name: sparse.method.memory.get_buffer(name) for name in ("examples", "task", "group")},
        {name: both.method.memory.get_buffer(name) for name in ("examples", "task", "group")},
    )
    assert int(both.method.taken) == int(sparse.method.taken) > 6


@pytest.mark.parametrize("modality", MODALITIES)
def test_without_replay_it_is_mbpa_bit_for_bit(tiny: Any, modality: str) -> None:
    mbpa, both = (
        bace.run(tiny.settings(modality, method=m))
        for m in ({"name": "mbpa", **FAST}, {"name": "mbpa++", "every": 0, **FAST})
    )
    assert mbpa.matrix == both.matrix
    assert mbpa.metrics["scorers"] == both.metrics["scorers"]
    own = weights(both.method)
    del own["taken"]
    assert_equal_bits(weights(mbpa.method), own)


def test_it_is_trained_as_sparse_er_whatever_it_adapts(tiny: Any) -> None:
    sparse, both = (
        bace.run(tiny.settings("text", method=m))
        for m in ({"name": "sparse-er", "every": 3}, {"name": "mbpa++", "every": 3, **FAST})
    )
    assert_equal_bits(weights(sparse.method.model), weights(both.method.model))
    assert both.metrics["scorers"]["base"]["A"] == sparse.metrics["A"]
    assert both.metrics["A"] != sparse.metrics["A"]


def test_keys_stay_as_written_and_the_memory_within_its_budget(tiny: Any) -> None:
    settings = {"benchmark.tasks": [2, 1, 2]}
    method, stream, config = make(tiny, "token", {"name": "mbpa++", "every": 2, **FAST}, **settings)
    trainer = Trainer(method, stream, config)
    written: dict[int, Tensor] = {}
    for task in stream:
        trainer.learn(task)
        assert 0 < len(method.memory) <= 10
        found = dict(zip(method.memory.examples.tolist(), method.memory.get_buffer("keys"), strict=True))
        assert all(torch.equal(written[e], found[e]) for e in written.keys() & found.keys())
        written |= found
    assert len(written) > 10  # some have been replaced
    batch = stream.batch(method.memory.examples[:4])
    assert torch.equal(method.predict(batch), method.predict(batch))


def test_resume_between_steps_on_memory_is_exact(tiny: Any, tmp_path: Path) -> None:
    method: Any = {"name": "mbpa++", "every": 3, **FAST}
    counted_run(tiny, method, "text", tmp_path)
    check_resume_equals_the_straight_run(tiny, method, "text", tmp_path)


def test_each_hyper_parameter_reaches_its_parent() -> None:
    method = MBPApp(7, 5, 3, "all", 0.5, 0.25, 9)
    assert (method.every, method.K, method.steps, method.adapt) == (7, 5, 3, "all")
    assert (method.lr_local, method.lambda_local, method.sample) == (0.5, 0.25, 9)
    assert (MBPApp().lr_local, MBPApp(adapt="all").lr_local) == (0.01, 0.001)
    assert find_method("mbpa++") is find_method("mbpapp") is MBPApp
    assert SparseER().every == MBPApp().every == 100
    with pytest.raises(ConfigError, match=r"MBPA\+\+: every \(-2\)"):
        MBPApp(every=-2)
