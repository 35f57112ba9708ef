"""BEEF: energy-based expansion and fusion. Wang, Zhou, Liu, Ye, Bian, Zhan, Zhao, "BEEF: Bi-Compatible
Class-Incremental Learning via Energy-Based Expansion and Fusion", ICLR 2023."""

import dataclasses
from collections.abc import Iterable
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace import ranks
from bace.core.method import Card, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.er import ER
from bace.methods.parts.replay import ReplayOptions
from bace.models.expanded import Expanded
from bace.models.heads import LinearHead, WideningHead
from bace.models.model import Model, parameter_count
from bace.randomness import generator


class FusingHead(WideningHead):
    """The classifier over all modules and, on the newest one, the prototypes that expansion and fusion train.

    z_c = (W [h_0 .. h_{t-1}])_c + (1 + a_i) (Wb_i h_t + b_i) + c_i for a class c of old task i, and (Wn h_t)_c for a
    new class.
    """

    scale: nn.Parameter  # (old tasks,) a
    shift: nn.Parameter  # (old tasks,) c

    def __init__(self, width: int, energy: bool) -> None:
        super().__init__(width)
        self.energy = energy
        self.backward_prototypes: LinearHead | None = None  # Wb, b: a row for each old task
        self.forward_prototypes: LinearHead | None = None  # Wf: a row for each class, for inputs that look like it

    @property
    def task_of_old(self) -> Tensor:  # (old classes,) the task of each
        tasks = [task for task, block in enumerate(self.blocks[:-1]) for _ in range(len(block))]
        return torch.tensor(tasks, dtype=torch.int64, device=self.no_rows.device)

    def grow(self, classes: int, generator: torch.Generator, newest_only: bool = True) -> None:
        old_tasks, device = len(self.blocks), self.no_rows.device
        super().grow(classes, generator, newest_only)
        self.requires_grad_(False)
        for trained in (self.blocks[-1], self.biases[-1]):  # Wn
            trained.requires_grad_()
        if old_tasks:
            self.backward_prototypes = LinearHead(self.branch).to(device)
            self.backward_prototypes.grow(old_tasks, generator)
            self.scale, self.shift = (nn.Parameter(torch.zeros(old_tasks, device=device)) for _ in "ac")
        if self.energy:
            self.forward_prototypes = LinearHead(self.branch).to(device)
            self.forward_prototypes.grow(self.classes, generator)

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        logits = super().forward(features)
        if self.backward_prototypes is None:
            return logits
        old = (1 + self.scale) * self.backward_prototypes(features[:, -self.branch :]) + self.shift  # (rows, old tasks)
        return logits + F.pad(old[:, self.task_of_old], (0, len(self.blocks[-1])))

    def forget_classes(self, classes: Iterable[int]) -> None:
        super().forget_classes(classes)
        if self.forward_prototypes is not None:
            self.forward_prototypes.forget_classes(classes)

    def expansion(self, newest: Tensor) -> tuple[Tensor, Tensor]:  # (rows, branch) -> (rows, t + N), (rows, seen)
        """u = [Wb h_t, Wn h_t], and Wf h_t."""
        new = F.linear(newest, self.blocks[-1]) + self.biases[-1]
        beyond = new[:, :0] if self.forward_prototypes is None else self.forward_prototypes(newest)
        u = new if self.backward_prototypes is None else torch.cat([self.backward_prototypes(newest), new], 1)
        return u, beyond

    def column(self, targets: Tensor) -> Tensor:  # (rows,) classes -> (rows,) columns of u
        """An old class has the column of its task; new classes come after the old tasks."""
        new = torch.arange(len(self.blocks[-1]), device=targets.device) + len(self.blocks) - 1
        return torch.cat([self.task_of_old, new])[targets]

    @torch.no_grad()
    def fold(self) -> None:
        """W <- [W | (1 + a_i) Wb_i], b <- b + (1 + a_i) b_i + c_i for the rows of each old task i. Afterwards only
        the matrix is needed."""
        if self.backward_prototypes is None:
            return
        factor, rows = 1 + self.scale, self.backward_prototypes
        self.columns[-1].add_((factor[:, None] * rows.weight)[self.task_of_old])
        for bias, more in zip(self.biases, factor * rows.bias + self.shift, strict=False):  # the last one is new
            bias.add_(more)
        for folded in (*rows.parameters(), self.scale, self.shift):
            folded.zero_()


