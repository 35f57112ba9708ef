"""Encoder and head in one module, the network that methods use."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from bace import ranks
from bace.data.batch import Batch
from bace.models.encoder import Encoder
from bace.models.heads import Head
from bace.models.share import Share
from bace.randomness import derive, dropout_drawn_from

Branch = tuple[Tensor, Sequence[Tensor]]  # (rows, width), and (examples, tokens, width) for each block if asked for


class Output(NamedTuple):
    """The result of one pass."""

    features: Tensor  # (rows, width)
    logits: Tensor  # (rows, classes)
    taps: tuple[Tensor, ...] = ()  # (examples, tokens, width) for each block, if asked for
    match: Tensor | None = None  # (examples, chosen) cosines of query and key, of models with prompts


class Model(nn.Module):
    """Rows in, features and logits out."""

    dropout_seed: Callable[[], int] | None = None  # of the step at hand; None outside of a run
    # whether it passes its encoders only by `read_rows`, so that it can read a batch in parts; a subclass with its own
    # pass must declare this
    in_pieces: ClassVar[bool] = True
    _once: Batch | None = None  # see `passed_once`
    _features: Tensor | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"forward", "branches"} & vars(cls).keys():
            cls.in_pieces = vars(cls).get("in_pieces", False)

    def __init__(self, encoder: Encoder, head: Head, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder, self.head, self.precision = encoder, head, precision
        self.has_dropout = _drops(encoder)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and find out whether anything is dropped in train mode, because adapters may have been added. A
        pass only reads the result."""
        super().train(mode)
        if mode:
            self.has_dropout = _drops(self.encoder)
        return self

    def forward(self, batch: Batch, *, name: str = "main", taps: bool = False) -> Output:
        """One pass. `name` distinguishes the passes of a step: each has its own dropout, whatever ran before. `taps`
        requests the output of each block, before the final LayerNorm."""
        again = batch is self._once and not taps and not torch.is_grad_enabled()
        if again and self._features is not None:
            return Output(self._features, self.head(self._features))
        features, tapped = self._pass(self.branches(batch, taps), batch, name)
        self._features = features if again else self._features
        return Output(features, self.head(features), tapped)

    @contextmanager
    def passed_once(self, batch: Batch) -> Iterator[None]:
        """A context in which this batch passes the encoder once, if it needs no gradient: several rules of prediction
        share its features. An encoder with states (adapters or gates of which one is chosen) passes it every time."""
        self._once = None if getattr(self.encoder, "states", ()) else batch
        try:
            yield
        finally:
            self._once = self._features = None

    def branches(self, batch: Batch, taps: bool) -> Iterator[Branch]:
        """The features of the rows from each encoder. Here there is one encoder."""
        yield read_rows(self.encoder, batch, taps)

    def low_precision(self, batch: Batch) -> AbstractContextManager[Any]:
        """The context of passes in this model's precision."""
        full = self.precision == torch.float32
        return nullcontext() if full else torch.autocast(batch.targets.device.type, self.precision)

    def _pass(
        self, branches: Iterable[Branch], batch: Batch, name: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # (rows, width), taps
        if self.dropout_seed is None or not (self.training and self.has_dropout):
            return self._read(branches, batch)
        rank = (ranks.index(),) if ranks.several() else ()  # each rank has its own dropout for its share
        with dropout_drawn_from(derive(self.dropout_seed(), name, *rank)):
            return self._read(branches, batch)

    def _read(self, branches: Iterable[Branch], batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        # every pass of the encoder has the same precision; head and losses are computed in full precision
        with self.low_precision(batch):
            rows, taps = zip(*branches, strict=True)
        features, tapped = (rows[0], taps[0]) if len(rows) == 1 else (torch.cat(rows, 1), _side_by_side(taps))
        if self.precision == torch.float32:
            return features, tuple(tapped)
        return features.float(), tuple(tap.float() for tap in tapped)


def read_rows(encoder: Encoder, batch: Batch, taps: bool = False) -> Branch:
    """The features of a batch's rows from one encoder. Every process of the run passes its share of them."""
    share = Share(batch)
    batch = share.batch
    read = functools.partial(_read_examples, encoder, taps, batch.at is None and encoder.shortens)
    if encoder.pieces == 1 or not torch.is_grad_enabled():
        hidden, tapped = read(batch.inputs)
    else:
        size = -(-len(next(iter(batch.inputs.values()))) // encoder.pieces)
        pieces = zip(*(value.split(size) for value in batch.inputs.values()), strict=True)
        outputs = [encoder.again(read, dict(zip(batch.inputs, piece, strict=True))) for piece in pieces]
        parts, taps_of_parts = zip(*outputs, strict=True)
        hidden, tapped = torch.cat(parts), [torch.cat(block) for block in zip(*taps_of_parts, strict=True)]
    rows = encoder.rows(hidden, batch.inputs, batch.at)
    return share.of_all_rows(rows), [share.of_all_examples(tap) for tap in tapped]


def _read_examples(encoder: Encoder, taps: bool, pooled: bool, inputs: dict[str, Tensor]) -> Branch:
    if pooled and not taps:
        return encoder(inputs, pooled=True), ()
    return encoder(inputs, taps=True) if taps else (encoder(inputs), ())


def _side_by_side(taps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Taps of several branches, block by block."""
    return [torch.cat(block, -1) for block in zip(*taps, strict=True)]


def _drops(encoder: Encoder) -> bool:
    """Whether an encoder in train mode drops something."""
    return any(_is_random(module) for module in encoder.modules())


def _is_random(module: nn.Module) -> bool:
    """Whether a module drops something in train mode."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = (vars(module).get(name, 0) for name in ("attention_dropout", "dropout"))  # CLIP and ViT have the second
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates) or "DropPath" in type(module).__name__


def parameter_count(module: nn.Module, *, trained_only: bool = False) -> int:
    """The number of parameters of a module, or of those that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained_only)


def frozen_copy(model: Model) -> Model:
    """A teacher: a copy of the current model that is never trained and always in eval mode (the trainer only switches
    the module that a stage trains)."""
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def average_into(teacher: nn.Module, student: nn.Module, beta: float | Tensor) -> None:
    """theta0 <- beta theta0 + (1 - beta) theta, for all parameters of the teacher (its head may have fewer rows)."""
    newer = {**dict(student.named_parameters()), **dict(student.named_buffers())}
    for name, value in (*teacher.named_parameters(), *teacher.named_buffers()):
        if value.is_floating_point():
            value.lerp_(newer[name], (1 - beta).to(value.dtype) if isinstance(beta, Tensor) else 1 - beta)
        else:
            value.copy_(newer[name])
