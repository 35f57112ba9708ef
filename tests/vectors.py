"""A fourth modality, which bace does not know: vectors of numbers, with an encoder of two blocks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bace.data.batch import View
from bace.data.decode import PictureOptions
from bace.data.files import Raw
from bace.data.modality import Examples, Inputs, Modality, Table
from bace.data.settings import DataSettings
from bace.models.encoder import Encoder, PassCounter

NUMBERS, WIDTH = 6, 16  # the numbers in a vector and in a feature


class Vector(Modality):
    name = encoder = "vector"
    plural = "vectors"
    own_data = "my-vectors"
    input_names = ("vector",)
    input_kinds = ("numbers",)

    def read(self, raw: Raw, columns: Sequence[str], rows: Sequence[int], options: PictureOptions) -> Inputs:
        return torch.tensor([value for (value,) in raw.values(columns, rows)])

    def recognises(self, examples: Any) -> bool:
        return isinstance(examples, Tensor) and examples.ndim == 2

    def from_array(self, array: Any, options: PictureOptions) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32).clone()

    def encode(self, tables: Sequence[Table], settings: DataSettings, encoder: Any) -> tuple[Examples, list[int]]:
        return Vectors(torch.cat([table.inputs for table in tables])), [len(table) for table in tables]

    def restore(self, kept: dict[str, Tensor]) -> Examples:
        return Vectors(kept.get("values", torch.zeros(0, NUMBERS)))

    def from_files(self, files: Sequence[Path]) -> list[tuple[str, Any]]:
        return [(f"{file}:{n}", json.loads(line)) for file in files for n, line in enumerate(file.open(), 1)]


VECTOR = Vector()


class Vectors:
    modality = VECTOR
    row_start = positions = lengths = None  # one row per example, all of one size
    random_views = False

    def __init__(self, values: Tensor) -> None:  # (examples, NUMBERS)
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def inputs(self, examples: Tensor, view: View, device: torch.device) -> dict[str, Tensor]:
        return {"vector": self.values[examples].to(device)}

    def take(self, examples: Tensor) -> dict[str, Tensor]:
        return {"values": self.values[examples]}

    def prepend(self, kept: dict[str, Tensor]) -> None:
        self.values = torch.cat([kept["values"], self.values])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:  # (examples, 1, WIDTH)
        return hidden + self.mlp(torch.tanh(self.norm(hidden + self.mix(hidden))))


class VectorEncoder(Encoder):
    """One token per example, which is also its feature."""

    modality = movable = "vector"
    attention_end, mlp_end = "mix", "mlp"
    mlp_branch, query_and_value = ("norm", "mlp"), ("mix", "mlp")  # the Linears that LoRA changes

    def __init__(self) -> None:
        nn.Module.__init__(self)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embeddings, self.blocks = nn.Linear(NUMBERS, WIDTH), nn.ModuleList([Block(), Block()])
        self.width, self.norm, self.passes = WIDTH, nn.Identity(), PassCounter()
        self.frozen = self.cache = None

    def embed(self, inputs: dict[str, Tensor]) -> tuple[Tensor, None]:  # (examples, 1, WIDTH)
        return self.embeddings(inputs["vector"])[:, None], None
