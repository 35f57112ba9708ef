"""Freed memory is kept for the next tensors, unless the environment has settings of its own."""

import resource

import pytest
import torch
from torch import Tensor

from bace.methods.parts.neighbours import nearest
from bace.models.allocation import SETTINGS, glibc, keep_freed_memory, return_freed_memory
from bace.models.plain_vit import PlainViT, ViTConfig
from bace.models.vit import ViTEncoder

pytestmark = pytest.mark.skipif(glibc() is None, reason="only glibc is told")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTINGS, "BACE_KEEP_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory.cache_clear()


def faults(times: int) -> int:
    """Pages that the system hands out while three tensors of 16 MB at a time are made and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        together: list[Tensor] = [torch.ones(2**22) for _ in range(3)]
        del together
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.usefixtures("told")
def test_tensors_of_one_size_take_the_same_memory_again_and_again() -> None:
    assert keep_freed_memory()
    faults(3)
    assert faults(10) < 4096  # pages of 4 kB, of one tensor; those of all tensors are 122,880


@pytest.mark.usefixtures("told")
def test_what_is_kept_can_be_returned() -> None:
    assert keep_freed_memory()
    faults(3)
    before = resident()
    return_freed_memory()
    assert resident() < before - 2**24  # at least a tensor


@pytest.mark.usefixtures("told")
def test_encoders_and_the_search_for_neighbours_keep_freed_memory() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTEncoder(PlainViT(ViTConfig(**shape, image_size=8, patch_size=4)), {})
    assert keep_freed_memory.cache_info().currsize == 1
    keep_freed_memory.cache_clear()
    nearest(torch.rand(4, 2), 1)
    assert keep_freed_memory.cache_info().currsize == 1


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("BACE_KEEP_MEMORY", "0")])
def test_settings_of_the_environment_are_obeyed(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