class BEEF(ER):
    """Train a separate module for each task, with prototypes for old tasks (backward) and for inputs outside all known
    classes (forward). Then fuse the modules by two scalars for each old task.

    Args:
        init_epochs: epochs of the first task; the run's train.epochs is not used.
        expand_epochs: epochs of a new module.
        fuse_epochs: epochs of the scalars.
        fuse_steps: minimum number of optimiser steps of the scalars; the epochs are raised to reach it.
        energy: weight of the energy term, which trains the forward prototypes; 0 leaves it out.
        energy_steps: steps of the sampler that makes inputs of the open space.
        energy_lr: step size of the sampler.
        energy_noise: standard deviation of the noise that each step of the sampler adds.
        alignment: in expansion, the logits of old tasks are divided by this number. Default: the original's 1.7 if few
            old examples are mixed with many new ones (`concat`), and 1 if both are equally many (`batch`).
        fuse_lr: learning rate of the scalars.
    """

    title = "BEEF"
    paper = (
        "Wang et al., BEEF: Bi-Compatible Class-Incremental Learning via Energy-Based Expansion and Fusion, ICLR 2023"
    )
    takes_o = False
    growing_head = False  # its rows grow longer too
    expands = True
    card = Card(
        mechanism="replay; an encoder for each task, energy-based prototypes, fusion by scalars",
        besides="fusion passes the memory and as many new examples through all networks",
        o_rows="refused: a word labelled O belongs to no task, so it has no backward prototype",
        stages=("expand", "fuse"),
        replay="concat",
        reading="The heads are linear. Biases are added when prototypes are folded into the classifier, the sample's "
        "own column is left out row by row, and the energy is computed per sample; the official code has slips in all "
        "three. The energy is one mean over new and replayed rows. The balanced set is the memory and as many "
        "examples of each new class. For texts, the sampler starts from permuted word vectors. With backbone.adapter, "
        "the networks share everything that is not trained, which the paper does not do. The original's alignment of "
        "1.7 belongs to `concat`; balanced batches have 1. Fusion takes at least 60 steps (`fuse_steps`), because the "
        "original's epochs are 3 steps with a small memory.",
    )

    model: Expanded

    def __init__(
        self,
        init_epochs: int = 5,
        expand_epochs: int = 3,
        fuse_epochs: int = 3,
        fuse_steps: int = 60,
        energy: float = 0.01,
        energy_steps: int = 3,
        energy_lr: float = 0.01,
        energy_noise: float = 0.001,
        alignment: float | None = None,
        fuse_lr: float = 0.05,
        **replay: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(**replay)
        if min(init_epochs, expand_epochs, fuse_epochs) < 1:
            raise ConfigError(
                f"BEEF: init_epochs ({init_epochs}), expand_epochs ({expand_epochs}) and fuse_epochs ({fuse_epochs}) "
                "must be at least 1"
            )
        if min(fuse_steps, energy, energy_steps, energy_lr, energy_noise) < 0:
            raise ConfigError(
                f"BEEF: fuse_steps ({fuse_steps}), energy ({energy}), energy_steps ({energy_steps}), energy_lr "
                f"({energy_lr}) and energy_noise ({energy_noise}) must be at least 0"
            )
        alignment = {"batch": 1.0, "concat": 1.7}[self.policy.mode] if alignment is None else alignment
        if alignment <= 0 or fuse_lr <= 0:
            raise ConfigError(f"BEEF: alignment ({alignment}) and fuse_lr ({fuse_lr}) must be above 0")
        self.init_epochs, self.expand_epochs = init_epochs, expand_epochs
        self.fuse_epochs, self.fuse_steps = fuse_epochs, fuse_steps
        self.energy, self.energy_steps = energy, energy_steps
        self.energy_lr, self.energy_noise = energy_lr, energy_noise
        self.alignment, self.fuse_lr = alignment, fuse_lr
        each = 6 + 3 * energy_steps if energy else 3  # the batch, the sampler's result, and the sampler's steps
        self.cost = Passes(each, each, task=1, epochs=expand_epochs, first=1 + each * init_epochs)

    @property
    def head(self) -> FusingHead:
        return cast(FusingHead, self.model.head)

    def build(self, model: Model) -> Model:
        return Expanded(model.encoder, FusingHead(model.encoder.width, self.energy > 0), model.precision)

    def grow(self, task: Task) -> None:
        if task.index:
            self.model.add_branch()  # f_t <- f_0
        super().grow(task)

    def stages(self, task: Task) -> list[Stage]:
        (main,) = super().stages(task)
        if task.index == 0:
            return [dataclasses.replace(main, epochs=self.init_epochs)]
        expand = dataclasses.replace(main, name="expand", epochs=self.expand_epochs)
        if not (self.memory.size or self.memory.per_class):
            return [expand]  # there are no old tasks to fuse
        fuse = self.stage(
            task,
            name="fuse",
            loss=self.fuse,
            epochs=self.fuse_epochs,
            min_steps=self.fuse_steps,
            batch_size=self.batch_size,
            examples=lambda: self.balanced(task),
            module=lambda: self.head,
            groups=lambda: {"scales": (self.head.scale, self.head.shift)},
            lr=self.fuse_lr,
            optimiser="sgd",
            structure=self.freeze,
        )
        return [expand, fuse]

    # -- expansion

    def loss(self, batch: Batch) -> Loss:
        """L = CE(u, y') + energy L_en, where the old tasks' columns of u are divided by `alignment`, and y' is the task
        of an old sample or the class of a new one."""
        both = self.with_replay(batch)
        own, old = self.head.column(both.targets), len(self.head.blocks) - 1
        u, _ = self.head.expansion(self.model(both, newest=True).features)
        aligned = torch.cat([u[:, :old] / self.alignment, u[:, old:]], 1)
        terms = self.cross_entropy(aligned, both, len(batch), own)
        if self.energy:
            means = self.count_means(both, len(batch))
            terms["energy"] = means * self.energy * self.open_space(self.sample(both), own)
        return terms

    def open_space(self, batch: Batch, own: Tensor) -> Tensor:  # own: (rows,) the sample's own column of u
        """L_en = CE([u(x~), Wf h_t(x~)], Wf's row of y), where each row leaves out the sample's own column."""
        u, beyond = self.head.expansion(self.model(batch, name="energy", newest=True).features)
        others = u.scatter(1, own[:, None], -torch.inf)
        return F.cross_entropy(torch.cat([others, beyond], 1), u.shape[1] + batch.targets)

    def sample(self, batch: Batch) -> Batch:
        """x~ <- x~ - energy_lr d/dx~ log(sum of the soft-max over Wf's columns) + noise, starting from a disturbed
        x. The results are inputs that the network, in eval mode, takes for something known."""
        rng, training, key = self.now.rng("energy"), self.model.training, self.model.encoder.movable
        inputs = self.disturbed(batch, rng)
        self.model.eval()
        for _ in range(self.energy_steps):
            x = inputs[key].requires_grad_()
            moved = dataclasses.replace(batch, inputs=inputs)
            u, beyond = self.head.expansion(self.model(moved, newest=True).features)
            log_mass = beyond.logsumexp(1) - torch.cat([u, beyond], 1).logsumexp(1)  # (rows,), each its own
            (gradient,) = ranks.mean(torch.autograd.grad(log_mass.sum(), x))
            noise = torch.randn(x.shape, generator=rng, dtype=x.dtype).to(x.device)
            inputs = {**inputs, key: x.detach() - self.energy_lr * gradient + self.energy_noise * noise}
        self.model.train(training)
        return dataclasses.replace(batch, inputs=inputs)

    def disturbed(self, batch: Batch, rng: torch.Generator) -> dict[str, Tensor]:
        """Where the sampler starts: a picture turned by 180 degrees, a text with its words in another order."""
        return self.stream.modality.disturbed(self.model.encoders[-1].relax(batch.inputs), rng)

    # -- fusion

    def freeze(self) -> None:
        self.model.requires_grad_(False)
        for trained in (self.head.scale, self.head.shift):
            trained.requires_grad_()

    def balanced(self, task: Task) -> Tensor:  # (examples,)
        """The memory, and for each new class as many examples as the largest old class has in memory."""
        most = int(torch.bincount(self.memory.group).max())
        chosen = [self.memory.examples]
        for c, members in self.stream.by_group(self.training_examples(task)).items():
            shuffle = torch.randperm(len(members), generator=generator(self.now.seed, "balanced", task.index, c))
            chosen.append(members[shuffle[:most]])
        return torch.cat(chosen)

    def fuse(self, batch: Batch) -> Loss:
        """L = CE(z, y) over all classes seen."""
        return F.cross_entropy(self.model(batch).logits, batch.targets)

    def after_task(self, task: Task) -> None:
        self.head.fold()
        super().after_task(task)

    def needs(self, task: int) -> tuple[int, int]:
        trained = self.model.trained_size
        return parameter_count(self.model.encoder) + task * trained, trained
