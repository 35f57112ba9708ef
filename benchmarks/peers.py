"""Compare bace with avalanche-lib on the same work, in turn, on one thread: seconds per step, memory, accuracy.

avalanche-lib is installed from PyPI into a separate environment (`--env`), with this project's constraints, so that
both sides use the same torch and transformers. Both start from the same weights, see the same pictures in batches of
the same size with the same augmentation, and keep equally many examples. docs/performance.md lists the other
differences between the two libraries.

    python benchmarks/peers.py [--env FOLDER] [--seeds N] [--json]
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SIDE, WIDTH, Bar, _peak_after, pictures, vit_of_transformers

from bace.config.schema import Backbone, Checkpoints, Config, HeadSettings, Measures, MemoryBudget, Training
from bace.core.memory import Memory
from bace.core.position import Position
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.digits import load_digits
from bace.data.modalities.image import Images
from bace.methods import find_method
from bace.models.heads import LinearHead
from bace.models.loading import load_encoder
from bace.models.model import Model

ROOT = Path(__file__).parents[1]
PACKAGES = ("avalanche-lib==0.6.0", "faiss-cpu==1.15.1", "transformers", "torch")
# our methods with avalanche-lib's settings: a soft-max over all seen classes, one mean over new and replayed rows, and
# random exemplars (for iCaRL, herded exemplars that are mixed into the task's data)
METHODS: dict[str, dict[str, Any]] = {
    "SEQ": {},
    "ER": {"reduction": "joint"},
    "DER++": {"alpha": 0.1, "beta": 0.5, "logits": "teacher"},
    "LwF": {"lambda_kd": 1.0, "span": "seen"},
    "EWC": {"lambda_ewc": 1000.0, "span": "seen"},
    "iCaRL": {"columns": "mean", "mode": "concat"},
}
Job = dict[str, Any]
Result = dict[str, Any]


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BACE_PEERS", Path(cache) / "bace-peers"))


@functools.cache
def environment(folder: Path) -> Path:
    """The Python of the peers' environment, which is made if it does not exist."""
    python = folder / "bin" / "python"
    done = folder / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *PACKAGES]
        subprocess.run(install, check=True)
        done.write_text(wanted)
    return python


def digits(folder: Path) -> Job:
    """scikit-learn's digits in 5 tasks with the embedded ViT, to measure accuracy."""
    train, test = load_digits()
    stored = [(table.inputs, torch.tensor([int(label) for label in table.labels])) for table in (train, test)]
    np.savez(
        folder / "digits.npz",
        pixels=torch.cat([pixels for pixels, _ in stored]).numpy(),
        targets=torch.cat([targets for _, targets in stored]).numpy(),
        train=np.arange(len(train)),
        test=np.arange(len(train), len(train) + len(test)),
    )
    model = ROOT / "src" / "bace" / "data" / "digits_vit"
    sizes: Job = {"side": 8, "size": 16, "width": 64, "tasks": 5, "padding": 0, "flip": False}
    training: Job = {"epochs": 5, "batch": 32, "memory": 20, "lr": 0.003, "momentum": 0.9}
    return {"data": str(folder / "digits.npz"), "model": str(model), **sizes, **training}


def noise(folder: Path, examples: int) -> Job:
    """Random pictures in 2 tasks with the micro ViT, cropped and mirrored, to measure time."""
    pixels, targets = pictures(2 * examples)
    targets = targets + 10 * (torch.arange(2 * examples) >= examples)
    ids = np.arange(2 * examples)
    np.savez(folder / "noise.npz", pixels=pixels.numpy(), targets=targets.numpy(), train=ids, test=ids[::3])
    vit_of_transformers().save_pretrained(folder / "vit")
    sizes: Job = {"side": SIDE, "size": SIDE, "width": WIDTH, "tasks": 2, "padding": 4, "flip": True}
    training: Job = {"epochs": 1, "batch": 128, "memory": 200, "lr": 0.001, "momentum": 0.9}
    return {"data": str(folder / "noise.npz"), "model": str(folder / "vit"), **sizes, **training}


def ours(jobs: list[Job]) -> list[Result]:
    """The results of jobs by this library, one after another in a separate process (see avalanche_peer.py)."""
    results = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for job in jobs:
            runs = [pool.apply(_run, (job, seed)) for seed in job["seeds"]]
            result = {"accuracy": [r[0] for r in runs], "seconds": [r[1] for r in runs], "steps": runs[0][2]}
            results.append({**result, "peak_memory_mb": pool.apply(_peak_after, (int, ()))})
    return results


def _run(job: Job, seed: int) -> tuple[float, float, int]:
    """The mean accuracy over tasks after the last one, the seconds of learning, and the steps."""
    torch.set_num_threads(1)
    trainer = _trainer(job, seed)
    seconds, steps = 0.0, 0

    def count(done: float, text: str) -> None:
        nonlocal steps
        steps += 1

    trainer.show = count
    for task in trainer.stream:
        begun = time.process_time()
        trainer.learn(task)
        seconds += time.process_time() - begun
        if task.index == len(trainer.stream) - 1:
            counted = steps
            trainer.evaluate(task)
        trainer.now.end(task)
    return sum(trainer.results.matrix[-1]) / len(trainer.stream), seconds, counted


