"""The scale A and shift B of a bias correction after each task (docs/bace.md 7)."""

from bace.config.schema import Config
from bace.core.stream import Stream
from bace.core.study import Observation, Record, Skipped, Study, columns


def after_task(seen: Observation) -> Record:
    learned = seen.method.report()
    if not {"A", "B"} <= learned.keys():
        raise Skipped(f"{seen.method.title} learns no bias correction (with these settings)")
    return {"A": learned["A"], "B": learned["B"]}


def collect(records: list[Record], stream: Stream, config: Config) -> Record:
    return columns(records)


STUDY = Study(after_task, collect)
