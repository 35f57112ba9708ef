"""IDBR: information disentanglement based regularisation. Huang, Zhang, Chen, Wang, Yang, "Continual Learning for Text
Classification with Information Disentanglement Based Regularization", NAACL 2021."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Method, Passes
from bace.core.stage import Loss, Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.models.heads import CosineHead, Head, LinearHead, kmeans
from bace.models.model import Branch, Model, parameter_count
from bace.models.text_encoder import TextEncoder
from bace.randomness import generator


class Reader(nn.Module):
    """A linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = LinearHead(width)

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, outputs)
        result: Tensor = self.head(features)
        return result

    def forget_classes(self, classes: Iterable[int]) -> None:
        """Its rows are not classes."""


class Halves(Model):
    """A model that reads each text as two halves, [CLS] a [SEP] b [SEP], cut in the middle. Inputs may set `cut`
    (texts,), the number of tokens before the cut, and `swapped` (texts,), whether b comes first."""

    def branches(self, batch: Batch, taps: bool) -> Iterator[Branch]:
        inputs, words = batch.inputs, self.words(batch.inputs)
        types = getattr(self.encoder.embeddings, "token_type_embeddings", None)  # RoBERTa has one type, DistilBERT none
        halves = halve(
            inputs,
            words,
            inputs.get("cut", words // 2),
            inputs.get("swapped", torch.zeros_like(words, dtype=torch.bool)),
            self.length(inputs),
            typed=types is not None and types.num_embeddings > 1,
        )
        return super().branches(dataclasses.replace(batch, inputs=halves), taps)

    def words(self, inputs: dict[str, Tensor]) -> Tensor:  # (texts,)
        """The number of tokens of each text that are read: a text that is too long with another [SEP] loses its last
        tokens."""
        assert isinstance(self.encoder, TextEncoder)
        return (inputs["attention_mask"].sum(1) - 2).clamp(max=self.encoder.max_tokens - 3)

    def length(self, inputs: dict[str, Tensor]) -> int:
        """The number of tokens of the longest text with another [SEP], known without reading the mask from the device:
        a batch is as long as its longest text."""
        assert isinstance(self.encoder, TextEncoder)
        return min(inputs["input_ids"].shape[1] + 1, self.encoder.max_tokens)


class Disentangled(Halves):
    """Features [g; s] instead of the class token h: g = tanh(W_g h + b_g) is what all tasks share,
    s = tanh(W_s h + b_s) what separates them. Besides the classes, `order` predicts from g whether the halves of a text
    are swapped, and `tasks` predicts from s which task the text belongs to."""

    def __init__(self, model: Model, hidden: int, rng: torch.Generator) -> None:
        head: Head = LinearHead(2 * hidden)
        if isinstance(model.head, CosineHead):
            head = CosineHead(2 * hidden, model.head.sigma.item(), model.head.sigma.requires_grad)
        super().__init__(model.encoder, head, model.precision)
        self.parts, self.order, self.tasks = Reader(model.encoder.width), Reader(hidden), Reader(hidden)
        self.parts.head.grow(2 * hidden, rng)
        self.order.head.grow(2, rng)

    def _read(self, branches: Iterable[Branch], batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, tapped = super()._read(branches, batch)
        return torch.tanh(self.parts(hidden)), tapped


class IDBR(Method):
    """Split the feature of a text into a shared part, trained by predicting which half of the text comes first, and a
    task-specific part, trained by predicting the task. Keep each part near its value before the task, more strongly in
    the rare rounds of replay.

    Args:
        hidden: width of each of the two parts.
        reg_g: how strongly the shared part is kept; 0 leaves it free.
        reg_s: how strongly the task-specific part is kept; 0 leaves it free.
        reg_new: factor of both in ordinary steps.
        reg_replay: factor of both in rounds of replay.
        nsp: weight of predicting which half comes first; 0 leaves it and the swapped copies out.
        tsk: weight of predicting the task, in rounds of replay; 0 leaves it out.
        every: a round of replay replaces one step of a task in every `every` steps; 0 means never. A round has as many
            steps as there are tasks so far, over equally many examples of each task.
        warmup: steps in which the learning rate rises at the start of a task, at most a tenth of its steps; 0: none.
    """

    not_exportable = "it cuts texts in halves, and how long these are depends on the other texts of the batch"
    paper = (
        "Huang et al., Continual Learning for Text Classification with Information Disentanglement Based "
        "Regularization, NAACL 2021"
    )
    modalities = frozenset(("text",))
    uses_memory = True
    cost = Passes(7, task=2)  # 3 for each order of the halves, and rounds of replay, which grow with every task
    card = Card(
        mechanism="a feature of two parts, each kept near its earlier value; auxiliary tasks; rare replay",
        besides="rounds of replay grow with the number of tasks: 7 is for a few tasks",
        o_rows="refused: both auxiliary tasks, the order of a text's halves and the task of a text, need whole texts",
        reading="A text is always read as two halves, as in the authors' code. In training it is cut at random at "
        "each step, and its swapped copy is cut again; in prediction, in the selection of the memory and for the "
        "features that are preserved, it is cut in the middle. Steps are counted across the epochs of a task. The "
        "memory is selected by k-means of class tokens in each class. We do not select the best network on old "
        "validation data. Warm-up is shorter for short tasks. All new layers learn at train.head_lr, and the run's "
        "head reads both parts.",
    )

    model: Disentangled

    def __init__(
        self,
        hidden: int = 128,
        reg_g: float = 0.5,
        reg_s: float = 0.5,
        reg_new: float = 0.5,
        reg_replay: float = 5.0,
        nsp: float = 1.0,
        tsk: float = 1.0,
        every: int = 10,
        warmup: int = 1000,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ConfigError(f"IDBR: hidden is {hidden}, but each part of a feature needs at least 1")
        if min(reg_g, reg_s, reg_new, reg_replay, nsp, tsk, every, warmup) < 0:
            raise ConfigError(
                f"IDBR: reg_g ({reg_g}), reg_s ({reg_s}), reg_new ({reg_new}), reg_replay ({reg_replay}), nsp ({nsp}), "
                f"tsk ({tsk}), every ({every}) and warmup ({warmup}) must be at least 0"
            )
        self.hidden, self.reg_g, self.reg_s, self.reg_new, self.reg_replay = hidden, reg_g, reg_s, reg_new, reg_replay
        self.nsp, self.tsk, self.every, self.warmup = nsp, tsk, every, warmup
        self.noted = NO_IDS  # (examples,) ids of the rows of `before`, ascending
        self.before: Tensor  # (examples, 2 hidden) features of the task's and the memory's texts before the task
        self.register_buffer("before", torch.zeros(0, 2 * hidden))

    def build(self, model: Model) -> Model:
        return Disentangled(model, self.hidden, generator(self.now.seed, "disentangle"))

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.model.tasks.head.grow(1, generator(self.now.seed, "task head", task.index))

    def stages(self, task: Task) -> list[Stage]:
        return [
            self.stage(
                task,
                batch_size=self.batch_size,
                schedule=self.warm if self.warmup else None,
                prepare=lambda: self.note(task),
            )
        ]

    def warm(self, epochs: float) -> float:
        """Linear warm-up, then constant."""
        steps = min(self.warmup, self.now.steps * self.now.epochs // 10)
        return min((epochs * self.now.steps + 1) / steps, 1.0) if steps else 1.0

    # -- the features before the task

    def held(self, task: Task) -> Tensor:  # (examples,) ids, ascending
        """The task's texts and the memory's."""
        ids: Tensor = torch.unique(torch.cat([self.training_examples(task), self.memory.examples]))
        return ids

    def note(self, task: Task) -> None:
        """The batch with its texts cut in the middle."""
        if task.index and max(self.reg_g, self.reg_s) * max(self.reg_new, self.reg_replay):
            self.before = self.outputs(self.held(task), logits=False).features

    def before_epoch(self, stage: Stage) -> None:
        self.noted = self.held(self.stream[self.now.task])

    def shrink(self, task: Task) -> None:
        self.before = self.before[:0]

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        layers = parameter_count(self.model.parts)
        return kept + layers + 2 * self.hidden * len(self.held(self.stream[task])), trained + layers

    # -- steps

    @property
    def replays(self) -> bool:
        """Whether a round of replay replaces this step."""
        step = self.now.epoch * self.now.steps + self.now.step + 1
        return self.every > 0 and step % self.every == 0 and self.now.task > 0 and len(self.memory) > 0

    def expand(self, batch: Batch) -> Iterable[Batch]:
        """The batch; in a round of replay, batches of it and of equally many examples of each old task, shuffled."""
        parts = [batch]
        if self.replays:
            ids = torch.cat([*(self.drawn_of(task) for task in range(self.now.task)), batch.examples])
            order = torch.randperm(len(ids), generator=self.now.rng("round"))
            parts = [self.stream.batch(part) for part in ids[order].split(self.batch_size)]
        return (self.halved(part, self.now.rng(f"cut {i}")) for i, part in enumerate(parts))

    def drawn_of(self, task: int) -> Tensor:  # (batch size,) ids; (0,) if the memory has none of this task
        own = self.memory.examples[self.memory.task == task]
        if not len(own):
            return own
        return own[torch.randint(len(own), (self.batch_size,), generator=self.now.rng(f"memory {task}"))]

    def halved(self, batch: Batch, rng: torch.Generator) -> Batch:
        """Each text is cut in two at random, followed by a copy of all texts, which are cut again at random and have
        their halves swapped."""
        words = self.model.words(batch.inputs)

        def once(swapped: bool) -> Batch:
            share = torch.rand(len(batch), generator=rng, dtype=torch.float64).to(words.device)
            cut = torch.minimum(1 + (share * (words - 1)).long(), words)  # after the first token, before the last
            order = torch.full_like(words, swapped, dtype=torch.bool)
            return dataclasses.replace(batch, inputs={**batch.inputs, "cut": cut, "swapped": order})

        return Batch.cat(once(False), once(True) if self.nsp else None)

    def loss(self, batch: Batch) -> Loss:
        """The batch holds texts that are cut in two. With `nsp`, copies with swapped halves follow them."""
        with self.model.encoder.uncached():  # halves are cut at random: none comes twice
            out = self.model(batch)
        g, s = out.features.chunk(2, 1)
        plain = len(batch) // 2 if self.nsp else len(batch)
        terms = {"class": F.cross_entropy(out.logits, batch.targets)}
        if self.nsp:
            swapped = (torch.arange(len(batch), device=g.device) >= plain).long()
            terms["order"] = self.nsp * F.cross_entropy(self.model.order(g), swapped)
        factor = self.reg_replay if self.replays else self.reg_new
        if factor and len(self.before):
            # lambda [reg_s mean (s - s0)^2 + reg_g mean (g - g0)^2], over the texts that are not swapped
            at = torch.searchsorted(self.noted, batch.examples[:plain])
            g0, s0 = self.before[at].chunk(2, 1)
            held = self.reg_s * F.mse_loss(s[:plain], s0) + self.reg_g * F.mse_loss(g[:plain], g0)
            terms["hold"] = factor * held
        if self.tsk and self.replays:
            ends = torch.tensor([task.classes.stop for task in self.stream[: self.now.task + 1]], device=s.device)
            task = torch.searchsorted(ends, batch.targets, right=True)
            terms["task"] = self.tsk * F.cross_entropy(self.model.tasks(s), task)
        return terms

    # -- memory

    def choose(self, examples: Tensor, task: Task, count: int) -> dict[int, Tensor]:
        """The texts nearest to the centres of clusters of class tokens, or random texts (memory.select)."""
        if self.memory.select == "random":
            return super().choose(examples, task, count)
        model = self.model
        head = LinearHead(model.encoder.width).to(self.stream.device)
        bare = Halves(model.encoder, head, model.precision).eval()
        chosen = {}
        for group, members in self.stream.by_group(examples).items():
            rng = generator(self.now.seed, "k-means", task.index, group)
            features = self.outputs(members, bare, logits=False).features
            chosen[group] = members[central(features.cpu(), count, rng)]
        return chosen


def halve(
    inputs: dict[str, Tensor],  # input_ids and attention_mask (texts, tokens): [CLS] text [SEP]
    words: Tensor,  # (texts,) number of tokens of each text that are read
    cut: Tensor,  # (texts,) number of tokens in half a
    swapped: Tensor,  # (texts,) bool
    length: int,  # of the result
    *,
    typed: bool,
) -> dict[str, Tensor]:
    """[CLS] a [SEP] b [SEP], or [CLS] b [SEP] a [SEP]; token types 0 and 1 for the two halves, if `typed`."""
    ids, end = inputs["input_ids"], inputs["attention_mask"].sum(1, keepdim=True) - 1  # (texts, 1) the last [SEP]
    words, cut, swapped = words[:, None], cut[:, None], swapped[:, None]
    before = torch.where(swapped, words - cut, cut)  # tokens of the half that comes first
    at = torch.arange(length, device=ids.device).expand(len(ids), -1)
    place = at - (at > before).long() - 1  # among the words, in their new order
    source = 1 + (place + torch.where(swapped, cut, 0)) % words.clamp(min=1)
    source = torch.where((at == before + 1) | (at == words + 2), end, source)
    source = torch.where(at == 0, 0, source)
    mask = at <= words + 2
    made = {"input_ids": torch.where(mask, ids.gather(1, source), 0), "attention_mask": mask.long()}
    if typed:
        made["token_type_ids"] = (mask & (at > before + 1)).long()
    return made


def central(
    features: Tensor,  # (texts, width), on the CPU
    count: int,
    rng: torch.Generator,
) -> Tensor:  # (min(count, texts),) positions
    """For each of `count` clusters, the text nearest to its centre; large clusters choose first, and no text is chosen
    twice."""
    count = min(count, len(features))
    away = torch.cdist(features, kmeans(features, count, rng))  # (texts, clusters)
    sizes = torch.bincount(away.argmin(1), minlength=count)
    chosen = []
    for cluster in torch.argsort(sizes, descending=True, stable=True).tolist():
        chosen.append(int(away[:, cluster].argmin()))
        away[chosen[-1]] = math.inf
    return torch.tensor(chosen, dtype=torch.int64)
