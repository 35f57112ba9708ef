"""Counts on the CPU the reads that would make the host wait for an accelerator.

The device is called `cpu:0`, which torch treats as the CPU, but which is not equal to `cpu`. A tensor is on it if it
was moved or made there, or computed from such a tensor. Reading its value (`item`, `bool`, `tolist`, `.cpu()`), and
operations whose result has a size that depends on values (`nonzero`, a mask as an index), make the host wait. An
operation on tensors of both devices would be an error on a GPU.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "bincount",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
LEAVES = {Tensor.cpu, Tensor.tolist, Tensor.numpy}
HOST, DEVICE = torch.device("cpu"), torch.device("cpu:0")
SOURCES = Path(__file__).parent.parent / "src"


class Device:
    """Records which tensors are on the device and what was read from it. Nothing is recorded outside of `watched`."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.reads: list[str] = []
        self.mixed: list[str] = []
        self.watching = False

    def holds(self, tensor: object) -> bool:
        if not isinstance(tensor, Tensor) or _without_storage(tensor):
            return False
        found = self.storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def put(self, tensor: Tensor) -> None:
        if not _without_storage(tensor):
            reference = StorageWeakRef(tensor.untyped_storage())
            self.storages[reference.cdata] = reference

    def note(self, what: str, into: list[str]) -> None:
        if self.watching:
            ours = [frame for frame in traceback.extract_stack() if str(SOURCES) in frame.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}" if ours else "elsewhere"
            into.append(f"{what} at {place}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        before, self.watching = self.watching, True
        try:
            yield
        finally:
            self.watching = before

    @contextmanager
    def running(self) -> Iterator["Device"]:
        with _Operations(self), _Calls(self):
            yield self


def _without_storage(tensor: Tensor) -> bool:
    """Whether a tensor is only a shape, or one of torch.func's, which compute Fisher information between tasks."""
    return tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class _Operations(TorchDispatchMode):
    """Sees every operation below autograd, including those of the backward pass."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [self.device.holds(x) for x in given]
        if any(there):
            self._check(name, given, there, args)
        out = func(*args, **kwargs)
        # autograd makes zeros for tensors without gradient, on the device of the others
        if any(there) or (not given and torch._C._current_graph_task_id() != -1):
            tree_map_only(Tensor, self.device.put, out)
        return out

    def _check(self, name: str, given: list[Tensor], there: list[bool], args: Any) -> None:
        if name in WAITS:
            self.device.note(name, self.device.reads)
        if name in INDEXING:
            masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype == torch.bool]
            if any(self.device.holds(mask) for mask in masks):
                self.device.note("a mask as an index", self.device.reads)
            if not there[0]:
                self.device.note(f"{name} of a tensor on the host", self.device.mixed)
        elif not all(on or not x.ndim for x, on in zip(given, there, strict=True)) and name not in (
            "copy_",
            "_to_copy",
        ):
            self.device.note(name, self.device.mixed)


class _Calls(TorchFunctionMode):
    """Sees moves between host and device above autograd; on the CPU they would do nothing."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:  # each access returns a new object
            return DEVICE if self.device.holds(args[0]) else HOST
        target = self._target(args, kwargs) if func is Tensor.to else HOST if func in LEAVES else None
        if func is Tensor.to and sys._getframe(1).f_code.co_filename == clip_grad.__file__:
            target = DEVICE  # it takes the device of the gradients from torch itself
        if target == HOST and self.device.holds(args[0]):
            self.device.note(func.__name__, self.device.reads)
            with _disable_current_modes():
                return func(args[0].detach().clone(), *args[1:], **kwargs)
        if func is F.one_hot:  # it looks at the values only on a CPU
            with _disable_current_modes():
                out = func(*args, **kwargs)
            if self.device.holds(args[0]):
                self.device.put(out)
            return out
        out = func(*args, **kwargs)
        if target == DEVICE and not self.device.holds(args[0]):
            out = out.clone() if out is args[0] else out
            self.device.put(out)
        if kwargs.get("device") == DEVICE and isinstance(out, Tensor):
            self.device.put(out)
        return out

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        """The device that `.to` is asked for."""
        asked = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.device | str)]
        if asked:
            return torch.device(asked[0])
        other = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        return None if other is None else DEVICE if self.device.holds(other) else HOST


def watching(device: Device, work: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with device.watched():
            return work(*args, **kwargs)

    return watched
