"""MEMO: a memory-efficient expandable model. Zhou, Wang, Ye, Zhan, "A Model or 603 Exemplars: Towards Memory-Efficient
Class-Incremental Learning", ICLR 2023."""

from typing import Unpack

from bace.core.method import Card, Passes
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.replay import ReplayOptions
from bace.models.encoder import freeze_prefix
from bace.models.expanded import Forked
from bace.models.heads import WideningHead, align
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class MEMO(ER):
    """Share all blocks except the last, add a copy of the last block for each task, and classify by all of them.

    Args:
        alpha_aux: weight of the auxiliary classifier, which uses only the new block to separate the new classes from
            each other and from all old classes; 0 leaves it out.
        train_trunk: continue to train the shared blocks after the first task.
        align: after each task, scale the new rows of the classifier to the mean norm of the old ones.
    """

    title = "MEMO"
    paper = "Zhou et al., A Model or 603 Exemplars: Towards Memory-Efficient Class-Incremental Learning, ICLR 2023"
    takes_o = False
    growing_head = False  # its rows grow longer too
    cost = Passes(1.5, 1.5, task=1)  # the trunk is frozen; for 12 blocks, in early tasks
    card = Card(
        mechanism="replay; a last block for each task on a shared trunk; an auxiliary classifier",
        besides="every task adds a block",
        o_rows="refused: the auxiliary classifier separates new classes from old ones, and O hides both",
        replay="concat",
        reading="The head is linear. As for ViTs in the original, the trunk is frozen after the first task and "
        "nothing is aligned (`train_trunk` and `align` change this). Old rows start at zero on the new block, so old "
        "logits do not jump.",
    )

    model: Forked

    def __init__(
        self,
        alpha_aux: float = 1.0,
        train_trunk: bool = False,
        align: bool = False,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if alpha_aux < 0:
            raise ConfigError(f"MEMO: alpha_aux is {alpha_aux}, but it must be at least 0")
        self.alpha_aux, self.train_trunk, self.align = alpha_aux, train_trunk, align

    def build(self, model: Model) -> Model:
        return Forked(model.encoder, WideningHead(model.encoder.width), model.precision)

    def grow(self, task: Task) -> None:
        if task.index:
            self.model.add_tip()  # s_t <- s_{t-1}
            if not self.train_trunk:
                freeze_prefix(self.model.encoder, len(self.model.encoder.blocks) - 1)
        super().grow(task)
        if task.index and self.alpha_aux:
            rng = generator(self.now.seed, "auxiliary", task.index)
            self.model.head.assist(1 + len(task.classes), rng)

    def loss(self, batch: Batch) -> Loss:
        """L = CE(W [h_0 .. h_t], y) + alpha_aux CE(Aux h_t, y'), y' = 0 for old classes, 1 .. N for new ones."""
        both, head = self.with_replay(batch), self.model.head
        out = self.model(both)
        terms = self.cross_entropy(out.logits, both, len(batch))
        if head.auxiliary is not None:
            own = (both.targets - self.now.known + 1).clamp(min=0)
            beside = self.cross_entropy(head.auxiliary(out.features[:, -head.branch :]), both, len(batch), own)
            terms |= {f"auxiliary {name}": self.alpha_aux * term for name, term in beside.items()}
        return terms

    def after_task(self, task: Task) -> None:
        if self.align and task.index:
            align(self.model.head)
        super().after_task(task)

    def needs(self, task: int) -> tuple[int, int]:
        tip, encoder = self.model.tips[-1], self.model.encoder
        whole = task == 0 or self.train_trunk
        kept = parameter_count(encoder) + task * parameter_count(tip, trained_only=True)
        return kept, parameter_count(encoder if whole else tip, trained_only=True)
