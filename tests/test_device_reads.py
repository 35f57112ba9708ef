"""A run on an accelerator without one: the CPU counts operations that would be errors there, and reads that would make
the host wait (device_reads.py). A training step never waits."""

import functools
from collections import Counter

import pytest
import torch
from checks import short
from device_reads import DEVICE, Device, watching_steps

import bace
from bace.config.parse import config_from
from bace.core.memory import herd
from bace.core.trainer import Trainer
from bace.experiments.assemble import assemble, load_backbone
from bace.methods import METHODS, find_method
from bace.studies import STUDIES
from bace.studies.probing import fit_probe

# How often a line may read outside of steps. It may do so for each of two tasks, five classes and the rules of
# prediction, but not for each of 40 training examples, 30 test examples or 10 remembered ones.
READS_OF_A_LINE = 10
# for each of two tasks, whether the equations of 17 ridges have a solution
MORE_READS = {("RanPAC", "ridge.py"): 40}


def watched_run(settings: dict[str, object], *, studies: bool = False) -> Device:
    """A whole run: its preparation, steps, early stopping, statistics, memory, forward transfer, evaluation, messages
    about what was learned, and checkpoints."""
    config = config_from(settings | {"train.device": str(DEVICE)})
    load_backbone(config)  # once, before tensors are followed
    device, saved = Device(), []
    with device.running(), device.watched():
        method, stream = assemble(config)
        trainer = Trainer(
            method,
            stream,
            config,
            save=lambda tensors, state: saved.append(state),
            tell=lambda line: None,
            studies=STUDIES if studies else {},
        )
        trainer.step = watching_steps(device, trainer.step)  # type: ignore[method-assign]
        trainer.run()
    assert len(saved) == len(trainer.results.matrix) == len(stream)
    return device


def modalities_of(method: str) -> set[str]:
    """The first and the last: entities are texts, too."""
    own = [modality for modality in ("image", "text", "token") if modality in find_method(method).modalities]
    return {own[0], own[-1]}


CASES = [
    *((method.title, modality) for method in METHODS for modality in sorted(modalities_of(method.title))),
    ({"name": "BaCE", "neighbour_scores": "exact", "bias_correction": True}, "image"),
    ({"name": "BaCE", "neighbor_grad": True}, "image"),
    ({"name": "HAL", "ring": "class"}, "image"),
    ({"name": "SLDA", "forgettable": True}, "image"),
]


@pytest.mark.parametrize(("method", "modality"), CASES)
def test_no_step_waits_for_the_device_and_nothing_mixes_it_with_the_host(tiny, method, modality):
    changes = {
        "benchmark.tasks": 2 if modality == "token" else [3, 2],
        "benchmark.val_fraction": 0.2,
        "train.epochs": 1,
        "train.early_stop": 1,
        "head.head_init": "imprint",
    }
    device = watched_run(tiny.settings(modality, method=short(method, epochs=1), **changes))
    assert sorted(set(device.mixed)) == []  # these would be errors on a GPU
    assert sorted(set(device.step_reads)) == []
    name = method if isinstance(method, str) else method["name"]
    for line, count in Counter(device.other_reads).items():
        file = line.partition(" at ")[2].partition(":")[0]
        assert count <= MORE_READS.get((name, file), READS_OF_A_LINE), line


@pytest.mark.parametrize("method", [{"name": "BaCE", "K": 1}, "PODNet", "SLDA"])
def test_reads_do_not_grow_with_the_number_of_examples(tiny, method):
    changes = {"benchmark.tasks": [3, 2], "train.epochs": 1}
    few, many = (
        watched_run(tiny.settings("image", method=short(method, epochs=1), **changes, **{"benchmark.val_fraction": v}))
        for v in (0.5, 0.0)
    )
    assert len(few.other_reads) == len(many.other_reads)


