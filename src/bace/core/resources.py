"""How much memory a method takes: told before a run, so that one that cannot fit does not start, and measured in it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch

from bace.core.method import Method
from bace.errors import ConfigError
from bace.models.encoders import TextEncoder

LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/proc/meminfo")


def bytes_needed(method: Method, tasks: Iterable[int]) -> int:
    """Parameters, gradients and the optimiser's state in the greediest of these tasks. Activations, which depend on
    train.batch_size, come on top."""
    train = method.training_settings
    slots = 2 if train.optimiser != "sgd" else int(train.momentum > 0)
    size = next(method.model.parameters()).element_size()
    return size * max(kept + trained * (1 + slots) for kept, trained in map(method.needs, tasks))


def bytes_kept(method: Method) -> int:
    """What the method holds now, exemplars by their ids; what modules share is counted once."""
    return sum(tensor.nbytes for tensors in (method.parameters(), method.buffers()) for tensor in tensors)


def bytes_cached(method: Method) -> int:
    """What may still be taken for what frozen blocks make of texts (backbone.cache)."""
    encoders = (module for module in method.modules() if isinstance(module, TextEncoder))
    return sum({id(cache): cache.room for encoder in encoders if (cache := encoder.cache) is not None}.values())


def bytes_free(device: torch.device) -> int | None:
    """What may still be taken on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = []
    for path in LIMITS:  # a container's limit, and what Linux can give without swapping
        words = path.read_text().split() if path.exists() else []
        if "MemAvailable:" in words:
            limits.append(1024 * int(words[words.index("MemAvailable:") + 1]))
        elif words and words[0].isdigit():
            limits.append(int(words[0]))
    return min(limits, default=None)


def forget_peak(device: torch.device) -> None:
    """Measure `peak_bytes` from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """The most that was in use: on a GPU by tensors, else by the process; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    words = status.read_text().split() if status.exists() else []
    return 1024 * int(words[words.index("VmHWM:") + 1]) if "VmHWM:" in words else None


def check_room(method: Method, tasks: Iterable[int]) -> str:
    """What these tasks will take, in words; refused if that cannot fit beside what is taken already."""
    needed, texts = bytes_needed(method, tasks), bytes_cached(method)
    free = bytes_free(device := method.stream.device)
    told = f"{method.title} will need up to {in_words(needed)} for parameters, gradients and optimiser"
    if texts:
        told += f", {in_words(texts)} more for what frozen blocks make of texts (backbone.cache)"
    if free is not None and needed + texts - bytes_kept(method) > free:
        raise ConfigError(
            f"{told}, activations not counted, but only {in_words(free)} are free on {device.type}: use fewer tasks, a "
            "smaller backbone, backbone.adapter or backbone.freeze (what is never trained is kept once), less "
            "backbone.cache, or another method"
        )
    return f"{told}; activations come on top"


def in_words(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"
