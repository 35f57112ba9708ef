"""bace forget"""

from pathlib import Path

from bace.errors import CheckpointError


def command(model: Path, name: str, *, trust: bool = False) -> None:
    """Remove a class from a model: its head rows, its statistics and every stored example that shows it.

    MODEL changes only when a model without the class is written; then the old one is deleted. The encoder keeps what
    its weights have learned from the class, and your own copies and backups of MODEL keep the class.

    Args:
        model: the folder of a saved learner.
        name: the class, or the entity type.
        trust: allow a method of your own that MODEL names to be imported, which runs its code.
    """
    from bace.core.checkpoint import generations
    from bace.learner import Learner

    learner = Learner.load(model, trust=trust)
    learner.forget(name)
    learner.save(model)
    if old := generations(model)[:-1]:
        raise CheckpointError(f"the class is gone from the newest model, but delete '{old[0]}', too")
    print(f"{model} knows {len(learner.classes_)} classes: {', '.join(map(str, learner.classes_))}")
