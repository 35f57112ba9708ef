"""A run that is killed with `kill -9` at random moments and then continued must end in the same bits as a run that was
not interrupted."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaign.work import Case, Work, differences, one_line, pairs, run_or_resume

TITLE = "kill -9 at random moments"
TRIES = 20  # a kill after the end of the run does not count


def cases(work: Work) -> Iterator[Case]:
    """Yield every method and modality in turn, again and again. The number of the case determines the moments."""
    order = pairs()
    random.Random("order").shuffle(order)
    number = 0
    while True:
        for method, modality in order:
            yield f"{number} {method} {modality}", lambda m=method, o=modality, n=number: killed(work, m, o, n)
            number += 1


def killed(work: Work, method: str, modality: str, number: int) -> dict[str, Any]:
    """Kill a run one to three times at random moments, then let it finish."""
    rng = random.Random(f"kill {number}")
    straight, seconds = work.straight(method, modality)
    words, kills = work.settings(method, modality), rng.choice((1, 1, 1, 2, 3))
    folder = work.fresh() / "run"
    places: list[str] = []
    for _ in range(TRIES):
        child = work.start(run_or_resume(folder, words))
        time.sleep(rng.uniform(0, seconds))
        child.send(signal.SIGKILL)
        ended = child.wait()
        if ended.code == -signal.SIGKILL:
            places.append(place(folder))
        elif ended.code:
            return {"kills": places, "fault": f"exit code {ended.code}: {one_line(ended.said)}"}
        else:
            folder = work.fresh() / "run" if not places else folder
        if len(places) == kills or (places and not ended.code):
            break
    if not (folder / "metrics.json").exists():
        ended = work.ask(run_or_resume(folder, words))
        if ended.code:
            return {"kills": places, "fault": f"not resumed: {one_line(ended.said)}"}
    differing = differences(folder, straight)
    return {"kills": places, "fault": f"differs in {', '.join(differing[:5])}" if differing else None}


def place(folder: Path) -> str:
    """Return what a run was doing when it was killed."""
    if not (folder / "run.json").exists():
        return "before the run began"
    if any((folder / "checkpoints").glob(".*.unfinished")):
        return "while a checkpoint was written"
    if any(folder.glob(".*.unfinished")):
        return "while another file was written"
    return "at other moments"


def summary(records: list[dict[str, Any]]) -> list[str]:
    places = [place for record in records for place in record["kills"]]
    counts = {place: places.count(place) for place in sorted(set(places))}
    methods = {tuple(record["case"].split(" ", 1)[1].rsplit(" ", 1)) for record in records}
    same = sum(not record["fault"] for record in records)
    return [
        f"{len(records)} runs were killed {len(places)} times ({len(methods)} of {len(pairs())} pairs of method and "
        f"modality); **{same} of {len(records)} ended in the same bits** (metrics, matrix, log, weights, memory, "
        "optimiser) as the run that was not interrupted.",
        f"Kills by moment: {', '.join(f'{count} {place}' for place, count in counts.items())}.",
    ]
