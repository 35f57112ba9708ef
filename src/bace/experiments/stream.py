"""The stream of a benchmark, or of a user's own examples, made for an encoder."""

from dataclasses import replace

import torch

from bace.core.stream import Stream, Task
from bace.data.benchmarks import TaskTables, check_parts, first_of_table, hold_out
from bace.data.settings import DataSettings
from bace.models.encoder import Encoder
from bace.randomness import generator


def make_stream(parts: list[TaskTables], settings: DataSettings, encoder: Encoder, backbone: str, seed: int) -> Stream:
    """Number the classes in order of arrival and the examples across all tasks, and check everything."""
    modality = parts[0].train.modality
    parts = [
        replace(
            part,
            train=first_of_table(part.train, settings.train_per_task),
            test=first_of_table(part.test, settings.test_per_task),
        )
        for part in parts
    ]
    check_parts(parts)
    modality.check_encoder(encoder, backbone)
    data, counts = modality.encode([table for part in parts for table in (part.train, part.test)], settings, encoder)
    classes = [part.classes for part in parts]
    names, ranges = modality.class_names(classes), modality.class_ranges(classes)
    number = {name: c for c, name in enumerate(names)}
    ids = torch.arange(sum(counts)).split(counts)
    tasks, targets = [], []
    for t, part in enumerate(parts):
        targets += [modality.targets(table.labels, part.classes, number) for table in (part.train, part.test)]
        # a sentence shows several classes, so sentences are held out as if they had one class
        kinds = targets[-2] if modality.one_label else torch.zeros_like(ids[2 * t])
        train, valid = hold_out(ids[2 * t], kinds, settings.val_fraction, generator(seed, "validation", t))
        tasks.append(Task(t, part.name, ranges[t], train, valid, ids[2 * t + 1]))
    return Stream(data, torch.cat(targets), tasks, names)
