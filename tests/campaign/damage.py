"""Every kind of byte in every file that we write is changed or cut. The damage must be detected or have no effect; it
must never change an answer."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bace
from bace.cli.main import main
from bace.errors import BaceError
from bace.report import load_runs
from campaign.disk import learner, state_bits
from campaign.work import Case, Work, cases_in_turn, differences, one_line, run_or_resume, unfinished

TITLE = "damaged files"
EACH = 3  # positions of each class of bytes in each file
STUDIES = {"studies": ["tracking", "bias"]}
EXPECTED: dict[Path, Any] = {}  # the answers of intact folders


def cases(work: Work) -> Iterator[Case]:
    straight, _ = work.straight("ER", "image", **STUDIES)
    yield from cases_in_turn(
        damaged(work, unfinished_copy(work, straight), resumed),
        damaged(work, straight, opened),
        damaged(work, learner(work), loaded),
    )


def unfinished_copy(work: Work, straight: Path) -> Path:
    folder = work.folder / "unfinished"
    return folder if folder.exists() else unfinished(straight, folder)


def damaged(work: Work, whole: Path, judge: Any) -> Iterator[Case]:
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != ".lock"]
    if judge is opened:  # the checkpoint before the last is not read
        files = [path for path in files if path.parent != min((whole / "checkpoints").iterdir())]
    for path in sorted(files):
        name = path.relative_to(whole)
        rng = random.Random(f"{judge.__name__} {name}")
        content = path.read_bytes()
        for what, changed in damages(content, rng, tensors=path.suffix == ".safetensors"):
            yield f"{judge.__name__}: {name}: {what}", lambda n=name, c=changed: judged(work, whole, n, c, judge)


def damages(content: bytes, rng: random.Random, *, tensors: bool) -> Iterator[tuple[str, bytes | None]]:
    """Cut, lengthen or delete a file, or change a byte at some positions of each class of bytes: flip a bit, or write
    another character of the same class, which a parser would accept."""
    yield "deleted", None
    for length in sorted({0, 1, len(content) // 2, len(content) - 1} - {len(content), -1}):
        yield f"cut to {length} bytes", content[:length]
    yield "a byte longer", content + b"0"
    by_class: dict[str, list[int]] = {}
    for position in range(len(content)):
        by_class.setdefault(class_of(content, position, tensors), []).append(position)
    for kind, positions in by_class.items():
        for position in sorted({positions[0], positions[-1], *rng.sample(positions, min(EACH - 2, len(positions)))}):
            before = content[position]
            changed = {"a bit flipped": before ^ (1 << rng.randrange(8))}
            if kind.endswith(("digit", "letter")):
                signs = b"0123456789" if kind.endswith("digit") else b"abcdefghijklmnopqrstuvwxyz"
                changed["another one"] = rng.choice([sign for sign in signs if sign != before])
            for what, after in changed.items():
                yield f"{kind}, byte {position}, {what}", bytes([*content[:position], after, *content[position + 1 :]])


def class_of(content: bytes, position: int, tensors: bool) -> str:
    if tensors and position < 8:
        return "length of the header"
    if tensors and position >= 8 + int.from_bytes(content[:8], "little"):
        return "number"
    sign = chr(content[position])
    part = "header " if tensors else ""
    for kind, test in (("digit", str.isdigit), ("letter", str.isalpha), ("space", str.isspace)):
        if test(sign):
            return part + kind
    return part + ("quote" if sign == '"' else "bracket" if sign in "[]{}" else "mark")


def judged(work: Work, whole: Path, name: Path, content: bytes | None, judge: Any) -> dict[str, Any]:
    folder = work.fresh() / "damaged"
    shutil.copytree(whole, folder)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    outcome = judge(work, folder)
    right = ("detected and refused", "detected, with the right answer", "detected, with a warning", "no effect")
    return {"outcome": outcome if outcome in right else "?", "fault": None if outcome in right else outcome}


# -- the operations on a damaged folder


def resumed(work: Work, folder: Path) -> str:
    """Continue an unfinished run."""
    ended = work.ask(run_or_resume(folder, ["run"]))
    noticed = "bace: warning" in ended.said
    if ended.code == 2 and "bace: error" in ended.said:
        return "detected and refused"
    if ended.code:
        return f"exit code {ended.code}: {one_line(ended.said)}"
    straight, _ = work.straight("ER", "image", **STUDIES)
    if differing := differences(folder, straight):
        return "detected, with a warning" if noticed else f"differs in {', '.join(differing[:5])}"
    return "detected, with the right answer" if noticed else "no effect"


def opened(work: Work, folder: Path) -> str:
    """Let a finished run predict, and report it."""
    straight, _ = work.straight("ER", "image", **STUDIES)
    return compared(work, folder, straight, lambda place: [predictions(work, place), reported(place)])


def loaded(work: Work, folder: Path) -> str:
    """Load a saved learner."""
    return compared(work, folder, learner(work), lambda place: repr(state_bits(bace.Learner.load(place))))


def compared(work: Work, folder: Path, whole: Path, ask: Callable[[Path], Any]) -> str:
    if whole not in EXPECTED:
        EXPECTED[whole] = work.ask(lambda: ask(whole)).answer

    def inside() -> dict[str, Any]:
        try:
            return {"answer": ask(folder)}
        except BaceError as error:
            return {"refused": str(error)}

    ended = work.ask(inside)
    if ended.answer is None:
        return f"exit code {ended.code}: {one_line(ended.said)}"
    if "refused" in ended.answer:
        return "detected and refused"
    noticed = "arning" in ended.said
    if ended.answer["answer"] == EXPECTED[whole]:
        return "detected, with the right answer" if noticed else "no effect"
    return "detected, with a warning" if noticed else "a different answer"


def predictions(work: Work, folder: Path) -> Any:
    pictures = work.tiny.folder / "pictures" / "test"
    taught = bace.load(folder)
    scores = taught.scores([path for name in work.tiny.classes for path in sorted((pictures / name).iterdir())])
    return scores.tolist(), taught.classes_


def reported(folder: Path) -> Any:
    """Return everything that the table and the page show."""
    if code := main(["report", str(folder), "--out", "page.html"]):
        raise BaceError(f"exit code {code}") if code == 2 else RuntimeError(f"exit code {code}")
    return [repr(replace(run, folder=Path())) for run in load_runs([folder])]


def summary(records: list[dict[str, Any]]) -> list[str]:
    files = {tuple(record["case"].split(": ")[:2]) for record in records}
    outcomes = [record["outcome"] for record in records]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return [
        f"{len(records)} damages in {len(files)} files. The files belong to an unfinished run that is continued, a "
        "finished run that predicts and is reported, and a saved learner that is loaded. A file is deleted, truncated "
        "or lengthened, or a byte of each class (length, header, quote, bracket, letter, digit, mark, space, number) "
        "is flipped or replaced by another byte of its class.",
        f"Outcomes: {'; '.join(f'{outcome} ({count})' for outcome, count in counts.items())}.",
    ]
