"""The share of a batch that each process of a run passes (see ranks.py)."""

from torch import Tensor

from bace import ranks
from bace.data.batch import Batch


class Share:
    """This rank's share of a batch; the whole batch in a run of one process.

    A rank without an example passes the first one, so that it takes part in collective operations, but its rows do not
    count.

    Attributes:
        batch: the examples that this rank passes, with their rows. The padding of texts does not change.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.cut = batch, ranks.several()
        if self.cut:
            self.examples = len(next(iter(batch.inputs.values())))
            self.rows = self.examples if batch.at is None else len(batch)
            own = ranks.share(self.examples)
            self.passed = own if own.start < own.stop else slice(0, 1)
            self.batch, rows_passed = batch.part(self.passed)
            self.own_examples, self.own_rows = own, rows_passed if self.passed is own else slice(0)

    def own(self, values: Tensor) -> Tensor:  # (examples, ...) -> (passed examples, ...)
        return values[self.passed] if self.cut else values

    def of_all_examples(self, values: Tensor) -> Tensor:  # (passed examples, ...) -> (examples, ...)
        return self._gathered(values, self.own_examples, self.examples) if self.cut else values

    def of_all_rows(self, values: Tensor) -> Tensor:  # (passed rows, ...) -> (rows, ...)
        return self._gathered(values, self.own_rows, self.rows) if self.cut else values

    def sum(self, values: Tensor) -> Tensor:  # (passed examples, ...) -> (...)
        """The sum over all examples of values within a pass."""
        return ranks.total(self._counted(values).sum(0)) if self.cut else values.sum(0)

    def _gathered(self, values: Tensor, where: slice | Tensor, count: int) -> Tensor:
        return ranks.gather(self._counted(values), where, count)

    def _counted(self, values: Tensor) -> Tensor:
        return values if self.passed is self.own_examples else values[:0]
