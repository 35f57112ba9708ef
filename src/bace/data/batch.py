"""Batches of rows.

A *row* is what gets a label: an image, a text, or a word of a sentence. An *example* is what is stored and replayed: an
image, a text, a sentence. For images and texts the two are the same thing and share their ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

View = int | None  # the key of a random view (see Position.view); None is the clean view
MIRRORED: View = -1  # the mirrored clean view, for pictures that are mirrored in training; others keep the clean view
NO_IDS = torch.zeros(0, dtype=torch.int64)


class Keyed(dict[str, Tensor]):
    """Inputs with a key for each example, under which earlier results for the same view are stored. A changed copy,
    `{**inputs, ...}`, is an ordinary dict without keys, so nothing is looked up for it.

    keys: (examples,) int64, on the host. A negative key marks a random view, which may never repeat.
    """

    def __init__(self, inputs: dict[str, Tensor], keys: Tensor) -> None:
        super().__init__(inputs)
        self.keys_of_examples = keys


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A GPU fetches it from pinned memory while it continues to compute."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Batch:
    """Rows to learn from or to predict."""

    inputs: dict[str, Tensor]  # what the encoder takes
    targets: Tensor  # (rows,)  class ids in order of arrival
    examples: Tensor  # (examples,)  ids in the stream
    rows: Tensor  # (rows,)  ids of rows in the stream
    at: Tensor | None = None  # (rows, 2)  example position in the batch and token position of each row; tokens only

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def owner(self) -> Tensor:
        """(rows,) position of each row's example in the batch."""
        return torch.arange(len(self), device=self.targets.device) if self.at is None else self.at[:, 0]

    def pick(self, rows: Tensor) -> "Batch":  # (picked,) positions of rows in the batch
        """Exactly these rows, in this order, with only their examples and with no more padding than these need."""
        examples, at = rows, None
        if self.at is not None:
            examples, inverse = torch.unique(self.at[rows, 0], return_inverse=True)
            at = torch.stack([inverse, self.at[rows, 1]], dim=1)
        inputs = {key: value[examples] for key, value in self.inputs.items()}
        if isinstance(self.inputs, Keyed):
            inputs = Keyed(inputs, self.inputs.keys_of_examples[examples.cpu()])
        if "attention_mask" in inputs:
            length = int(inputs["attention_mask"].sum(1).max())
            inputs = {key: value[:, :length] for key, value in inputs.items()}
        return Batch(inputs, self.targets[rows], self.examples[examples.cpu()], self.rows[rows], at)

    def part(self, examples: slice) -> tuple["Batch", slice | Tensor]:
        """These examples with all their rows and their padding, and the positions of these rows in the batch."""
        inputs = {key: value[examples] for key, value in self.inputs.items()}
        if isinstance(self.inputs, Keyed):
            inputs = Keyed(inputs, self.inputs.keys_of_examples[examples])
        rows: slice | Tensor = examples
        at = None
        if self.at is not None:
            owner = self.at[:, 0]
            rows = ((owner >= examples.start) & (owner < examples.stop)).nonzero()[:, 0]
            at = self.at[rows] - torch.tensor([examples.start, 0], device=self.at.device)
        ids = self.rows[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Batch(inputs, self.targets[rows], self.examples[examples], ids, at), rows

    @staticmethod
    def cat(first: "Batch", second: "Batch | None") -> "Batch":
        """Both batches as one, for a single pass through the network; texts are padded to the longer of the two."""
        if second is None:
            return first
        at = None
        if first.at is not None and second.at is not None:
            shift = torch.tensor([len(first.examples), 0], device=second.at.device)
            at = torch.cat([first.at, second.at + shift])
        inputs = {key: _cat_padded(first.inputs[key], second.inputs[key]) for key in first.inputs}
        if isinstance(first.inputs, Keyed) and isinstance(second.inputs, Keyed):
            inputs = Keyed(inputs, torch.cat([first.inputs.keys_of_examples, second.inputs.keys_of_examples]))
        return Batch(
            inputs,
            torch.cat([first.targets, second.targets]),
            torch.cat([first.examples, second.examples]),
            torch.cat([first.rows, second.rows]),
            at,
        )


def _cat_padded(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 2 and a.shape[1] != b.shape[1]:  # token ids and masks; padding may hold any id
        length = max(a.shape[1], b.shape[1])
        a, b = (torch.nn.functional.pad(x, (0, length - x.shape[1])) for x in (a, b))
    return torch.cat([a, b])
