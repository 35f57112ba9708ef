"""The stream of a benchmark, or of a user's own examples, made for an encoder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bace.core.stream import Stream, Task
from bace.data.batch import Examples, Modality
from bace.data.benchmarks import Cut, Part, check_parts, first_of_table, hold_out
from bace.data.decode import Pictures, decode_pictures
from bace.data.modalities.image import Images
from bace.data.modalities.text import load_tokenizer, tokenize_texts
from bace.data.modalities.token import tokenize_sentences
from bace.data.table import Inputs, Table
from bace.errors import ConfigError, DataError
from bace.models.backbones import backbone_path
from bace.models.encoders import Encoder, ImageEncoder
from bace.randomness import generator


def make_stream(parts: list[Part], cut: Cut, encoder: Encoder, backbone: str, seed: int) -> Stream:
    """Number the classes in order of arrival and the examples through all tasks; check everything on the way."""
    modality = parts[0].train.modality
    parts = [
        replace(
            part,
            train=first_of_table(part.train, cut.train_per_task),
            test=first_of_table(part.test, cut.test_per_task),
        )
        for part in parts
    ]
    check_parts(parts)
    tables = [table for part in parts for table in (part.train, part.test)]
    data, pieces = make_examples(modality, tables, cut, encoder, backbone)
    names = class_names(modality, [part.classes for part in parts])
    number = {name: c for c, name in enumerate(names)}
    ranges = class_ranges(modality, [part.classes for part in parts])
    tasks, targets, first = [], [], 0
    for t, part in enumerate(parts):
        ids = []
        for table, split in ((part.train, pieces[2 * t]), (part.test, pieces[2 * t + 1])):
            targets.append(table_targets(table, part, number))
            ids.append(torch.arange(first, first + split))
            first += split
        # a sentence shows several classes, so sentences are held out as if they were of one
        classes = torch.zeros_like(ids[0]) if modality == "token" else targets[-2]
        train, valid = hold_out(ids[0], classes, cut.val_fraction, generator(seed, "validation", t))
        tasks.append(Task(t, part.name, ranges[t], train, valid, ids[1]))
    return Stream(data, torch.cat(targets), tasks, names)


def make_examples(
    modality: Modality, tables: Sequence[Table], cut: Cut, encoder: Encoder, backbone: str
) -> tuple[Examples, list[int]]:
    """All tables' examples as one, and how many each table has become."""
    if (modality == "image") != (encoder.modality == "image"):
        data = {"image": "images", "text": "texts", "token": "sentences"}[modality]
        raise ConfigError(
            f"backbone '{backbone}' takes {encoder.modality}s, but the data are {data}: choose another with --backbone "
            "(see `bace list backbones`)"
        )
    if modality == "image":
        assert isinstance(encoder, ImageEncoder)
        if encoder.channels != 3:
            raise ConfigError(
                f"backbone '{backbone}' takes pictures of {encoder.channels} channels: choose one that takes 3 (colour)"
            )
        pixels = all_pixels([table.inputs for table in tables if len(table)], cut.image_size)
        stored = min(pixels.shape[-2:])
        images = Images(
            pixels,
            size=encoder.image_size,
            mean=encoder.mean,
            std=encoder.std,
            augment=cut.augment,
            flip=cut.flip and flips(tables),
            padding=min(4, -(-stored // 8)),  # 4 for pictures of 28 and 32, less for smaller ones
            window=round(0.875 * stored) if stored >= 128 else None,  # 224 of 256
        )
        return images, [len(table) for table in tables]
    tokenizer = load_tokenizer(str(backbone_path(backbone)))
    inputs: list[Any] = [example for table in tables for example in table.inputs]  # type: ignore[union-attr]
    if modality == "text":
        return tokenize_texts(inputs, tokenizer, cut.max_length), [len(table) for table in tables]
    entities, windows = tokenize_sentences(inputs, tokenizer, cut.max_length)
    counts, first = [], 0
    for table in tables:
        counts.append(sum(len(window) for window in windows[first : first + len(table)]))
        first += len(table)
    return entities, counts


def all_pixels(inputs: Sequence[Inputs], image_size: int | None) -> Tensor:  # (examples, channels, height, width)
    """The pictures of all tables, one after the other."""
    if promised := [pictures for pictures in inputs if isinstance(pictures, Pictures)]:
        return decode_pictures(promised, image_size)
    tensors = [pixels for pixels in inputs if isinstance(pixels, Tensor)]
    shapes = {tuple(pixels.shape[1:]) for pixels in tensors}
    if len(shapes) > 1:
        raise DataError(f"pictures of different shapes in one stream: {sorted(shapes)}; give them one size")
    return torch.cat(tensors)


def flips(tables: Sequence[Table]) -> bool | Tensor:  # (examples,)
    """Which pictures may be mirrored."""
    if len({table.mirror for table in tables}) == 1:
        return tables[0].mirror
    return torch.cat([torch.full((len(table),), table.mirror) for table in tables])


def class_names(modality: Modality, classes: list[list[str]]) -> list[str]:
    """Class names in order of arrival; for entities O, then B- and I- of each type."""
    flat = [name for own in classes for name in own]
    return ["O", *(f"{prefix}-{name}" for name in flat for prefix in "BI")] if modality == "token" else flat


def class_ranges(modality: Modality, classes: list[list[str]]) -> list[range]:
    """The class ids of each task; O is one of the first's."""
    ends = [len(class_names(modality, classes[: t + 1])) for t in range(len(classes))]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def table_targets(table: Table, part: Part, number: dict[str, int]) -> Tensor:  # (rows,)
    if table.modality == "token":  # in a task only its own types are labelled, all else is O
        own = set(part.classes)
        tags = [tag if tag[2:] in own else "O" for sentence in table.labels for tag in sentence]
        return torch.tensor([number[tag] for tag in tags], dtype=torch.int64)
    return torch.tensor([number[str(label)] for label in table.labels], dtype=torch.int64)
