"""The memory that a method needs. It is estimated before a run, which is refused if it cannot fit, and measured during
it."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from bace.config.schema import Training
from bace.core.method import Method
from bace.errors import ConfigError
from bace.models.encoder import Encoder
from bace.models.prompts import QueryingModel

ACTIVATIONS = 18  # numbers that a block keeps for the backward pass, per token and unit of width
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/proc/meminfo")


def bytes_needed(method: Method, tasks: Iterable[int]) -> int:
    """Bytes of parameters, gradients and optimiser state in the most demanding of these tasks. Activations, which
    depend on train.batch_size, are not included."""
    train = method.training_settings
    slots = 2 if train.optimiser != "sgd" else int(train.momentum > 0)
    size = next(method.model.parameters()).element_size()
    return size * max(kept + trained * (1 + slots) for kept, trained in map(method.needs, tasks))


def activations(train: Training, examples: int, tokens: int, width: int, blocks: int) -> int:
    """An estimate of the numbers that a training step keeps for its backward pass: those of all trained blocks or, with
    train.recompute, the inputs of all blocks and the rest of one. With train.accumulate, it keeps them for one part of
    the batch, and the outputs of the other parts. With train.devices, this is the share of each device."""
    examples = -(-examples // train.devices)
    part = -(-examples // train.accumulate)
    one = tokens * width * (blocks + ACTIVATIONS if train.recompute else ACTIVATIONS * blocks)
    return part * one + (examples - part) * tokens * width


def bytes_of_activations(method: Method) -> int | None:
    """An estimate of the bytes that the activations of the largest step take; None if the number of tokens is
    unknown."""
    encoder, lengths = method.model.encoder, method.stream.data.lengths
    if lengths is not None and len(lengths):
        tokens = int(lengths.max())
    else:
        try:
            example = {name: value.to(method.stream.device) for name, value in encoder.example().items()}
        except NotImplementedError:  # a user's own encoder
            return None
        with torch.no_grad():
            tokens = encoder.embed(example)[0].shape[1]
    prompted = isinstance(method.model, QueryingModel)  # the gradient of prompts passes all blocks, frozen or not
    blocks = len(encoder.blocks) - (0 if prompted else encoder.frozen or 0)
    train = method.training_settings
    size = next(encoder.parameters()).element_size() if train.precision == "float32" else 2
    return size * activations(train, max(train.batch_size, method.own_batch), tokens, encoder.width, blocks)


def bytes_kept(method: Method) -> int:
    """The bytes that the method holds now, where exemplars count as ids and shared parameters count once."""
    return sum(tensor.nbytes for tensors in (method.parameters(), method.buffers()) for tensor in tensors)


def bytes_cached(method: Method) -> int:
    """The bytes that the outputs of frozen blocks may still take (backbone.cache)."""
    caches = {module.cache for module in method.modules() if isinstance(module, Encoder)} - {None}
    return sum(cache.memory_wanted() for cache in caches if cache is not None)


def bytes_free(device: torch.device) -> int | None:
    """The free bytes of a device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = []
    for path in LIMITS:  # the container's limit, and what Linux can provide without swapping
        words = path.read_text().split() if path.exists() else []
        if "MemAvailable:" in words:
            limits.append(1024 * int(words[words.index("MemAvailable:") + 1]))
        elif words and words[0].isdigit():
            limits.append(int(words[0]))
    return min(limits, default=None)


def forget_peak(device: torch.device) -> None:
    """Start a new measurement of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """The peak memory of tensors on a GPU, or else of the process; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    words = status.read_text().split() if status.exists() else []
    return 1024 * int(words[words.index("VmHWM:") + 1]) if "VmHWM:" in words else None


def check_resources(method: Method, tasks: Iterable[int]) -> str:
    """A sentence that says how much memory these tasks need; ConfigError if it does not fit into the free memory."""
    needed, cached = bytes_needed(method, tasks), bytes_cached(method)
    free = bytes_free(device := method.stream.device)
    devices = method.training_settings.devices
    each = f" on each of {devices} devices" if devices > 1 else ""
    told = f"{method.title} will need up to {in_words(needed)}{each} for parameters, gradients and optimiser"
    if cached:
        told += f", {in_words(cached)} more for the cached outputs of frozen blocks (backbone.cache)"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", devices)) if device.type == "cpu" else 1  # processes share its memory
    if free is not None and here * (needed + cached - bytes_kept(method)) > free:
        raise ConfigError(
            f"{told}, without activations, but only {in_words(free)} are free on {device.type}: use fewer tasks, a "
            "smaller backbone, backbone.adapter or backbone.freeze (frozen parameters are kept once), less "
            "backbone.cache, or another method"
        )
    stepping = bytes_of_activations(method)
    return f"{told}, and more for activations" + (f" (about {in_words(stepping)})" if stepping else "")


def in_words(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"
