"""HAL: hindsight anchor learning. Chaudhry, Gordo, Dokania, Torr, Lopez-Paz, "Using Hindsight to Anchor Past Knowledge
in Continual Learning", AAAI 2021.

An anchor is a synthetic input for a class, made after its task. Its loss would rise most if the network went on to
learn something else. Later steps must not change the predictions on anchors.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from bace import ranks
from bace.core.method import Card, Passes
from bace.core.optimiser import OPTIMISERS
from bace.core.stage import Loss
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.models.model import Model

AVERAGED = 128  # an anchor starts from the mean of this many examples of its class, few enough to hold at once


class HAL(ER):
    """Replay from a ring buffer, and keep the predictions on one synthetic anchor for each old class.

    Args:
        reduction: as in ER.
        ring: memory slots are shared equally by each `task` or each `class` known so far, and hold its newest
            examples. A memory with a number of slots per class is shared by classes.
        lambda_anchor: weight of the change on anchors; 0 makes no anchors and only replays from a ring buffer.
        beta: phi <- beta phi + (1 - beta) mean feature, for each class and step.
        gamma: weight of an anchor's distance to phi.
        anchor_steps: steps of Adam that make the anchors of a task.
        anchor_lr: learning rate of the anchors, in normalised pixels or word vectors.
        memory_steps: steps on 10 old examples each that show what the network would forget.
    """

    paper = "Chaudhry et al., Using Hindsight to Anchor Past Knowledge in Continual Learning, AAAI 2021"
    takes_o = False
    networks = 2  # the second shows, after a task, what would be forgotten
    cost = Passes(7, 3)  # every step passes an anchor of each old class: 4 are for 40 anchors beside 64 new examples
    card = Card(
        mechanism="replay from a ring buffer; a look-ahead step must not change the predictions on learned anchors",
        besides="a second backward pass in each step; in each task `memory_steps` steps on 10 old examples each, and "
        "`anchor_steps` steps of two networks on its anchors",
        o_rows="refused: an anchor is one input of one class, but a sentence shows several classes",
        reading="The gradient of the look-ahead step is held constant, which is an option of the authors' code. By "
        "default they differentiate through it, which fused attention does not support. The distance to phi is a "
        "cosine distance with one phi per class, and anchors start from the mean input of their class. Hindsight "
        "comes from the slots of older tasks, so in the first task only phi moves the anchors. An example enters the "
        "ring once, in the first epoch.",
    )

    anchors: Tensor  # (old classes, ...) pixels, or word vectors
    anchor_masks: Tensor  # (old classes, tokens) of texts; otherwise empty
    anchor_targets: Tensor  # (old classes,)
    phi: Tensor  # (classes of the task, width)

    def __init__(
        self,
        reduction: Literal["sum", "joint"] = "sum",
        ring: Literal["task", "class"] = "task",
        lambda_anchor: float = 0.1,
        beta: float = 0.5,
        gamma: float = 0.1,
        anchor_steps: int = 100,
        anchor_lr: float = 1e-3,
        memory_steps: int = 50,
    ) -> None:
        super().__init__("batch", reduction)
        if min(lambda_anchor, gamma, anchor_steps, memory_steps) < 0 or anchor_lr <= 0:
            raise ConfigError(
                f"HAL: lambda_anchor ({lambda_anchor}), gamma ({gamma}), anchor_steps ({anchor_steps}) and "
                f"memory_steps ({memory_steps}) must be at least 0, anchor_lr ({anchor_lr}) above 0"
            )
        if not 0 <= beta < 1:
            raise ConfigError(f"HAL: beta ({beta}) must be at least 0 and below 1")
        self.ring, self.lambda_anchor, self.beta, self.gamma = ring, lambda_anchor, beta, gamma
        self.anchor_steps, self.anchor_lr, self.memory_steps = anchor_steps, anchor_lr, memory_steps
        self.features = torch.zeros(0)  # (new rows, width) of the step's own pass
        self.register_buffer("anchors", torch.zeros(0))
        self.register_buffer("anchor_masks", NO_IDS.clone())
        self.register_buffer("anchor_targets", NO_IDS.clone())
        self.register_buffer("phi", torch.zeros(0))

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.phi = self.phi.new_zeros(len(task.classes), self.model.head.width)

    @property
    def replay_size(self) -> int:
        """None in the first task, where the ring holds only the task's own examples."""
        return super().replay_size if self.now.task else 0

    # -- a step

    def loss(self, batch: Batch) -> Loss:
        both = self.with_replay(batch)
        out = self.model(both)
        self.features = out.features[: len(batch)].detach()
        terms = self.cross_entropy(out.logits, both, len(batch))
        if self.lambda_anchor and len(self.anchors):
            change = self.change(functools.reduce(torch.add, terms.values()))
            terms["anchor"] = self.count_means(both, len(batch)) * self.lambda_anchor * change
        return terms

    def change(self, loss: Tensor) -> Tensor:  # (), ()
        """mean_e sum_c (z_theta(e) - z_theta^(e))_c^2, where theta^ = theta - lr g and g = d loss / d theta is held
        constant. No parameter and no `.grad` is touched."""
        theta = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        g = ranks.mean(torch.autograd.grad(loss, list(theta.values()), retain_graph=True, materialize_grads=True))
        ahead = {name: p - self.now.lr * d for (name, p), d in zip(theta.items(), g, strict=True)}
        batch = self.as_batch(self.anchors, self.anchor_masks, self.anchor_targets)
        # both passes have one name and so the same dropout: only the parameters make the difference
        z: Tensor = self.model(batch, name="anchors").logits
        z_ahead: Tensor = functional_call(self.model, ahead, (batch,), {"name": "anchors"}).logits
        return (z - z_ahead).square().sum(1).mean()

    def after_step(self, batch: Batch) -> None:
        if self.now.epoch == 0:
            self.offer(batch)
        if self.lambda_anchor:
            shown = F.one_hot(batch.targets - self.now.known, len(self.phi)).to(self.features)  # (rows, classes)
            count = shown.sum(0)[:, None]
            mean = shown.T @ self.features / count.clamp(min=1)
            self.phi = torch.where(count > 0, self.beta * self.phi + (1 - self.beta) * mean, self.phi)

    def offer(self, batch: Batch) -> None:
        """Keep the newest examples of each task (class); the tasks known so far share the memory equally."""
        if self.ring == "class" or self.memory.per_class:
            groups, known = self.labels(batch), self.now.seen
        else:
            groups, known = torch.full_like(batch.examples, self.now.task), self.now.task + 1
        self.memory.offer_ring(batch.examples, self.now.task, groups, self.memory.quota(known))

    # -- anchors

    def after_task(self, task: Task) -> None:  # the ring is already full, so nothing is chosen at the end
        if not self.lambda_anchor:
            return
        targets, start, masks = self.mean_inputs(task)
        moved = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([moved], lr=self.anchor_lr)
        later = self.hindsight(task)
        for _ in range(self.anchor_steps):
            objective = self.objective(self.as_batch(moved, masks, targets), later)
            (moved.grad,) = ranks.mean(torch.autograd.grad(objective.sum(), moved))  # each anchor has its own term
            optimiser.step()
            moved.data = self.model.encoder.clamp(moved.data)
        self.anchor_targets = torch.cat([self.anchor_targets, targets])
        self.anchors = pad_sequence([*self.anchors, *moved.detach()], batch_first=True)  # the shorter texts are padded
        if len(masks):
            self.anchor_masks = pad_sequence([*self.anchor_masks, *masks], batch_first=True)

    @torch.no_grad()
    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        """Anchors are made from a class's examples. `phi` holds the mean features of the last task's classes, whose
        anchors already exist."""
        super().forget(classes, examples)
        kept = ~torch.isin(self.anchor_targets, torch.tensor(classes, device=self.anchor_targets.device))
        if len(self.anchor_masks):
            self.anchor_masks = self.anchor_masks[kept]
        self.anchors, self.anchor_targets = self.anchors[kept], self.anchor_targets[kept]
        self.phi = torch.zeros_like(self.phi)

    def objective(self, batch: Batch, later: Model) -> Tensor:  # (anchors,)
        """CE(theta_t; e, y) - CE(theta_M; e, y) + gamma (1 - cos(h(e), phi_y)): forgetting is maximised."""
        out = self.model(batch)
        now, then = (F.cross_entropy(z, batch.targets, reduction="none") for z in (out.logits, later(batch).logits))
        phi = self.phi[batch.targets - self.now.known]
        return now - then + self.gamma * (1 - F.cosine_similarity(out.features, phi, dim=1))

    def hindsight(self, task: Task) -> Model:
        """theta_M: a copy of the network that went on to learn the memory of older tasks."""
        later = copy.deepcopy(self.model)
        old = self.memory.examples[self.memory.task < task.index]
        if not len(old):
            return later
        kind = OPTIMISERS[self.training_settings.optimiser]
        optimiser = kind([p for p in later.parameters() if p.requires_grad], lr=self.training_settings.lr)
        for step in range(1, self.memory_steps + 1):
            drawn = old[torch.randint(len(old), (10,), generator=self.now.rng(f"hindsight {step}"))]
            batch = self.stream.batch(drawn, view=self.now.view(step))
            optimiser.zero_grad()
            F.cross_entropy(later(batch).logits, batch.targets).backward()
            ranks.average(later.parameters())
            optimiser.step()
        return later

    def mean_inputs(self, task: Task) -> tuple[Tensor, Tensor, Tensor]:  # (anchors,), (anchors, ...), masks
        """The mean input of each class of the task. Texts are averaged token by token, up to their median length."""
        encoder = self.model.encoder
        means, masks = [], []
        found = self.stream.by_group(self.training_examples(task))
        for c, members in found.items():
            some = members[torch.randperm(len(members), generator=self.now.rng(f"anchor {c}"))[:AVERAGED]]
            inputs = encoder.relax(self.stream.batch(some).inputs)
            values, mask = inputs[encoder.movable], inputs.get("attention_mask")
            if mask is None:
                means.append(values.mean(0))
            else:
                mask = mask[:, : int(mask.sum(1).median())]
                total = (mask[:, :, None] * values[:, : mask.shape[1]]).sum(0)
                means.append(total / mask.sum(0)[:, None])
                masks.append(torch.ones_like(mask[0]))
        start = pad_sequence(means, batch_first=True)
        targets = torch.tensor(list(found), device=start.device)
        return targets, start, pad_sequence(masks, batch_first=True) if masks else self.anchor_masks[:0]

    def as_batch(self, anchors: Tensor, masks: Tensor, targets: Tensor) -> Batch:
        inputs = {self.model.encoder.movable: anchors} | ({"attention_mask": masks} if len(masks) else {})
        return Batch(inputs, targets, NO_IDS, NO_IDS)  # anchors are not examples of the stream
