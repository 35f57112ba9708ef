"""Open the model in any folder that bace wrote."""

from pathlib import Path

from bace.core.checkpoint import is_foreign
from bace.errors import CheckpointError, printable
from bace.experiments.run_folder import is_begun, load_runs, run_folders
from bace.learner import Learner
from bace.progress import tell


def open_model(folder: Path, *, trust: bool = False, force: bool = False) -> Learner:
    """The model of a run, of the best run of a comparison, or of a saved learner."""
    if not folder.exists():
        raise CheckpointError(f"there is no folder '{folder}': check the path")
    if is_begun(folder):
        return Learner.from_run(folder, trust=trust, force=force)
    if folder.is_dir() and (runs := list(run_folders(folder))):
        return Learner.from_run(best_of(folder, runs), trust=trust, force=force)
    try:
        return Learner.load(folder, trust=trust)
    except CheckpointError as error:
        if folder.is_dir() and any(folder.iterdir()) and not is_foreign(folder):
            raise
        raise CheckpointError(f"{error}; and '{folder}' is neither a run folder nor a folder of runs") from error


def best_of(folder: Path, runs: list[Path]) -> Path:
    """The finished run with the highest A_last. A line says which one it is."""
    scores = {run.folder: run.metrics.A_last for run in load_runs(runs) if run.metrics is not None}
    if not scores:
        raise CheckpointError(f"no run in '{folder}' is finished: continue one with `bace run --resume DIR`")
    best = max(scores, key=lambda run: scores[run])
    if len(scores) > 1:
        said = f"of the {len(scores)} finished runs in {folder}, {best} has the highest A_last ({scores[best]:.2f})"
        tell(printable(f"{said} and predicts"))
    return best
