"""bace inspect"""

from pathlib import Path
from typing import Any

from bace.cli.console import print_json, print_rows
from bace.errors import printable


def command(model: Path, *, json: bool = False, trust: bool = False) -> None:
    """Show what a model knows: classes, calls, memory and size of a saved Learner; tasks and scores of a run.

    A learner has no test data, so its knowledge of a class is measured on training examples. A low share is a problem;
    a high share is no guarantee.

    Args:
        model: the folder of a saved Learner, of a run, or of a comparison.
        json: print one JSON object.
        trust: allow a method of your own that MODEL names to be imported, which runs its code.
    """
    from bace.experiments.run_folder import is_begun, load_run, run_folders
    from bace.report.inspection import inspect_learner, inspect_run

    if is_begun(model):
        found = inspect_run(load_run(model))
    elif model.is_dir() and (runs := list(run_folders(model))):
        found = {"kind": "comparison", "runs": [inspect_run(load_run(folder)) for folder in runs]}
    else:
        from bace.learner.opening import open_model

        found = inspect_learner(open_model(model, trust=trust), model)
    if json:
        print_json(found)
    else:
        {"learner": show_learner, "run": show_run, "comparison": show_comparison}[found["kind"]](found)


def show_learner(found: dict[str, Any]) -> None:
    memory = found["memory"]
    print_facts(
        method=found["method"],
        backbone=found["backbone"],
        memory=f"{memory['examples']} examples, {in_bytes(memory['bytes'])}",
        network=f"{in_bytes(found['bytes_of_method'])} with what the method keeps",
        folder=in_bytes(found["bytes_on_disk"]),
    )
    header = ["class", "call", "learned", "examples", "in memory", "known", "forgotten"]
    columns = ("name", "call", "learned", "examples", "in_memory")
    print_rows(
        header,
        [
            [*(cell(each[name]) for name in columns), percent(each["known"]), percent(each["forgotten"])]
            for each in found["classes"]
        ],
    )
    if not found["calls"]:
        return
    print()
    header = ["call", "date", "examples", "new classes", "known: new", "old", "held out", "forgetting", "ECE"]
    print_rows(header, [call_row(call) for call in found["calls"]])


def call_row(call: dict[str, Any]) -> list[str]:
    new = [name for name in call["classes"] if name not in call["more_of"]]
    brought = ", ".join(new) or "none"
    if call["more_of"]:
        brought += f"; more of {', '.join(call['more_of'])}"
    shares = [percent(call[name]) for name in ("new", "old", "held_out", "forgetting", "calibration_error")]
    return [str(call["call"]), cell(call["date"]), str(call["examples"]), brought, *shares]


def show_run(found: dict[str, Any]) -> None:
    print_facts(
        method=found["method"],
        benchmark=f"{found['benchmark']}, seed {found['seed']}",
        state="finished" if found["finished"] else "unfinished: continue with `bace run --resume`",
        **{name: "-" if value is None else f"{value:.2f}" for name, value in found["measures"].items()},
        changed=", ".join(found["changed"]),
        folder=in_bytes(found["bytes_on_disk"]),
    )
    names = ("score", "score_now", "average", "forgetting")
    header = ["task", "classes", "score then", "now", "A_t", "forgetting", "method's bytes"]
    rows = [
        [
            str(task["task"]),
            ", ".join(task["classes"]),
            *("" if task[name] is None else f"{task[name]:.2f}" for name in names),
            "" if task["bytes_of_method"] is None else in_bytes(task["bytes_of_method"]),
        ]
        for task in found["tasks"]
    ]
    print_rows(header, rows)


def show_comparison(found: dict[str, Any]) -> None:
    rows = []
    for run in found["runs"]:
        done = sum(task["score"] is not None for task in run["tasks"])
        last = run["measures"].get("A_last")
        score = "" if last is None else f"{last:.2f}"
        tasks = f"{done} of {len(run['tasks'])}"
        rows.append([run["folder"], run["method"], run["benchmark"], str(run["seed"]), tasks, score])
    print_rows(["run", "method", "benchmark", "seed", "tasks", "A_last"], rows)


def print_facts(**facts: str) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        if value:
            print(printable(f"{name:{width}}  {value}"))
    print()


def cell(value: object) -> str:
    """A date without its seconds and zone, which is always UTC."""
    text = "-" if value is None else str(value)
    return text[:16].replace("T", " ") if text.endswith("+00:00") else text


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def in_bytes(count: int) -> str:
    """'1,234 bytes', or '12.3 MB' from a megabyte on."""
    return f"{count:,} bytes" if count < 1_000_000 else f"{count / 1e6:,.1f} MB"