def _trainer(job: Job, seed: int) -> Trainer:
    """A method on the job's pictures, ready for its first task."""
    stored = np.load(job["data"])
    pixels, targets, train, test = (torch.from_numpy(stored[name]) for name in ("pixels", "targets", "train", "test"))
    classes, none = int(targets.max()) + 1, train[:0]
    each = classes // job["tasks"]
    tasks = []
    for t in range(job["tasks"]):
        own = (ids[targets[ids] // each == t] for ids in (train, none, test))
        tasks.append(Task(t, str(t), range(t * each, (t + 1) * each), *own))
    augmentation = {"augment": bool(job["padding"] or job["flip"]), "flip": job["flip"], "padding": job["padding"]}
    data = Images(pixels, size=job["size"], mean=job["mean"], std=job["std"], **augmentation)
    stream = Stream(data, targets, tasks, [str(c) for c in range(classes)])
    rates = {"lr": job["lr"], "momentum": job["momentum"]}
    training = Training(epochs=job["epochs"], batch_size=job["batch"], threads=1, reset_optimiser=False, **rates)
    budget = MemoryBudget(job["memory"], select="herding" if job["method"] == "iCaRL" else "random")
    settings = (Backbone(), HeadSettings(), budget, training, Measures(fwt=False), Checkpoints())
    config = Config({"name": "benchmark"}, {"name": job["method"]}, *settings)
    method = find_method(job["method"])(**job["settings"])
    method.stream, method.training_settings, method.now = stream, training, Position(seed)
    method.memory = Memory(budget.size, select=budget.select)
    method.model = method.build(Model(load_encoder(job["model"]), LinearHead(job["width"])))
    return Trainer(method, stream, config)


def theirs(jobs: list[Job], python: Path) -> list[Result]:
    script = Path(__file__).parent / "avalanche_peer.py"
    done = subprocess.run([str(python), str(script), json.dumps(jobs)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"avalanche-lib failed on {jobs[0]['method']}: {done.stderr.strip().splitlines()[-1]}")
    results: list[Result] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def of_method(job: Job, method: str, seeds: int) -> Job:
    settings = METHODS[method]
    normalised = {"mean": [0.5] * 3, "std": [0.5] * 3}
    return {**job, **normalised, **settings, "method": method, "settings": settings, "seeds": list(range(seeds))}


def measured(env: Path, seeds: int, examples: int, repeat: int) -> dict[str, dict[str, Any]]:
    """By method and side ("our", "their"): milliseconds per step and peak memory on random pictures (the fastest of
    several repetitions), and the accuracies on digits."""
    python = environment(env)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        timed, learned = noise(Path(name), examples), digits(Path(name))
        for method in METHODS:
            jobs = [of_method(timed, method, repeat), of_method(learned, method, seeds)]
            found[method] = {}
            for side, (speed, scores) in (("our", ours(jobs)), ("their", theirs(jobs, python))):
                found[method][f"{side}_ms"] = 1000 * min(speed["seconds"]) / speed["steps"]
                found[method][f"{side}_mb"] = speed["peak_memory_mb"]
                found[method][f"{side}_steps"] = (speed["steps"], scores["steps"])
                found[method][f"{side}_accuracy"] = scores["accuracy"]
            print(f"{method}: {found[method]}", file=sys.stderr, flush=True)
    return found


def bars(tiny: bool) -> dict[str, Bar]:
    found = measured(default_folder(), *((1, 64, 1) if tiny else (2, 512, 2)))
    made = {}
    for method, r in found.items():
        made[f"{method}: seconds per step over avalanche-lib's"] = Bar(r["our_ms"] / r["their_ms"], 1.0)
        made[f"{method}: peak memory over avalanche-lib's"] = Bar(r["our_mb"] / r["their_mb"])
        gap = statistics.mean(r["our_accuracy"]) - statistics.mean(r["their_accuracy"])
        made[f"{method}: accuracy on digits less avalanche-lib's"] = Bar(gap)
    return made


def in_words(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=default_folder())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(options.env, options.seeds, 640, 3)
    if options.json:
        print(json.dumps(found))
        return
    print("method   ms per step (bace / avalanche-lib)   peak MB       accuracy on digits")
    for method, r in found.items():
        mine, other = r["our_ms"], r["their_ms"]
        memory = f"{r['our_mb']} / {r['their_mb']}"
        accuracies = f"{in_words(r['our_accuracy'])} / {in_words(r['their_accuracy'])}"
        print(f"{method:8} {mine:6.1f} / {other:6.1f} = {mine / other:.2f}             {memory:13} {accuracies}")


if __name__ == "__main__":
    main()
