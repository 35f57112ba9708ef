"""Batches are made before the steps that need them, in order, and never more than requested."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checks import assert_same, final_state

import bace
from bace.core.prefetch import made_ahead


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_every_part_is_made_once_and_in_order(count: int) -> None:
    made: list[int] = []

    def make(part: int) -> int:
        made.append(part)
        return part * part

    assert list(made_ahead(make, range(20), count)) == [part * part for part in range(20)]
    assert made == list(range(20))


def test_another_thread_stays_ahead_by_the_given_number() -> None:
    made: list[int] = []
    threads = set()

    def make(part: int) -> int:
        threads.add(threading.current_thread())
        made.append(part)
        return part

    batches = made_ahead(make, range(20), 2)
    assert next(batches) == 0
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # time in which further batches could be made
    assert made == [0, 1, 2]
    batches.close()
    assert threading.current_thread() not in threads


def test_an_error_of_a_part_comes_when_its_turn_comes() -> None:
    batches = made_ahead(lambda part: 1 // (part - 3), range(6), 2)
    for _ in range(3):
        next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)


@pytest.mark.parametrize("method", ["ER", "DER++", "BaCE"])
def test_a_run_with_batches_made_ahead_is_the_same_run(tiny: Any, tmp_path: Path, method: str) -> None:
    for count in (0, 3):
        settings = tiny.settings("image", method=method, **{"train.prefetch": count, "checkpoint.every": 2})
        bace.run(settings, out=tmp_path / str(count))
    assert_same(final_state(tmp_path / "0"), final_state(tmp_path / "3"))
