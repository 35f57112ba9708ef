"""Named random streams. Every draw is a pure function of its name and never depends on earlier draws.

Therefore ablations are paired (switching off one term of a loss changes no other draw) and resume is exact (there is no
generator state to save).
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def derive(*parts: int | str) -> int:
    """A 63-bit seed for the stream named by `parts`, for example (seed, "order", task, stage, epoch)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A fresh generator at the start of the stream named by `parts`."""
    return torch.Generator().manual_seed(derive(*parts))


def seed_dropout(seed: int) -> None:
    """Seed the generators of dropout. (`torch.manual_seed` does more, which takes a millisecond.)"""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def dropout_drawn_from(seed: int) -> Iterator[None]:
    """Dropout inside this block depends only on the seed, and later draws do not depend on the block."""
    before = torch.default_generator.get_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    seed_dropout(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        torch.cuda.set_rng_state_all(on_gpus)


def uniform(
    key: int,
    ids: Tensor,  # (examples,) int64
    lanes: int,
) -> Tensor:  # (lanes, examples) float64 in [0, 1)
    """A number for each lane and example: a hash of (key, lane, id), which does not depend on the rest of the batch."""
    keys = torch.tensor([derive(key, lane) for lane in range(lanes)])
    state = _mix(ids + keys[:, None])
    state = _mix(state + _signed(0x9E3779B97F4A7C15))
    return (_shift(state, 11)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), on wrapping int64."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64's own shift keeps the sign


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >= 1 << 63 else x
