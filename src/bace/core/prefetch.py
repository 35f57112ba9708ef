"""Batches are made while the previous step runs."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Ids = TypeVar("Ids")
Made = TypeVar("Made")


def made_ahead(make: Callable[[Ids], Made], parts: Sequence[Ids], count: int) -> Iterator[Made]:
    """`make(part)` for each part, in order. A second thread keeps `count` of them ready; with 0 each is made on demand.
    A batch depends only on its ids and view, so the run does not change otherwise."""
    if not count:
        yield from map(make, parts)
        return
    pool, waiting = ThreadPoolExecutor(1, thread_name_prefix="batches"), deque[Future[Made]]()
    try:
        for part in parts:
            waiting.append(pool.submit(make, part))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
