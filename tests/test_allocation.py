"""Freed memory is kept for the next tensors, unless the environment has settings of its own."""

import ctypes
import resource

import pytest
import torch

from bace.models.allocation import SETTINGS, keep_freed_memory


def faults(times: int) -> int:
    """Pages that the system hands out while tensors of 16 MB are made and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only glibc is told")
def test_tensors_of_one_size_take_the_same_memory_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory.__wrapped__()
    faults(3)
    assert faults(10) < 4096  # pages of 4 kB, of one tensor; ten tensors have 40960


def test_settings_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory.__wrapped__()
