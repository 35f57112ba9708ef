"""MBPA: memory-based parameter adaptation. Sprechmann et al., "Memory-based Parameter Adaptation", ICLR 2018; as De
Masson d'Autume et al. apply it to texts ("Episodic Memory in Lifelong Language Learning", NeurIPS 2019)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from bace.core.memory import ElasticBuffers
from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import NO_IDS, Batch
from bace.errors import ConfigError
from bace.methods.parts.neighbours import nearest
from bace.models.heads import Head
from bace.models.model import Model, Output, frozen_copy
from bace.randomness import generator

Weights = dict[str, Tensor]  # by parameter name

AT_ONCE = 4_000_000  # numbers in the heads that are adapted at the same time, and in the features they are adapted to


class MBPA(Method):
    """Train like SEQ. At prediction, fine-tune a temporary copy of the network on the stored examples that are nearest
    to the query in the feature space of a frozen pre-trained encoder.

    Args:
        K: number of neighbours of each query; the whole memory if it holds fewer.
        steps: steps of the local adaptation; 0 gives SEQ.
        adapt: what is adapted: the `head`, on features of the memory stored at the end of the task, for all examples of
            a batch at the same time; or `all` of the network, one example after the other (the original).
        lr_local: learning rate of the local adaptation by Adam, which restarts for every example. Default: 0.001 for
            the whole network (the original's), 0.01 for the head, because 30 smaller steps would hardly change a
            trained classifier.
        lambda_local: weight of the squared distance to the trained weights.
        sample: with `adapt=all`, the number of test examples of each task to evaluate (see metrics.json); 0 means all.
    """

    not_exportable = "it trains the head on neighbours from memory before each prediction"
    paper = "Sprechmann et al., Memory-based Parameter Adaptation, ICLR 2018"
    uses_memory = True
    scorers = ("base",)
    networks = 2  # the trained network, and the one that computes keys
    cost = Passes(3, task=1, memory=1)
    card = Card(
        mechanism="no change in training; at prediction, local adaptation to neighbours in memory",
        besides="prediction takes a second pass and `steps` steps of the head (of the network with `adapt=all`) on K "
        "examples",
        o_rows="O is learned as class 0 with cross-entropy; the neighbours of a sentence are whole sentences",
        reading="This is the version for texts: keys are the first token of a frozen pre-trained encoder, distances "
        "are Euclidean, weights are uniform, the optimiser is Adam without weight decay, and the soft-max spans all "
        "seen classes. By default only the head is adapted, with a larger learning rate. The memory is herded and "
        "stays within the budget. Neighbours are seen in their clean view. The scorer `base` does not adapt.",
    )

    # the memory at the end of a task, so that prediction needs nothing else
    features: Tensor  # (rows, width)  `adapt=head`
    targets: Tensor  # (rows,)
    owner: Tensor  # (rows,) slot, ascending
    position: Tensor  # (rows,) in a sentence; tokens only

    def __init__(
        self,
        K: int = 32,
        steps: int = 30,
        adapt: Literal["head", "all"] = "head",
        lr_local: float | None = None,
        lambda_local: float = 1e-3,
        sample: int = 100,
    ) -> None:
        super().__init__()
        if lr_local is None:
            lr_local = 1e-2 if adapt == "head" else 1e-3
        if K < 1 or min(steps, sample, lambda_local) < 0 or lr_local <= 0:
            raise ConfigError(
                f"{self.title}: K ({K}) must be at least 1, steps ({steps}), sample ({sample}) and lambda_local "
                f"({lambda_local}) at least 0, lr_local ({lr_local}) above 0"
            )
        self.K, self.steps, self.adapt, self.sample = K, steps, adapt, sample
        self.lr_local, self.lambda_local = lr_local, lambda_local
        self.register_buffer("features", torch.zeros(0, 0))
        for name in ("targets", "owner", "position"):
            self.register_buffer(name, NO_IDS.clone())
        self.inputs = ElasticBuffers()  # (slots, ...) inputs of the encoder; `adapt=all`

    def build(self, model: Model) -> Model:
        if self.steps and not self.memory.size and not self.memory.per_class:
            raise ConfigError(f"{self.title} adapts to stored examples, but the memory is 0: set memory.size")
        self.key_model = frozen_copy(model)  # pre-trained, and never changed
        self.memory.note("keys", torch.zeros(0, model.encoder.width))  # (slots, width)
        if self.adapt == "all":
            for name, none in self.stream.data.inputs(NO_IDS, None, self.stream.device).items():
                self.inputs.register_buffer(name, none)
        return super().build(model)

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, batch_size=self.batch_size)]  # whole batches of new data

    # -- what is stored for the memory

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        if not self.steps:
            return
        memory, examples = self.memory, self.memory.examples
        new = memory.get_buffer("keys").isnan().any(1)  # a key never changes once it is written
        if new.any():  # memory.allow_missing_classes may have removed all of them
            parts = examples[new].split(self.training_settings.eval_batch_size)
            memory.get_buffer("keys")[new] = self.keys_of(self.stream.batch(part) for part in parts)
        kept = self.stream.batch(examples, inputs=self.adapt == "all")
        self.targets, self.owner = kept.targets, kept.owner
        if self.adapt == "head":
            self.features = self.outputs(examples, logits=False).features
            return
        for name, value in kept.inputs.items():
            setattr(self.inputs, name, value)
        self.position = NO_IDS if kept.at is None else kept.at[:, 1]

    def keys_of(self, batches: Iterable[Batch]) -> Tensor:  # (examples, width)
        """The first token of the frozen encoder, also for sentences."""
        whole = (Batch(b.inputs, b.targets, b.examples, b.examples) for b in batches)  # one row per example
        return self.infer(whole, self.key_model).features.cpu()

    def forget(self, classes: Sequence[int], examples: Tensor) -> None:
        kept = ~torch.isin(self.memory.examples, examples)  # (slots,)
        rows = kept.to(self.owner.device)[self.owner]
        for name in ("features", "targets", "owner", "position"):
            if len(getattr(self, name)):
                setattr(self, name, getattr(self, name)[rows])
        self.owner = (kept.cumsum(0) - 1).to(self.owner)[self.owner]
        for name, stored in self.inputs.named_buffers():
            setattr(self.inputs, name, stored[kept.to(stored.device)])
        super().forget(classes, examples)

    # -- prediction

    def predict(self, batch: Batch, scorer: str | None = None) -> Tensor:
        if scorer == "base" or not self.steps or not len(self.memory):
            return super().predict(batch)
        with torch.inference_mode(mode=False):
            # equal neighbourhoods give equal weights, so each is adapted to once
            sets, which = torch.unique(self.neighbours(batch), dim=0, return_inverse=True)
            own = which[batch.owner.cpu()]  # (rows,) the neighbourhood of each queried row
            asked = own.argsort(stable=True).split(own.bincount(minlength=len(sets)).tolist())
            return self.by_heads(batch, sets, asked) if self.adapt == "head" else self.by_networks(batch, sets, asked)

    def neighbours(self, batch: Batch) -> Tensor:  # (examples, min(K, slots)) slots, ascending
        """The slots whose keys are nearest to each example, by Euclidean distance."""
        keys = self.memory.get_buffer("keys")
        both = torch.cat([keys, self.keys_of([batch])])
        found, _ = nearest(both, min(self.K, len(keys)), candidates=torch.arange(len(keys)))
        return found[len(keys) :].sort(1).values

    def by_heads(self, batch: Batch, sets: Tensor, asked: Sequence[Tensor]) -> Tensor:  # (rows, seen)
        """Every neighbourhood has its own head; many heads are adapted at the same time."""
        features, head = self.infer([batch]).features, self.model.head.merged()
        scores = features.new_zeros(len(batch), head.classes)
        numbers = sum(p.numel() for p in head.parameters()) + self.features.numel() * sets.shape[1] // len(self.memory)
        at_once = max(AT_ONCE // numbers, 1)
        for some in torch.arange(len(sets)).split(at_once):
            rows = padded([asked[i] for i in some.tolist()])
            logits = logits_by_heads(head, self.adapted_heads(head, sets[some]), features[rows])
            scores[rows[rows >= 0]] = logits[rows >= 0]
        return scores

    def adapted_heads(self, head: Head, sets: Tensor) -> Weights:  # (sets, K) slots -> (sets, ...) of each parameter
        rows = padded([self.rows_in(slots) for slots in sets])  # (sets, rows of a neighbourhood)
        features, targets, here = self.features[rows], self.targets[rows], rows >= 0
        share = (here / here.sum(1, keepdim=True)).to(features)  # 1/K; 0 where there is no row

        def loss(weights: Weights) -> Tensor:
            """sum_k (1/K) CE(z_W(x_k), y_k), summed over all heads; the terms of different heads are independent."""
            logits = logits_by_heads(head, weights, features)
            return (share * F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")).sum()

        return self.adapted({name: p.expand(len(sets), *p.shape) for name, p in trainable(head).items()}, loss)

    def by_networks(self, batch: Batch, sets: Tensor, asked: Sequence[Tensor]) -> Tensor:  # (rows, seen)
        """The original: all trained parameters are adapted, to one neighbourhood after the other."""
        scores = torch.zeros(len(batch), self.model.head.classes, device=batch.targets.device)
        for slots, rows in zip(sets, asked, strict=True):
            scores[rows] = self.logits_by(self.adapted_network(slots), batch.pick(rows))
        return scores

    def adapted_network(self, slots: Tensor) -> Weights:
        at = torch.stack([self.owner, self.position], 1) if len(self.position) else None
        ids = torch.arange(len(self.owner))
        memory = Batch(dict(self.inputs.named_buffers()), self.targets, self.memory.examples, ids, at)
        near = memory.pick(self.rows_in(slots))
        return self.adapted(
            trainable(self.model), lambda weights: F.cross_entropy(self.logits_by(weights, near), near.targets)
        )

    def logits_by(self, weights: Weights, batch: Batch) -> Tensor:  # (rows, seen)
        out: Output = functional_call(self.model, weights, (batch,))
        return out.logits

    def rows_in(self, slots: Tensor) -> Tensor:  # (rows,)
        """The stored rows of these slots."""
        return torch.isin(self.owner.cpu(), slots).nonzero().flatten()

    def adapted(self, base: Weights, loss: Callable[[Weights], Tensor]) -> Weights:
        """`steps` steps of Adam from `base`, which is not changed, on loss(W) + lambda |W - W_base|^2."""
        weights = {name: value.detach().clone().requires_grad_() for name, value in base.items()}
        optimiser = torch.optim.Adam(weights.values(), lr=self.lr_local, fused=True)
        for _ in range(self.steps):
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    loss(weights), list(weights.values()), allow_unused=True, materialize_grads=True
                )
            with torch.no_grad():
                for (name, w), gradient in zip(weights.items(), gradients, strict=True):
                    w.grad = gradient.add(w - base[name], alpha=2 * self.lambda_local)
            optimiser.step()
        return {name: value.detach() for name, value in weights.items()}

    # -- what it costs

    def evaluated(self, task: Task) -> Tensor:
        if self.adapt == "head" or not self.steps or not 0 < self.sample < len(task.test):
            return task.test
        drawn = torch.randperm(len(task.test), generator=generator(self.now.seed, "sample", task.index))
        return task.test[drawn[: self.sample].sort().values]

    def prediction_cost(self, examples: int) -> str | None:
        if not self.steps or not len(self.memory):
            return None
        near = min(self.K, len(self.memory))
        what = "the head" if self.adapt == "head" else "the whole network"
        return (
            f"{self.title} adapts {what} to {near} neighbours for each of {examples} examples: up to "
            f"{examples * self.steps} forward and backward passes of it on {near} examples"
        )


def trainable(module: nn.Module) -> Weights:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def logits_by_heads(
    head: Head,
    weights: Weights,  # (heads, ...) of each parameter
    features: Tensor,  # (heads, rows, width)
) -> Tensor:  # (heads, rows, classes)
    logits: Tensor = torch.vmap(lambda own, rows: functional_call(head, own, (rows,)))(weights, features)
    return logits


def padded(rows: Sequence[Tensor]) -> Tensor:  # (any,) each -> (len(rows), longest)
    """All rows as one tensor, padded with -1."""
    return pad_sequence(list(rows), batch_first=True, padding_value=-1)
