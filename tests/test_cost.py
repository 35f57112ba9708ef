"""The passes and networks that methods declare as their cost are compared with tiny runs."""

import weakref
from typing import Any

import pytest
from checks import short

from bace.config.parse import config_from
from bace.core.resources import bytes_kept
from bace.core.trainer import Trainer
from bace.experiments.assemble import assemble
from bace.methods import METHODS
from bace.methods.er import ER
from bace.models.model import Model
from bace.paper.cost import learning_passes

# among twenty examples, several neighbours of each would coincide; anchors take hundreds of passes in any task
SMALLER = {"BaCE": {"K": 1}, "DDE": {"top_k": 1}, "HAL": {"anchor_steps": 1, "memory_steps": 1}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny ViT with as many blocks as a large one."""
    from transformers import ViTConfig, ViTModel

    folder = tmp_path_factory.mktemp("deep")
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    ViTModel(ViTConfig(num_hidden_layers=12, **shape), add_pooling_layer=False).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_a_task_takes_the_passes_and_networks_that_are_declared(
    tiny: Any, deep: str, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    """Passes of a later task and of the whole run agree within a quarter, and networks within half of one, which allows
    for heads and tables."""
    chosen = short({"name": method.title, **SMALLER.get(method.title, {})})
    changes: dict[str, Any] = {"measure.fwt": False}  # the passes of tests are not part of the method's cost
    if method.title == "MEMO":  # its trunk is all blocks but the last
        changes["backbone"] = deep
    config = config_from(tiny.settings(min(method.modalities), method=chosen, **changes))
    learned, stream = assemble(config)
    networks = Networks(learned)
    monkeypatch.setattr(Model, "forward", networks.watched(Model.forward))
    trainer = Trainer(learned, stream, config)
    for task in stream:
        _, before = trainer.spent()
        networks.most = 0
        trainer.learn(task)
        networks.measure()
    total, last = trainer.spent()[1], stream[-1]
    found = total - before

    cost, joint = learned.cost, learned.licence == "past"
    new = sum(len(task.train) for task in stream) if joint else len(last.train)
    concat = isinstance(learned, ER) and learned.policy.mode == "concat"
    replayed = config.memory.size if concat else new  # half of each batch is replayed
    every = (cost.epochs or config.train.epochs) * (cost.new * new + cost.replayed * replayed)
    assert found == pytest.approx(every + cost.task * new + cost.memory * config.memory.size, rel=0.25)

    trained = sum(len(task.train) for task in stream)
    estimated = learning_passes(learned, config, trained, config.memory.size, len(stream))
    assert estimated == pytest.approx(total, rel=0.25)  # of the whole run, from its first task on

    encoder = sum(p.nbytes for p in learned.model.encoder.parameters())
    announced, declared = 4 * learned.needs(last.index)[0], learned.networks + learned.keeps_teacher
    assert networks.most == pytest.approx(announced, abs=encoder / 2)
    assert networks.most >= encoder * (declared + learned.expands * last.index)


def test_the_card_of_bace_says_where_its_teacher_passes_the_memory_once_an_epoch(tiny: Any) -> None:
    """The declared number is the upper bound, as for a new view at each draw: 3 of the student and 1 of the teacher."""
    passes = {}
    for view in ("fresh", "epoch"):
        chosen = {"name": "BaCE", "W0": 1.0}  # neighbours would be others in other views
        config = config_from(tiny.settings("image", method=chosen, **{"measure.fwt": False, "train.buffer_view": view}))
        learned, stream = assemble(config)
        trainer = Trainer(learned, stream, config)
        for task in stream:
            before, remembered = trainer.spent()[1], len(learned.memory)
            trainer.learn(task)
        passes[view] = trainer.spent()[1] - before
    new, cost, epochs = len(stream[-1].train), learned.cost, config.train.epochs  # half a batch: as many replayed
    assert passes["fresh"] == epochs * (cost.new + cost.replayed) * new + cost.task * new
    assert passes["fresh"] - passes["epoch"] == epochs * (new - remembered) > 0
    assert learned.card is not None
    assert "passes each example in memory only once an epoch where its views repeat" in learned.card.besides


@pytest.mark.parametrize("method", ["CODA-Prompt", "DualPrompt", "O-LoRA", "SD-LoRA"])
@pytest.mark.parametrize("least", [0, 30])
def test_estimates_include_the_epochs_that_a_minimum_of_steps_adds(tiny: Any, method: str, least: int) -> None:
    """Twenty examples in batches of 8 are 3 steps per epoch: 30 steps are 10 epochs, whichever fewer were asked for."""
    chosen = {"name": method, "tune_epochs": 2, "tune_batch": 16, "tune_steps": least}
    tasks = {"benchmark.tasks": [2, 2], "measure.fwt": False}
    config = config_from(tiny.settings("image", method=chosen, **tasks))
    learned, stream = assemble(config)
    trainer = Trainer(learned, stream, config)
    for task in stream:
        trainer.learn(task)
    estimated = learning_passes(learned, config, sum(len(task.train) for task in stream), 0, len(stream))
    assert estimated == pytest.approx(trainer.spent()[1], rel=0.25)
    assert learned.cost.epochs_of(20, 1) == (10 if least else 2)


class Networks:
    """The largest size in bytes of a method's tensors and of the networks that it passes but does not hold."""

    def __init__(self, method: Any) -> None:
        self.method, self.most = method, 0
        self.passed: weakref.WeakSet[Model] = weakref.WeakSet()

    def watched(self, forward: Any) -> Any:
        def passing(model: Model, *inputs: Any, **options: Any) -> Any:
            if model not in self.passed:
                self.passed.add(model)
                self.measure()
            return forward(model, *inputs, **options)

        return passing

    def measure(self) -> None:
        held = {id(p) for p in self.method.parameters()}
        others = {id(p): p.nbytes for model in self.passed for p in model.parameters() if id(p) not in held}
        self.most = max(self.most, bytes_kept(self.method) + sum(others.values()))
