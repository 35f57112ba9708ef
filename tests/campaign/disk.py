"""A disk is full at some write, fails at some call or is read-only, or two processes use one folder. Each case must end
with an error of one sentence. As soon as the disk works again, the run must end in the same bits."""

import ctypes
import errno
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bace
from bace.cli.main import main
from bace.errors import BaceError, CheckpointError
from campaign.work import (
    Case,
    Child,
    Ended,
    Work,
    bits,
    cases_in_turn,
    differences,
    one_line,
    run_or_resume,
    unfinished,
)

TITLE = "full, failing and read-only disks; two processes"
QUICK = {"train.epochs": 1, "checkpoint.every": 0}
PAGE = 4096  # bytes in a page, the unit in which a tmpfs allocates
CREATING = ("mkdir", "rename", "replace", "fsync", "open", "ftruncate")
DELETING = ("unlink", "rmdir")
NEW_NAMES, NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER


def cases(work: Work) -> Iterator[Case]:
    def pages(count: int) -> Callable[[], dict[str, Any]]:
        return lambda: in_a_namespace(work, lambda: full_disk(work, f"size={count * PAGE}"))

    def files(count: int) -> Callable[[], dict[str, Any]]:
        return lambda: in_a_namespace(work, lambda: full_disk(work, f"size=64m,nr_inodes={count}"))

    def saving(count: int) -> Callable[[], dict[str, Any]]:
        return lambda: in_a_namespace(work, lambda: full_under_a_learner(work, count))

    def calls(number: int, once: bool) -> Callable[[], dict[str, Any]]:
        return lambda: failing_call(work, number, once)

    yield from cases_in_turn(
        ((f"a disk of {count} pages", pages(count)) for count in range(1, 61)),
        ((f"a disk of {count} files", files(count)) for count in range(2, 19)),
        ((f"a learner on a disk of {count} pages", saving(count)) for count in range(1, 41)),
        ((f"call {number} fails", calls(number, True)) for number in range(1, 45)),
        ((f"call {number} and all after it fail", calls(number, False)) for number in range(1, 45)),
        ((f"read-only: {name}", lambda n=name: in_a_namespace(work, lambda: read_only(work, n))) for name in READ_ONLY),
        ((f"a report on a disk of {count} pages", lambda c=count: report(work, c)) for count in (1, 10, 100, 1000)),
        ((f"two processes {number}", lambda n=number: together(work, n)) for number in range(12)),
    )


# -- small disks


