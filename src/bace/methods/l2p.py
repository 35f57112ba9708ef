"""L2P: learning to prompt.

Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister, "Learning to Prompt for Continual Learning", CVPR 2022.
"""

from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.core.method import Card, Method, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.models.heads import LinearHead
from bace.models.model import Model, parameter_count
from bace.models.prompts import PromptedModel, PromptPool
from bace.randomness import generator


class Recipe(NamedTuple):
    """The settings that the authors choose differently for different streams."""

    pool: int
    gamma: float
    prompt_mask: bool


RECIPES = {"5-datasets": Recipe(20, 0.5, prompt_mask=True), "cifar100": Recipe(10, 1.0, prompt_mask=False)}


class L2P(Method):
    """Freeze the encoder and learn a pool of prompts; every input uses the prompts with the nearest keys.

    Args:
        recipe: the authors' values of `pool`, `gamma` and `prompt_mask`, each of which can be overridden.
            `5-datasets` (20, 0.5, true) has enough prompts for five tasks that each train their own; `cifar100`
            (10, 1, false) has prompts that all tasks share and change.
        pool: number of prompts.
        length: number of tokens of a prompt.
        top: number of prompts that an input uses.
        gamma: weight of the term that pulls chosen keys to the inputs that chose them; 0 leaves it out.
        lr: learning rate of Adam for a batch of 256; it is scaled to the run's batch.
        clip: maximum gradient norm; 0 means no clipping.
        vote: in training, all inputs of a batch use the prompts that most of them chose.
        prompt_mask: while the pool lasts, each task trains its own `top` prompts, which start as copies of the last
            task's. For T tasks this needs a pool of T x `top`; later tasks train the prompts that their inputs choose.
    """

    title = "L2P"
    paper = "Wang et al., Learning to Prompt for Continual Learning, 2022"
    takes_o = False
    growing_head = False
    cost = Passes(4)
    card = Card(
        mechanism="frozen encoder; prompts selected by key and query",
        besides="3 of the 4 have `top` x `length` additional tokens",
        o_rows="refused: prompts are selected for a whole sentence, and its words labelled O may be entities of other "
        "tasks",
        reading="We follow the authors' code: prompts stand before the class token and have no positions, the head "
        "takes the mean of their outputs and starts at zero, and the optimiser is Adam. Each input selects its own "
        "prompts (with `vote`, a training batch votes). The soft-max spans only the task's classes. There is no "
        "replay. Of the authors' two recipes, `5-datasets` is the default (20 prompts, each task its own, gamma 0.5); "
        "with `cifar100` (10 prompts that all tasks change, gamma 1) A_last on digits is 36.5 and not 73.6.",
    )

    def __init__(
        self,
        recipe: Literal["5-datasets", "cifar100"] = "5-datasets",
        pool: int | None = None,
        length: int = 10,
        top: int = 4,
        gamma: float | None = None,
        lr: float = 0.03,
        clip: float = 1.0,
        vote: bool = False,
        prompt_mask: bool | None = None,
    ) -> None:
        super().__init__()
        published = RECIPES[recipe]
        pool = published.pool if pool is None else pool
        gamma = published.gamma if gamma is None else gamma
        prompt_mask = published.prompt_mask if prompt_mask is None else prompt_mask
        if length < 1 or not 1 <= top <= pool:
            raise ConfigError(f"L2P: length ({length}) must be at least 1, and top ({top}) between 1 and pool ({pool})")
        if min(gamma, clip) < 0 or lr <= 0:
            raise ConfigError(f"L2P: gamma ({gamma}) and clip ({clip}) must be at least 0, lr ({lr}) above 0")
        self.pool, self.length, self.top, self.gamma, self.lr, self.clip = pool, length, top, gamma, lr, clip
        self.vote, self.prompt_mask = vote, prompt_mask

    def build(self, model: Model) -> Model:
        encoder = model.encoder
        pool = PromptPool(self.pool, self.length, encoder.width, generator(self.now.seed, "prompts"))
        head = LinearHead(encoder.width, zero=True)
        return PromptedModel(encoder, head, pool, self.top, self.vote, model.precision).to(self.stream.device)

    @property
    def prompted(self) -> PromptedModel:
        return cast(PromptedModel, self.model)

    def own_prompts(self, task: int) -> Tensor | None:  # (top,) positions in the pool
        """The prompts that a task must use under `prompt_mask`; None if its inputs choose."""
        first = task * self.top
        return torch.arange(first, first + self.top) if self.prompt_mask and first + self.top <= self.pool else None

    @torch.no_grad()
    def before_task(self, task: Task) -> None:
        if task.index and (own := self.own_prompts(task.index)) is not None:
            prompts = self.prompted.pool.prompts
            prompts[own] = prompts[own - self.top]

    def needs(self, task: int) -> tuple[int, int]:
        (kept, trained), prompts = super().needs(task), parameter_count(self.prompted.pool)
        return kept + prompts, trained + prompts

    def stages(self, task: Task) -> list[Stage]:
        lr = self.lr * self.batch_size / 256
        return [self.stage(task, optimiser="adam", lr=lr, clip=self.clip)]

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """CE over the new classes - gamma * mean over inputs of the sum of cos(query, key) over their prompts."""
        own, known = self.own_prompts(self.now.task), self.now.known
        out = self.prompted(batch, chosen=None if own is None else own.to(batch.targets.device))
        # leaving the old classes out is the same as giving them logits of -inf
        terms = {"new": F.cross_entropy(out.logits[:, known:], batch.targets - known)}
        if self.gamma:
            terms["pull"] = -self.gamma * out.match.sum(1).mean()
        return terms
