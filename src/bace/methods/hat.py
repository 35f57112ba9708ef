"""HAT: hard attention to the task. Serra, Suris, Miron, Karatzoglou, "Overcoming Catastrophic Forgetting with Hard
Attention to the Task", ICML 2018; on the adapters of a frozen transformer, as Kim et al. (ICML 2023) compare with it.
"""

from collections.abc import Iterable
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Method
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.step_mask import DeltaMask
from bace.models.adapters import Adapter, add_adapters
from bace.models.gates import Gates
from bace.models.heads import LinearHead
from bace.models.model import Model, Output
from bace.randomness import generator


class HAT(Method):
    """Learn near-binary gates on the units of adapters for each task, and never change a weight that an earlier task
    uses. Each task has its own gates, LayerNorms and head; everything else is shared or frozen.

    Args:
        smax: the steepest slope of the gates; in training the slope rises from 1 / smax to smax.
        anneal: the slope rises once over the `stage`, or within every `epoch` as in the original. If an epoch has few
            steps, only its first step can then learn gates that are far from binary.
        gate_steps: gates move as far as they would in at least this many steps; if there are fewer, each is enlarged.
            Default: the steps of Kim et al. on a task of CIFAR-10 (20 epochs of 157). With 0, steps are not enlarged.
        lamb: weight of the sparsity of the gates; 0 leaves it out.
        scores: what is compared between tasks: raw `logits`, the `softmax` of each head, or `entropy`, which ranks the
            soft-max of the head with the least entropy above all others.
        latent: hidden units of the adapters, if the backbone has none (backbone.adapter).
        lr: learning rate of adapters, gates, norms and head; default: the run's.
    """

    paper = "Serra et al., Overcoming Catastrophic Forgetting with Hard Attention to the Task, ICML 2018"
    takes_o = False
    growing_head = False
    one_encoder = False
    card = Card(
        mechanism="binary gates per task on adapters; weights in use never change",
        besides="prediction takes one pass for each task",
        o_rows="refused: O belongs to no task, and the heads of single tasks cannot tell which task a word belongs to",
        reading="Adapters, norms and heads per task follow Kim et al. The slope rises once over the task "
        "(`anneal=stage`); in the original it rises in every epoch, whose steps are few here. Gates move as far as in "
        "the 3,140 steps of Kim et al. on a task (`gate_steps`), and are binary after a task. Raw logits are compared. "
        "Only train.clip clips the gradients (10000 in the original).",
    )

    gates: Gates
    embedding_bound = 6.0

    def __init__(
        self,
        smax: float = 500.0,
        lamb: float = 0.75,
        scores: Literal["logits", "softmax", "entropy"] = "logits",
        latent: int = 64,
        lr: float | None = None,
        anneal: Literal["stage", "epoch"] = "stage",
        gate_steps: int = 3140,
    ) -> None:
        super().__init__()
        if smax < 1 or min(lamb, gate_steps) < 0:
            raise ConfigError(
                f"{self.title}: smax ({smax}) must be at least 1, lamb ({lamb}) and gate_steps ({gate_steps}) "
                "at least 0"
            )
        if latent < 1 or (lr is not None and lr <= 0):
            raise ConfigError(f"{self.title}: latent ({latent}) must be at least 1 and lr ({lr}) above 0")
        self.smax, self.lamb, self.scores, self.latent, self.lr = smax, lamb, scores, latent, lr
        self.anneal, self.gate_steps = anneal, gate_steps
        self.delta = DeltaMask()

    # -- what a task owns

    def build(self, model: Model) -> Model:
        if not any(isinstance(module, Adapter) for module in model.encoder.modules()):
            add_adapters(model.encoder, self.latent, generator(self.now.seed, "adapters"))
        self.gates = Gates(model.encoder)
        model.head = LinearHead(model.encoder.width)  # one block per task
        return model

    def grow(self, task: Task) -> None:
        self.gates.grow(generator(self.now.seed, "gates", task.index))
        self.head.grow(len(task.classes) + self.extra, generator(self.now.seed, "head", task.index))

    @property
    def extra(self) -> int:
        """The number of outputs of each head besides those of its classes."""
        return 0

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, groups=lambda: self.own(task), lr=self.lr)]

    def own(self, task: Task) -> dict[str, Iterable[nn.Parameter]]:
        return {"gates": self.gates.parameters(task.index), "head": self.head.of(task.index)}

    # -- learning

    def before_epoch(self, stage: Stage) -> None:
        steps = self.now.epochs * self.now.steps
        further = max(1.0, self.gate_steps / max(steps, 1))
        embeddings = [(e, torch.full_like(e, further)) for e in self.gates.embeddings(self.now.task)]
        self.delta = DeltaMask([*(self.gates.free() if self.now.task else ()), *embeddings])

    @property
    def scale(self) -> float:
        """s = 1/smax + (smax - 1/smax) i/n at step i of n."""
        i, n = self.now.step, self.now.steps
        if self.anneal == "stage":
            i, n = self.now.epoch * n + i, self.now.epochs * n
        return 1 / self.smax + (self.smax - 1 / self.smax) * i / n

    def loss(self, batch: Batch) -> Loss:
        t = self.now.task
        with self.gates.of(t, self.scale):
            logits = self.logits_of(t, self.model(batch).logits)
            terms = {"new": F.cross_entropy(logits, self.local(t, batch.targets))}
            if self.lamb:
                terms["sparsity"] = self.lamb * self.gates.openness()
        return terms

    def before_step(self, batch: Batch) -> None:
        if self.now.stage == "main":
            self.gates.compensate(self.now.task, self.scale, self.smax)
            self.delta.before_step()

    def after_step(self, batch: Batch) -> None:
        if self.now.stage == "main":
            self.delta.after_step()
            self.gates.clamp(self.now.task, self.embedding_bound)

    def after_task(self, task: Task) -> None:
        self.gates.keep(task.index)
        super().after_task(task)

    def validation_loss(self, examples: Tensor) -> float | None:
        if self.now.stage != "main":
            return None
        logits, targets = self.scored(examples)
        return float(F.cross_entropy(self.logits_of(self.now.task, logits), self.local(self.now.task, targets)))

    # -- heads

    @property
    def head(self) -> LinearHead:
        return cast(LinearHead, self.model.head)

    def logits_of(self, task: int, logits: Tensor) -> Tensor:  # (rows, all outputs) -> (rows, outputs of the task)
        found: Tensor = logits.split(self.head.sizes, 1)[task]
        return found

    def local(self, task: int, targets: Tensor) -> Tensor:  # (rows,) class ids -> (rows,) outputs of the task's head
        """Positions among the task's classes; every other class gets the position after them."""
        classes = self.stream[task].classes
        own = (targets >= classes.start) & (targets < classes.stop)
        return torch.where(own, targets - classes.start, len(classes))

    # -- prediction

    def passes(self, batch: Batch) -> list[Output]:
        """For each task, the features and the logits of its head under its own binary gates and norms."""
        found = []
        for t in range(len(self.head.blocks)):
            with self.gates.of(t):
                out = self.model(batch)
                found.append(Output(out.features, self.logits_of(t, out.logits)))
        return found

    @torch.inference_mode()
    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        logits = [out.logits for out in self.passes(batch)]
        if self.scores == "logits":
            return torch.cat(logits, 1)
        likely = [F.softmax(z, 1) for z in logits]
        if self.scores == "entropy":
            entropy = torch.stack([torch.special.entr(p).sum(1) for p in likely], 1)  # (rows, tasks)
            chosen = F.one_hot(entropy.argmin(1), len(likely))
            likely = [p + chosen[:, [t]] for t, p in enumerate(likely)]
        return torch.cat(likely, 1)
