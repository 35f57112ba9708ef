"""MBPA++. De Masson d'Autume, Ruder, Kong, Yogatama, "Episodic Memory in Lifelong Language Learning", NeurIPS 2019."""

from typing import Literal

from bace.core.method import Card
from bace.methods.mbpa import MBPA
from bace.methods.sparseer import SparseER


class MBPApp(MBPA, SparseER):
    """Sparse replay in training and local adaptation at prediction, from one memory.

    Args:
        every: steps on new data between two steps on memory; 0 leaves MBPA.
        K: neighbours of each example that is asked; all of the memory if it holds fewer.
        steps: of the local adaptation; 0 leaves Sparse-ER.
        adapt: what is adapted: the `head`, on features of the memory that are kept from the end of the task, all
            examples of a batch side by side; or `all` of the network, one example after the other (the original).
        lr_local: learning rate of the local adaptation, by Adam, which starts anew for every example; default: 0.001
            for all of the network (the original's), 0.01 for the head.
        lambda_local: weight of the squared distance to the trained weights.
        sample: with `adapt=all`, how many test examples of each task are evaluated (metrics.json says so); 0: all.
    """

    title = "MBPA++"
    paper = "De Masson d'Autume et al., Episodic Memory in Lifelong Language Learning, NeurIPS 2019"
    card = Card(
        mechanism="replay, in one step of a hundred; local adaptation to neighbours in memory at prediction",
        besides="one step in a hundred more; prediction as MBPA's",
        o_rows="class 0 under cross-entropy; in replayed sentences so too, or left out (`train.replay_o`); neighbours "
        "are sentences, with all their words",
        reading="Sparse-ER's training and MBPA's prediction, from one herded memory within the budget (the original "
        "writes everything)",
    )

    def __init__(
        self,
        every: int = 100,
        K: int = 32,
        steps: int = 30,
        adapt: Literal["head", "all"] = "head",
        lr_local: float | None = None,
        lambda_local: float = 1e-3,
        sample: int = 100,
    ) -> None:
        super().__init__(K, steps, adapt, lr_local, lambda_local, sample)
        self.replay_every(every)
