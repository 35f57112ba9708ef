"""Counts on the CPU the reads that would make the host wait for an accelerator.

The device is called `cpu:0`, which torch treats as the CPU, but which is not equal to `cpu`. A tensor is on it if it
was moved or made there, or computed from such a tensor. Reading its value (`item`, `bool`, `tolist`, `.cpu()`), and
operations whose result has a size that depends on values (`nonzero`, a mask as an index), make the host wait. An
operation on tensors of both devices would be an error on a GPU. So would be numpy's view of a tensor of the device, and
drawing there from a generator of the host.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
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

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "bincount",
    "repeat_interleave",  # by a tensor; by a number it is other operations
    "_linalg_check_errors",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
LEAVES = {Tensor.cpu, Tensor.tolist}
NUMPY = {Tensor.numpy, Tensor.__array__}
# on a CPU, the first looks at values, and the others copy into memory that they do not show
UNSEEN = {F.one_hot, Tensor.__deepcopy__, torch._C._nn.pad_sequence, Tensor.new_tensor}
HOST, DEVICE = torch.device("cpu"), torch.device("cpu:0")
SOURCES = Path(__file__).parent.parent / "src"


class Device:
    """Records which tensors are on the device, what was read from it (inside steps and elsewhere) and what would be an
    error there. Nothing is recorded outside of `watched`."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.step_reads: list[str] = []
        self.other_reads: list[str] = []
        self.mixed: list[str] = []
        self.watching = self.in_step = False

    @property
    def reads(self) -> list[str]:
        return self.step_reads if self.in_step else self.other_reads

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
    def watched(self, *, step: bool = False) -> Iterator[None]:
        before, (self.watching, self.in_step) = (self.watching, self.in_step), (True, step)
        try:
            yield
        finally:
            self.watching, self.in_step = before

    @contextmanager
    def running(self) -> Iterator["Device"]:
        with _Operations(self), _Calls(self):
            yield self


def _without_storage(tensor: Tensor) -> bool:
    """Whether a tensor is only a shape, or one of torch.func's, which compute Fisher information between tasks."""
    return tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The arguments or results of an operation, including those in lists. (torch's pytree takes most of a run.)"""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


class _Operations(TorchDispatchMode):
    """Sees every operation below autograd, including those of the backward pass."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.graph = device, -1  # the last graph whose backward pass had tensors of the device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        values = list(_leaves((*args, *kwargs.values())))
        given = [x for x in values if isinstance(x, Tensor)]
        there = [self.device.holds(x) for x in given]
        graph = torch._C._current_graph_task_id()
        if any(there):
            self.graph = graph
            if any(isinstance(x, torch.Generator) for x in values):
                self.device.note(f"{name} from a generator of the host", self.device.mixed)
            self._check(name, given, there, args)
        out = func(*args, **kwargs)
        # autograd makes zeros for tensors without gradient, on the device of the others
        made_there = any(there) if given else graph == self.graph != -1
        if made_there and (name != "copy_" or there[0]):  # a copy is where its target is
            for x in _leaves((out,)):
                if isinstance(x, Tensor):
                    self.device.put(x)
        return out

    def _check(self, name: str, given: list[Tensor], there: list[bool], args: Any) -> None:
        if name in WAITS or (name == "copy_" and not there[0]):
            self.device.note(name, self.device.reads)
        if name in INDEXING:
            masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype == torch.bool]
            if any(self.device.holds(mask) for mask in masks):
                self.device.note("a mask as an index", self.device.reads)
            foreign = [x for x in args[2:3] if x.ndim and not self.device.holds(x)]
            if not there[0] or foreign:
                self.device.note(f"{name} of {'values' if there[0] else 'a tensor'} on the host", self.device.mixed)
        elif name not in ("copy_", "_to_copy") and not self._together(name, given, there):
            self.device.note(name, self.device.mixed)

    def _together(self, name: str, given: list[Tensor], there: list[bool]) -> bool:
        """Whether all tensors are on the device. A number may be on the host, except one that is changed or stacked."""
        if name in ("stack", "cat") or (name.endswith("_") and not there[0]):
            return all(there)
        return all(on or not x.ndim for x, on in zip(given, there, strict=True))


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
        if func in NUMPY and self.device.holds(args[0]):
            self.device.note("numpy", self.device.mixed)
        if target == HOST and self.device.holds(args[0]):
            self.device.note(func.__name__, self.device.reads)
            with _disable_current_modes():
                return func(args[0].detach().clone(), *args[1:], **kwargs)
        if func in UNSEEN:
            with _disable_current_modes():
                out = func(*args, **kwargs)
            if any(self.device.holds(x) for x in _leaves(args[:1])):
                self.device.put(out)
            return out
        out = func(*args, **kwargs)
        if target == DEVICE and not self.device.holds(args[0]):
            out = out.clone() if out is args[0] else out
            self.device.put(out)
        made = isinstance(kwargs.get("device"), torch.device | str) and torch.device(kwargs["device"]) == DEVICE
        if made and kwargs.get("generator") is not None:
            self.device.note(f"{func.__name__} from a generator of the host", self.device.mixed)
        if made and isinstance(out, Tensor):
            self.device.put(out)
        return out

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        """The device that `.to` is asked for."""
        asked = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.device | str)]
        if asked:
            return torch.device(asked[0])
        other = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        return None if other is None else DEVICE if self.device.holds(other) else HOST


def watching_steps(device: Device, work: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with device.watched(step=True):
            return work(*args, **kwargs)

    return watched
