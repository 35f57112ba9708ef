"""A training step never waits for the device: the CPU counts the reads that would wait (device_reads.py)."""

import pytest
import torch
from checks import short
from device_reads import DEVICE, Device, watching

from bace.config.parse import config_from
from bace.core.memory import Memory
from bace.core.trainer import Trainer
from bace.experiments.assemble import assemble
from bace.methods import METHODS, find_method


def steps_watched(settings: dict[str, object]) -> Device:
    """A run whose training steps are watched."""
    config = config_from(settings | {"train.device": str(DEVICE)})
    method, stream = assemble(config)
    device = Device()
    host = {id(buffer) for module in method.modules() if isinstance(module, Memory) for buffer in module.buffers()}
    for tensor in (*method.parameters(), *method.buffers()):
        if id(tensor) not in host:
            device.put(tensor)
    trainer = Trainer(method, stream, config)
    trainer.step = watching(device, trainer.step)  # type: ignore[method-assign]
    with device.running():
        for task in stream:  # without evaluation, which may read values
            trainer.learn(task)
            trainer.now.end(task)
    return device


# Methods that must read values, the file that reads them, and the reason.
EXCEPTIONS = {
    "CFNER": "cfner.py",  # which O words have neighbours depends on how certain the network is of them
    "IDBR": "idbr.py",  # the lengths of the texts after their halves were exchanged
}


def modality_of(method: str) -> str:
    return next(modality for modality in ("image", "text", "token") if modality in find_method(method).modalities)


CASES = [
    *((method.title, modality_of(method.title)) for method in METHODS),
    ({"name": "BaCE", "neighbour_scores": "bank"}, "image"),
    ({"name": "BaCE", "neighbor_grad": True}, "image"),
    *((method, "token") for method in ("BaCE", "ER", "DER++", "A-GEM", "APER")),
]


@pytest.mark.parametrize(("method", "modality"), CASES)
def test_no_step_waits_for_the_device(tiny, method, modality):
    changes = {"measure.fwt": False, "train.epochs": 1, "benchmark.tasks": 2 if modality == "token" else [3, 2]}
    device = steps_watched(tiny.settings(modality, method=short(method, epochs=1), **changes))
    places = {read.partition(" at ")[2].partition(":")[0] for read in device.reads}
    if expected := EXCEPTIONS.get(method if isinstance(method, str) else ""):
        assert places == {expected}
    else:
        assert sorted(set(device.reads)) == []
    assert sorted(set(device.mixed)) == []  # this would be an error on a GPU


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
        assert device.reads == []
        read(there)
    assert [what.partition(" at ")[0] for what in device.reads] == [name]


def test_tensors_of_both_sides_in_one_operation_are_counted():
    device, host = Device(), torch.ones(3)
    with device.running(), device.watched():
        there = torch.zeros(3, device=DEVICE)
        there[host.long()]  # an index may be on the host
        there + torch.tensor(1.0)  # so may a number
        there + host.to(there.device)
        assert device.mixed == []
        there + host
    assert len(device.mixed) == 1
