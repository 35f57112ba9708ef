"""The features of a task's training examples, which several readers share."""

import torch
from torch import Tensor

from bace import ranks
from bace.core.stream import Stream
from bace.models.encoder import Encoder
from bace.models.model import Model

ROOM = 2**29  # the maximum number of bytes that are kept


class TaskFeatures:
    """The features of a task's training examples in their clean view, from one pass after training: for statistics,
    class means, herding and studies. They are found again as long as the encoder's weights are the same.

    Only the pass of exactly the task's examples is kept, so that it has the same batches, and the same last digits, in
    a resumed run that has to repeat it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.stream: Stream | None = None  # whose rows these are: a Learner numbers examples anew in every call
        self.rows: Tensor | None = None  # (kept,) ids, ascending
        self.features = torch.zeros(0)  # (kept, width)
        self.weights: list[float] = []

    def keep(self, model: Model, stream: Stream, rows: Tensor, features: Tensor) -> None:  # (rows,) ids, (rows, width)
        if features.nbytes <= ROOM and not depends_on_more(model):
            self.stream, (self.rows, order) = stream, rows.sort()
            self.features, self.weights = features[order.to(features.device)], fingerprint(model.encoder)

    def find(self, model: Model, stream: Stream, rows: Tensor) -> Tensor | None:  # (rows,) ids -> (rows, width)
        """The features of these rows, if all of them are kept and still hold."""
        if self.rows is None or stream is not self.stream or not bool(torch.isin(rows, self.rows).all()):
            return None
        if depends_on_more(model):
            return None
        if fingerprint(model.encoder) != self.weights:
            self.clear()
            return None
        return self.features[torch.searchsorted(self.rows, rows).to(self.features.device)]


def depends_on_more(model: Model) -> bool:
    """Whether features depend on more than the weights of one encoder. While a rank works alone, nothing is kept or
    found: the others would wait for it in the next pass."""
    plain = type(model) is Model and isinstance(model.encoder, Encoder) and not model.encoder.states
    return not plain or (ranks.size() > 1 and not ranks.several())


def fingerprint(encoder: Encoder) -> list[float]:
    """Numbers that change with the weights, even with those that are written past autograd (`p.data`)."""
    weights = [*encoder.parameters(), *encoder.buffers()]
    with torch.no_grad():
        norms = torch.stack([w.float().norm() for w in weights]).tolist() if weights else []
    return [*norms, *(0.0 if w.is_inference() else float(w._version) for w in weights)]
