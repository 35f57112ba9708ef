"""The processes of one run. With a single process, these functions have no effect.

Every rank runs the same program. Draws are functions of names and positions, so all ranks know every batch. A rank
passes its share of the batch through the encoders and gets back the rows of all shares (`gather`). From these rows all
ranks compute the same loss, whichever rows it couples, and therefore the same tables, memory and weights.

The gradient is exact. The gradient of a parameter has two parts. The first comes through the encoders, and a rank knows
only its share of it. Every rank knows the second part (heads, penalties) in full. `gather` multiplies the gradient that
flows back into a share by the number of ranks. The mean over the ranks is then the sum of all shares of the first part,
plus the second part.
"""

import contextlib
import datetime
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from bace.errors import ConfigError, RankLost, RanksDiffer
from bace.progress import is_first, launched

T = TypeVar("T")
BUCKET = 2**23  # numbers that are sent at once
PATIENCE = datetime.timedelta(days=1)  # one rank may decode pictures for hours; a dead rank is noticed at once

_alone = False  # whether this rank works on something of its own


# -- ranks


def size() -> int:
    """The number of ranks; 1 outside of `joined`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def index() -> int:
    return dist.get_rank() if size() > 1 else 0


def several() -> bool:
    """Whether passes are divided among ranks."""
    return size() > 1 and not _alone


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Inside this block, the processes that were started together are ranks of one run. `device`: train.device."""
    if not launched() or dist.is_initialized():
        yield
        return
    on_gpus = device != "cpu" and torch.cuda.is_available()
    if on_gpus:
        if device not in ("auto", "cuda"):
            raise ConfigError(f"train.device is '{device}', but every process needs its own GPU: leave it at auto")
        if (own := int(os.environ.get("LOCAL_RANK", "0"))) >= (gpus := torch.cuda.device_count()):
            raise ConfigError(f"there are more processes on this machine than GPUs ({gpus}): use train.devices {gpus}")
        torch.cuda.set_device(own)
    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE
    )
    try:
        yield
    except Exception as error:  # the group stays: dissolving it would wait for ranks that may be dead
        error.said = _said(store, error)  # type: ignore[attr-defined]
        raise
    dist.destroy_process_group()


def _said(store: Any, error: Exception) -> bool:
    """Whether another rank reports this error. A lost rank need not be reported if that rank gave its own reason."""
    with contextlib.suppress(RuntimeError):
        if isinstance(error, RankLost):
            return bool(store.add("bace errors", 0) or store.add("bace lost", 1) > 1)
        store.add("bace errors", 1)
        return bool(store.add(f"bace {hashlib.blake2b(str(error).encode()).hexdigest()}", 1) > 1)
    return False


def check_count(devices: int) -> None:
    """Refuse a number of devices that is not the number of ranks."""
    if devices != size():
        raise ConfigError(
            f"train.devices is {devices}, but this is one process: use `bace run`, which starts {devices} of them, or "
            f"start your program with `torchrun --nproc-per-node {devices}`. Use --workers to spread many runs"
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside this block, this rank works on its own: passes are not divided, and no rank waits for it."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


@contextlib.contextmanager
def first_goes_first() -> Iterator[None]:
    """The first rank finishes this block before the others begin, so they find what it decodes or downloads."""
    if not is_first():
        wait()
    with alone():
        yield
    if is_first():
        wait()


# -- passes and gradients


def share(examples: int) -> slice:
    """The examples of a batch that this rank passes. If there are fewer examples than ranks, some ranks have none."""
    start, stop = (examples * rank // size() for rank in (index(), index() + 1))
    return slice(start, stop)


def gather(
    own: Tensor,  # (own rows, ...)
    where: slice | Tensor,  # their positions among all rows
    rows: int,
) -> Tensor:  # (rows, ...)
    """The rows of all ranks, on every rank."""
    found: Tensor = _Gather.apply(own, where, rows)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, where: slice | Tensor, rows: int) -> Tensor:
        ctx.where = where
        whole = own.new_zeros(rows, *own.shape[1:])
        whole[where] = own
        _add_up(whole)  # the others add zeros, so every row equals the row of its rank bit for bit
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return size() * gradient[ctx.where], None, None


def mean(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The exact gradients, from those that this rank has computed. A method that calls torch.autograd.grad, or
    backward(), by itself has to apply this to its gradients; the trainer applies it to the gradients of a step."""
    given = list(gradients)
    if not several():
        return given
    found = []
    for bucket in _buckets(given):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        _add_up(flat)
        parts = (flat / size()).split([gradient.numel() for gradient in bucket])
        found += [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
    return found


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter]) -> None:
    """`mean` of their `.grad`, in place."""
    if several():
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient, exact in zip(gradients, mean(gradients), strict=True):
            gradient.copy_(exact)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(other.numel() for other in bucket) + tensor.numel() > BUCKET
        if bucket and (full or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


# -- sums, agreements, messages


def total(value: Tensor) -> Tensor:
    """The sum over all ranks."""
    if not several():
        return value
    value = value.clone()
    _add_up(value)
    return value


def dealt(parts: Sequence[T]) -> Sequence[T]:
    """The parts of some work that this rank does."""
    return parts[index() :: size()]


def agree(*numbers: int) -> list[int]:
    """The largest value of each number on any rank."""
    if not several():
        return list(numbers)
    found = torch.tensor(numbers)
    _together(lambda: dist.all_reduce(found, dist.ReduceOp.MAX))
    return [int(number) for number in found]


def wait() -> None:
    """Wait until all ranks are here."""
    agree(0)


def texts(own: str) -> list[str]:
    """The texts of all ranks, in the order of the ranks."""
    if not several():
        return [own]
    written = own.encode()
    (length,) = agree(len(written))
    mine = torch.tensor([*len(written).to_bytes(8, "big"), *written, *bytes(length - len(written))], dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(size())]
    _together(lambda: dist.all_gather(found, mine))
    raw = [bytes(text.tolist()) for text in found]
    return [text[8 : 8 + int.from_bytes(text[:8], "big")].decode() for text in raw]


def check_same(found: dict[str, str]) -> None:
    """Refuse to continue if any of these fingerprints, by name, differs between ranks."""
    if not several():
        return
    lists = [dict(line.split("\t") for line in text.split("\n")) for text in texts(_lines(found))]
    for rank, other in enumerate(lists):
        if different := [name for name in {**lists[0], **other} if lists[0].get(name) != other.get(name)]:
            raise RanksDiffer(
                f"the processes of this run have drifted apart: '{different[0]}' of rank {rank} differs from rank 0's "
                f"({len(different)} of {len(lists[0])} differ). No checkpoint was written. Give all ranks the same "
                "data, machines and versions; a method that computes gradients by itself has to take `ranks.mean` of "
                "them"
            )


def _lines(found: dict[str, str]) -> str:
    return "\n".join(f"{name}\t{value}" for name, value in found.items())


def _add_up(tensor: Tensor) -> None:
    _together(lambda: dist.all_reduce(tensor))


def _together(exchange: Callable[[], object]) -> None:
    try:
        exchange()
    except RuntimeError as error:  # gloo: the connection was closed; nccl: DistBackendError, which is one
        raise RankLost(
            f"another process of this run has ended ({str(error).splitlines()[0]:.100}). The last checkpoint is kept: "
            "continue with --resume"
        ) from error
