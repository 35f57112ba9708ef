"""The examples of all waiting requests go through the model together."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from bace.errors import BaceError

Predict = Callable[[list[Any]], Sequence[Any]]  # an answer for each example


class Overloaded(BaceError):
    """Too many examples are waiting."""


@dataclass(frozen=True, eq=False)
class Job:
    """The examples of one request, and the model that they were read for."""

    predict: Predict
    examples: list[Any]
    answers: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """One thread that runs the model. While it is busy, requests wait. It then takes as many as fit into a batch and
    does not wait for more.

    Args:
        most: examples that are passed together; a request with more examples is passed alone.
        most_waiting: examples that may wait; further requests are refused.
    """

    def __init__(self, most: int, most_waiting: int = 4096) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.waiting = self.requests = self.examples = self.batches = 0
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.thread.start()

    def submit(self, predict: Predict, examples: list[Any]) -> Future[list[Any]]:
        """A future for the answers to these examples. Only examples with the same `predict` are passed together."""
        job = Job(predict, examples)
        with self.lock:
            if self.waiting and self.waiting + len(examples) > self.most_waiting:
                raise Overloaded(f"{self.waiting} examples are waiting already: try again in a second")
            self.waiting += len(examples)
        self.jobs.put(job)
        return job.answers

    def close(self) -> None:
        """Answer all waiting requests, then end."""
        self.jobs.put(None)
        self.thread.join()

    def _work(self) -> None:
        ahead = self.jobs.get()
        while ahead is not None:
            together, total = [ahead], len(ahead.examples)
            while True:
                try:
                    ahead = self.jobs.get_nowait()
                except queue.Empty:
                    self._answer(self._wanted(together))
                    ahead = self.jobs.get()
                    break
                if ahead is None or ahead.predict != together[0].predict or total + len(ahead.examples) > self.most:
                    self._answer(self._wanted(together))
                    break
                together.append(ahead)
                total += len(ahead.examples)

    def _wanted(self, jobs: list[Job]) -> list[Job]:
        """The jobs whose clients are still waiting; from now on they cannot be cancelled."""
        wanted = [job for job in jobs if job.answers.set_running_or_notify_cancel()]
        with self.lock:
            self.waiting -= sum(len(job.examples) for job in jobs if job not in wanted)
        return wanted

    def _answer(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        examples = [example for job in jobs for example in job.examples]
        try:
            answers = list(jobs[0].predict(examples))
        except Exception as error:
            if len(jobs) > 1:  # one bad example must not fail the other requests
                for job in jobs:
                    self._answer([job])
                return
            self._count(jobs, len(examples))
            jobs[0].answers.set_exception(error)
            return
        self._count(jobs, len(examples))
        start = 0
        for job in jobs:
            end = start + len(job.examples)
            job.answers.set_result(answers[start:end])
            start = end

    def _count(self, jobs: list[Job], examples: int) -> None:
        with self.lock:
            self.waiting -= examples
            self.requests += len(jobs)
            self.examples += examples
            self.batches += 1
