"""MBPA++. De Masson d'Autume, Ruder, Kong, Yogatama, "Episodic Memory in Lifelong Language Learning", NeurIPS 2019."""

from typing import Literal

from bace.core.method import Card
from bace.methods.mbpa import MBPA
from bace.methods.sparseer import SparseER


class MBPApp(MBPA, SparseER):
    """Replay rarely in training and adapt locally at prediction, with one memory for both.

    Args:
        every: steps on new data between two steps on memory; 0 gives MBPA.
        K: number of neighbours of each query; the whole memory if it holds fewer.
        steps: steps of the local adaptation; 0 gives Sparse-ER.
        adapt: what is adapted: the `head`, on features of the memory stored at the end of the task, for all examples of
            a batch at the same time; or `all` of the network, one example after the other (the original).
        lr_local: learning rate of the local adaptation by Adam, which restarts for every example. Default: 0.001 for
            the whole network (the original's), 0.01 for the head.
        lambda_local: weight of the squared distance to the trained weights.
        sample: with `adapt=all`, the number of test examples of each task to evaluate (see metrics.json); 0 means all.
    """

    title = "MBPA++"
    paper = "De Masson d'Autume et al., Episodic Memory in Lifelong Language Learning, NeurIPS 2019"
    card = Card(
        mechanism="replay in one step of a hundred; at prediction, local adaptation to neighbours in memory",
        besides="one additional step in a hundred; prediction costs as much as MBPA's",
        o_rows="O is learned as class 0 with cross-entropy, also in replayed sentences; neighbours are whole sentences",
        reading="Training is Sparse-ER's and prediction is MBPA's, with one herded memory within the budget (the "
        "original stores everything).",
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