def in_a_namespace(work: Work, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call the function in a child with its own mounts, which vanish with it. If the user is not root, the child is
    root in its own user namespace."""

    def inside() -> dict[str, Any]:
        user, group = os.getuid(), os.getgid()
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMES | (NEW_USER if user else 0)):
            return {"outcome": f"not tried: no mounts here ({os.strerror(ctypes.get_errno())})", "fault": None}
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        return function()

    work.fresh()
    ended = work.ask(inside)
    return ended.answer or {"outcome": "?", "fault": f"the case itself failed: {one_line(ended.said)}"}


def mount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def inner(work: Work, function: Callable[[], Any]) -> Ended:
    return Child(function, work.folder / "grandchild").wait()


def full_disk(work: Work, options: str) -> dict[str, Any]:
    mount(work.place, options)
    straight, words = work.straight("ER", "image", **QUICK), work.settings("ER", "image", **QUICK)
    folder = work.place / "run"
    first = inner(work, run_or_resume(folder, words))
    if first.code == 0:
        return judged("the disk was large enough", folder, straight[0])
    if fault := not_one_sentence(first):
        return {"outcome": "?", "fault": fault}
    remount(work.place, "size=64m,nr_inodes=1000")
    return continued(inner(work, run_or_resume(folder, words)), folder, straight[0])


def full_under_a_learner(work: Work, pages: int) -> dict[str, Any]:
    """Save twice. Once the first save has succeeded, the loaded learner is always complete."""
    learned = learner(work)
    mount(work.place, f"size={pages * PAGE}")
    folder = work.place / "learner"

    def save_twice() -> dict[str, Any]:
        taught, saved = bace.Learner.load(learned), 0
        expected = state_bits(taught)
        for _ in range(2):
            try:
                taught.save(folder)
                saved += 1
            except CheckpointError:
                pass
            if saved and state_bits(bace.Learner.load(folder)) != expected:
                return {"outcome": "?", "fault": "another learner was loaded"}
        return {"outcome": f"saved {saved} of 2 times, otherwise a one-sentence error", "fault": None}

    ended = inner(work, save_twice)
    return ended.answer or {"outcome": "?", "fault": one_line(ended.said)}


def learner(work: Work) -> Path:
    """Return the folder of a saved learner of the first classes of the tiny images."""
    folder = work.folder / "learner"
    if not folder.exists():
        ended = work.ask(lambda: teach(work, folder))
        if ended.code:
            raise RuntimeError(ended.said)
    return folder


def teach(work: Work, folder: Path) -> int:
    pictures = work.tiny.folder / "pictures" / "train"
    files = [(path, name) for name in work.tiny.classes[:3] for path in sorted((pictures / name).iterdir())]
    taught = bace.Learner("ER", backbone=work.tiny.vit, memory=6, **{"train.epochs": 1, "train.threads": 1})
    taught.partial_fit([path for path, _ in files], [name for _, name in files])
    taught.save(folder)
    return 0


def state_bits(taught: bace.Learner) -> list[object]:
    assert taught.method is not None
    tensors = {k: v for k, v in taught.method.state_dict().items() if hasattr(v, "numpy")} | taught._kept
    return [taught.classes_, taught.picture, *((name, bits(tensor)) for name, tensor in sorted(tensors.items()))]


def report(work: Work, pages: int) -> dict[str, Any]:
    straight, _ = work.straight("ER", "image")

    def inside() -> dict[str, Any]:
        mount(work.place, f"size={pages * PAGE}")
        page = work.place / "report.html"
        ended = inner(work, lambda: main(["report", str(straight), "--out", str(page)]))
        if ended.code == 0:
            fault = None if "</html>" in page.read_text()[-99:] else "half a page"
            return {"outcome": "the disk was large enough", "fault": fault}
        fault = not_one_sentence(ended) or ("half a page" if page.exists() else None)
        return {"outcome": "refused", "fault": fault}

    return in_a_namespace(work, inside)


# -- read-only


def read_only(work: Work, name: str) -> dict[str, Any]:
    straight, _ = work.straight("ER", "image")
    learned = learner(work)
    mount(work.place, "size=64m")
    folder = unfinished(straight, work.place / "run")
    remount(work.place, "ro")
    ended = inner(work, lambda: READ_ONLY[name](work, learned))
    if fault := not_one_sentence(ended):
        return {"outcome": "?", "fault": fault}
    remount(work.place, "rw")
    return continued(inner(work, run_or_resume(folder, [])), folder, straight)


def save_learner(work: Work, learned: Path) -> int:
    try:
        bace.Learner.load(learned).save(work.place / "learner")
    except BaceError as error:
        print(f"bace: error: {error}")
        return 2
    return 0


READ_ONLY: dict[str, Callable[[Work, Path], int]] = {
    "bace run --resume": lambda work, learned: main(["run", "--resume", str(work.place / "run")]),
    "bace run --out": lambda work, learned: main([*work.settings("ER", "image"), "--out", str(work.place / "other")]),
    "bace report --out": lambda work, learned: main(
        ["report", str(work.straight("ER", "image")[0]), "--out", str(work.place / "page.html")]
    ),
    "Learner.save": save_learner,
}


# -- calls that fail


def failing_call(work: Work, number: int, once: bool) -> dict[str, Any]:
    """Let the disk fail at one call to the operating system (EIO), or have no space from that call on (ENOSPC)."""
    straight, _ = work.straight("ER", "image", **QUICK)
    words = work.settings("ER", "image", **QUICK)
    folder = work.fresh() / "run"
    command = run_or_resume(folder, words)

    def failing() -> int:
        count_calls(number, once)
        return command()

    ended = work.ask(failing)
    if ended.code == 0:
        return judged("the run did not need the call", folder, straight)
    if fault := not_one_sentence(ended):
        return {"outcome": "?", "fault": fault}
    return continued(work.ask(run_or_resume(folder, words)), folder, straight)


def count_calls(number: int, once: bool) -> None:
    """From now on, let the writing call with this number fail and, unless `once`, also all later calls that create."""
    met = 0

    def watch(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def called(*args: Any, **options: Any) -> Any:
            nonlocal met
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return call(*args, **options)
            met += 1
            if met == number or (met > number and not once and name in CREATING):
                code = errno.EIO if once else errno.ENOSPC
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return called

    for name in (*CREATING, *DELETING):
        setattr(os, name, watch(name))


# -- two processes


def together(work: Work, number: int) -> dict[str, Any]:
    """Start a second process on the folder of the first, at once or later. One runs, and the other stops with an
    error."""
    rng = random.Random(f"together {number}")
    straight, seconds = work.straight("ER", "image")
    words = work.settings("ER", "image")
    folder = work.fresh() / "run"
    first = work.start(run_or_resume(folder, words))
    time.sleep(rng.choice((0, rng.uniform(0, 0.8 * seconds))))
    second = Child(run_or_resume(folder, words), work.folder / "second")
    ends = [first.wait(), second.wait()]
    lost = [ended for ended in ends if ended.code]
    if len(lost) != 1 or (fault := not_one_sentence(lost[0])):
        return {"outcome": "?", "fault": fault if len(lost) == 1 else f"exit codes {[ended.code for ended in ends]}"}
    return judged("one process ran, the other stopped with an error", folder, straight)


# -- judging


def not_one_sentence(ended: Ended) -> str | None:
    if ended.code == 2 and "bace: error: " in ended.said and "Traceback" not in ended.said:
        return None
    return f"exit code {ended.code}: {one_line(ended.said)}"


def continued(ended: Ended, folder: Path, straight: Path) -> dict[str, Any]:
    if ended.code:
        return {"outcome": "?", "fault": f"not continued: {one_line(ended.said)}"}
    return judged("stopped with a one-sentence error, then continued to the same bits", folder, straight)


def judged(outcome: str, folder: Path, straight: Path) -> dict[str, Any]:
    differing = differences(folder, straight)
    return {"outcome": outcome, "fault": f"differs in {', '.join(differing[:5])}" if differing else None}


def summary(records: list[dict[str, Any]]) -> list[str]:
    outcomes = [record["outcome"] for record in records]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return [
        f"{len(records)} cases: runs on a tmpfs of every size in pages and in files, a system call (open, mkdir, "
        "rename, fsync, truncate, delete) that fails at each place where it is called, read-only file systems, and "
        "a second process in the folder.",
        f"Outcomes: {'; '.join(f'{outcome} ({count})' for outcome, count in counts.items())}.",
    ]