def test_studies_compute_on_the_device(tiny, monkeypatch):
    monkeypatch.setattr("bace.studies.probing.fit_probe", functools.partial(fit_probe, epochs=1, least_steps=2))
    changes = {"benchmark.tasks": [3, 2], "train.epochs": 1}
    for method in ("BaCE", "ER"):  # the gallery shows the one's own neighbours, and searches the other's
        device = watched_run(tiny.settings("image", method=method, **changes), studies=True)
        assert sorted(set(device.mixed)) == []


def test_a_run_resumes_on_the_device(tiny):
    config = config_from(tiny.settings("image", method="BaCE", **{"train.epochs": 1, "train.device": str(DEVICE)}))
    load_backbone(config)
    device, saved = Device(), []
    with device.running(), device.watched():
        trainer = Trainer(*assemble(config), config, save=lambda *state: saved.append(state))
        trainer.run()
        resumed = Trainer(*assemble(config), config)
        resumed.restore(*saved[1])
        resumed.run()
    assert resumed.results.matrix == trainer.results.matrix
    assert sorted(set(device.mixed)) == []


def test_a_learner_learns_predicts_and_forgets_on_the_device(tiny):
    pictures = torch.randint(0, 256, (24, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    settings = {"memory": 4, "train.epochs": 2, "train.lr": 0.01, "train.device": str(DEVICE)}
    learner = bace.Learner("er", backbone=tiny.vit, **settings)
    device = Device()
    with device.running(), device.watched():
        for start, names in ((0, ["a", "b"]), (12, ["c", "d"])):
            learner.partial_fit(pictures[start : start + 12], names * 6)
        learner.predict_proba(pictures)
        learner.forget("c")
        learner.predict(pictures)
    assert sorted(set(device.mixed)) == []


def test_herding_computes_on_the_device_and_reads_it_once():
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    device = Device()
    with device.running(), device.watched():
        order = herd(features.to(DEVICE), 10)
        assert order.device != DEVICE
    assert device.mixed == []
    assert len(device.other_reads) == 1
    assert torch.equal(order, herd(features, 10))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.any()), "_local_scalar_dense"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.to("cpu"), "to"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: (x > 0).nonzero(), "nonzero"),
        (lambda x: x[x > 0], "a mask as an index"),
        (lambda x: x.unique(), "_unique2"),
    ],
)
def test_what_is_read_from_the_device_is_counted(read, name):
    device, host = Device(), torch.ones(3)
    with device.running(), device.watched():
        there = host.to(DEVICE) * 2
        read(host)
        assert device.other_reads == []
        read(there)
    assert [what.partition(" at ")[0] for what in device.other_reads] == [name]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda host, there: there + host,
        lambda host, there: host + there.sum(),  # only the host's number may be used on the device
        lambda host, there: host[there.long()],
        lambda host, there: there.index_put_((host.long(),), host),
        lambda host, there: torch.stack([host.sum(), there.sum()]),
        lambda host, there: host.sum().add_(there.sum()),
        lambda host, there: there.numpy(),
        lambda host, there: torch.multinomial(there + 1, 1, generator=torch.Generator()),
        lambda host, there: torch.rand(3, device=DEVICE, generator=torch.Generator()),
    ],
)
def test_what_would_be_an_error_on_a_gpu_is_counted(wrong):
    device, host = Device(), torch.ones(3)
    with device.running(), device.watched():
        there = torch.zeros(3, device=DEVICE)
        there[host.long()]  # an index may be on the host
        there + torch.tensor(1.0)  # so may a number
        there + host.to(there.device)
        there[:2] = host[:2]  # a copy
        assert device.mixed == []
        wrong(host, there)
    assert len(device.mixed) == 1


def test_a_copy_to_the_host_is_a_read_and_stays_there():
    device, host = Device(), torch.ones(3)
    with device.running(), device.watched():
        host[:] = torch.zeros(3, device=DEVICE)
        host + torch.ones(3)
    assert len(device.other_reads) == 1
    assert device.mixed == []
