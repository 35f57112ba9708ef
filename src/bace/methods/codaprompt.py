"""CODA-Prompt: continual decomposed attention-based prompting.

Smith, Karlinsky, Gutta, Cascante-Bonilla, Kim, Arbelle, Panda, Feris, Kira, "CODA-Prompt: COntinual Decomposed
Attention-based Prompting for Rehearsal-Free Continual Learning", CVPR 2023.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.errors import ConfigError
from bace.methods.parts.tuning import check_tuning, long_stage
from bace.methods.seq import SEQ
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.models.prefix_attention import Prefix
from bace.models.prompts import PrefixedModel, PrefixPrompts
from bace.randomness import generator


class CODAPrompt(SEQ):
    """Freeze the encoder and learn components of prompts. An example's prompt, a prefix of the attention of the lowest
    blocks, is the sum of all components, weighted by how well they attend to its query. Every task adds components, and
    those of earlier tasks are fixed.

    Args:
        components: number of components that a task adds (the authors divide 100 among the tasks).
        length: length of a prompt in a block; one half are keys, the other half values.
        blocks: number of blocks with a prompt, from the lowest, at most all of the encoder's.
        tune_epochs: epochs of a task; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate, which falls to 0 along a cosine.
        tune_batch: examples per step.
        tune_steps: minimum number of steps of a task; if there are too few, batches become smaller (down to 8), and
            then there are more epochs. 0 means no minimum.
    """

    title = "CODA-Prompt"
    paper = (
        "Smith et al., CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual "
        "Learning, CVPR 2023"
    )
    takes_o = False
    growing_head = False  # its rows start at zero
    card = Card(
        mechanism="frozen encoder; a prefix of attention as a weighted sum of components; every task adds components "
        "that are orthogonal to the old ones",
        besides="prediction takes 2 passes; every task adds components",
        o_rows="refused: the soft-max spans the task's classes, and O is not one of them",
        stages=("tune",),
        reading="As in the authors' code, prefixes come after the projections, and new components start orthonormal to "
        "the old ones as far as the width allows, but no penalty keeps them orthonormal. The number of components is "
        "set per task, because the number of tasks is not known. The rows of the linear head start at zero (the "
        "authors start them at random): a soft-max over a task's own classes never changes the sum of their rows, so "
        "with two classes a random start would stay in the scores that separate tasks. The authors' 20 epochs are 800 "
        "steps; here a task has at least 400 (`tune_steps`).",
    )

    def __init__(
        self,
        components: int = 10,
        length: int = 8,
        blocks: int = 5,
        tune_epochs: int = 20,
        tune_lr: float = 0.001,
        tune_batch: int = 128,
        tune_steps: int = 400,
    ) -> None:
        super().__init__(span="new")
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch, tune_steps)
        if min(components, blocks) < 1 or length < 2 or length % 2:
            raise ConfigError(
                f"CODA-Prompt: components ({components}) and blocks ({blocks}) must be at least 1, length ({length}) "
                "an even number above 0"
            )
        self.components, self.length, self.blocks = components, length, blocks
        self.tune_epochs, self.tune_lr, self.tune_batch, self.tune_steps = tune_epochs, tune_lr, tune_batch, tune_steps
        self.own_batch = tune_batch
        self.cost = Passes(4, epochs=tune_epochs, steps=tune_steps)

    def build(self, model: Model) -> Model:
        encoder = model.encoder
        blocks = min(self.blocks, len(encoder.blocks))
        prompts = Components(blocks, self.components, self.length, encoder.width)
        head = LinearHead(encoder.width, zero=True)
        return PrefixedModel(encoder, head, prompts, model.precision).to(self.stream.device)

    @property
    def prompts(self) -> "Components":
        return cast(Components, cast(PrefixedModel, self.model).prompts)

    def needs(self, task: int) -> tuple[int, int]:
        kept, _ = super().needs(task)
        return kept + (task + 1) * self.prompts.size, self.prompts.size

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.prompts.grow(generator(self.now.seed, "prompts", task.index), self.stream.device)

    def stages(self, task: Task) -> list[Stage]:
        prompts, head = self.prompts, cast(LinearHead, self.model.head)
        stage = long_stage(
            self,
            task,
            epochs=self.tune_epochs,
            batch_size=self.tune_batch,
            least=self.tune_steps,
            falls=True,
            groups=lambda: {"prompts": prompts.newest(), "head": head.of(task.index)},
            optimiser="adam",
            lr=self.tune_lr,
        )
        return [stage]

    def validation_loss(self, examples: Tensor) -> float:
        return float(self.cross_entropy(*self.scored(examples)))


class Components(PrefixPrompts):
    """Components P, keys K and attentions A for each task and each block.

    Args:
        blocks: the lowest blocks, which have a prompt.
        count: number of components of a task.
        length: length of a prompt.
    """

    def __init__(self, blocks: int, count: int, length: int, width: int) -> None:
        super().__init__()
        self.blocks, self.count, self.length, self.width = blocks, count, length, width
        self.P = nn.ParameterList()  # (blocks, count, length, width) each
        self.K = nn.ParameterList()  # (blocks, count, width) each
        self.A = nn.ParameterList()  # (blocks, count, width) each

    @property
    def size(self) -> int:
        """The number of parameters that a task adds."""
        return self.blocks * self.count * (self.length + 2) * self.width

    def newest(self) -> list[nn.Parameter]:
        return [self.P[-1], self.K[-1], self.A[-1]]

    def grow(self, generator: torch.Generator, device: torch.device) -> None:
        """Add the parameters of one more task, orthonormal to all earlier ones and to each other."""
        for parts, shape in ((self.P, (self.length, self.width)), (self.K, (self.width,)), (self.A, (self.width,))):
            size = torch.Size(shape).numel()
            old = torch.cat([torch.zeros(self.blocks, 0, size), *(p.detach().cpu().flatten(2) for p in parts)], 1)
            new = torch.stack([orthonormal(self.count, vectors, generator) for vectors in old])
            parts.append(nn.Parameter(new.unflatten(2, shape).to(device)))

    def forward(
        self,
        query: Tensor,  # (examples, width)
    ) -> tuple[dict[int, Prefix], None]:  # by block
        P, K, A = (torch.cat(list(parts), 1) for parts in (self.P, self.K, self.A))
        prefixes = {}
        for block in range(self.blocks):
            weights = attended(query, K[block], A[block])
            prompt = torch.einsum("ek,klw->elw", weights, P[block])  # P = sum_k a_k P_k
            keys, values = prompt.chunk(2, 1)
            prefixes[block] = keys, values
        return prefixes, None


def attended(
    query: Tensor,  # (examples, width)
    K: Tensor,  # (components, width)
    A: Tensor,  # (components, width)
) -> Tensor:  # (examples, components)
    """a_k = cos(q * A_k, K_k)."""
    return F.cosine_similarity(query[:, None] * A, K, dim=2)


def orthonormal(
    count: int,
    old: Tensor,  # (old, size)
    generator: torch.Generator,
) -> Tensor:  # (count, size)
    """Gram-Schmidt: random vectors of length 1 that are orthogonal to the old ones and to each other. When no direction
    is left, the basis starts again empty."""
    basis = torch.linalg.qr(old.double().T).Q.T  # (at most size, size), orthonormal
    new = []
    for vector in torch.randn(count, old.shape[1], generator=generator).double():
        rest = without(vector, basis)
        if rest.norm() < 1e-6 * vector.norm():
            basis, rest = basis[:0], vector
        new.append(rest / rest.norm())
        basis = torch.cat([basis, new[-1][None]])
    return torch.stack(new).to(old.dtype)


def without(
    vector: Tensor,  # (size,)
    basis: Tensor,  # (vectors, size), orthonormal
) -> Tensor:  # (size,)
    """The part of a vector that is orthogonal to a basis, computed twice because of rounding."""
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector
