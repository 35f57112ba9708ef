"""A run that receives SIGTERM at a random moment must write a checkpoint, print how to continue and exit with code 143.
The continued run must end in the same bits."""

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

from campaign.work import Case, Work, differences, one_line, pairs, run_or_resume

TITLE = "SIGTERM at random moments"
TRIES = 20
ONLY_BY_TASK = {"checkpoint.every": 0}  # within a task, only the signal saves a checkpoint


def cases(work: Work) -> Iterator[Case]:
    order = pairs()
    random.Random("order of stops").shuffle(order)
    number = 0
    while True:
        for method, modality in order:
            yield f"{number} {method} {modality}", lambda m=method, o=modality, n=number: stopped(work, m, o, n)
            number += 1


def stopped(work: Work, method: str, modality: str, number: int) -> dict[str, Any]:
    rng = random.Random(f"stop {number}")
    straight, seconds = work.straight(method, modality)
    words = work.settings(method, modality, **ONLY_BY_TASK)
    for _ in range(TRIES):
        folder = work.fresh() / "run"
        child = work.start(run_or_resume(folder, words))
        time.sleep(rng.uniform(0, seconds))
        child.send(signal.SIGTERM)
        ended = child.wait()
        if ended.code and not (folder / "metrics.json").exists():  # otherwise the signal came after the end of the run
            break
    else:
        return {"place": "after the run had ended", "fault": None}
    begun = (folder / "run.json").exists()
    said = f"--resume {folder}" in ended.said
    if ended.code == 143 and said:
        place = "during the run, which saved a checkpoint, printed how to continue and exited with 143"
    elif ended.code == -signal.SIGTERM and not begun:
        place = "before the run began, and the process ended"  # a shell reports 143
    else:
        return {"place": "?", "fault": f"exit code {ended.code}: {one_line(ended.said)}"}
    ended = work.ask(run_or_resume(folder, words))
    if ended.code:
        return {"place": place, "fault": f"not resumed: {one_line(ended.said)}"}
    differing = differences(folder, straight)
    return {"place": place, "fault": f"differs in {', '.join(differing[:5])}" if differing else None}


def summary(records: list[dict[str, Any]]) -> list[str]:
    places = [record["place"] for record in records]
    counts = {place: places.count(place) for place in sorted(set(places))}
    same = sum(not record["fault"] for record in records)
    return [
        f"{len(records)} runs received the signal; **{same} of {len(records)} were continued and ended in the same "
        "bits**.",
        f"The signal came {'; '.join(f'{count} times {place}' for place, count in counts.items())}.",
    ]
