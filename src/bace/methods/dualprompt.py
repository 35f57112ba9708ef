"""DualPrompt: general and expert prompts.

Wang, Zhang, Ebrahimi, Sun, Zhang, Lee, Ren, Su, Perot, Dy, Pfister, "DualPrompt: Complementary Prompting for
Rehearsal-free Continual Learning", ECCV 2022.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Passes
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError
from bace.methods.parts.tuning import check_tuning, long_stage
from bace.methods.seq import SEQ
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.models.prefix_attention import Prefix
from bace.models.prompts import PrefixedModel, PrefixPrompts
from bace.randomness import generator


class DualPrompt(SEQ):
    """Freeze the encoder and learn prefixes of its attention: a G-prompt in the lowest blocks, which all tasks share,
    and in the blocks above it an E-prompt for each task, with a key. An example uses the E-prompt with the nearest key.

    Args:
        g_blocks: number of blocks with the G-prompt, at most half of the encoder's.
        e_blocks: number of blocks above them with E-prompts, at most all that remain.
        g_length: number of keys, and of values, of the G-prompt in a block.
        e_length: the same numbers for an E-prompt.
        pull: weight of the term that pulls a task's key to its examples.
        clip: maximum gradient norm; 0 means no clipping.
        tune_epochs: epochs of a task; the run's train.epochs, lr and batch_size are not used.
        tune_lr: learning rate of Adam for a batch of 256; it is scaled to `tune_batch`, even if batches are smaller.
        tune_batch: examples per step.
        tune_steps: minimum number of steps of a task; if there are too few, batches become smaller (down to 8), and
            then there are more epochs. 0 means no minimum.
    """

    title = "DualPrompt"
    paper = "Wang et al., DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning, ECCV 2022"
    takes_o = False
    growing_head = False  # its rows start at zero
    card = Card(
        mechanism="frozen encoder; a prefix of attention that all tasks share, and one for each task, selected by key",
        besides="prediction takes 2 passes; every task adds a prefix and a key",
        o_rows="refused: O belongs to no task, so it has no prefix",
        stages=("tune",),
        reading="As in the authors' code, a prefix has 5 keys and 5 values for each block, after their projections. "
        "Prompts and keys start uniform in [0, 0.01), an E-prompt starts as a copy of the last task's, and head rows "
        "start at zero. The G-prompt learns in every task. Each example selects its own E-prompt (in the authors' "
        "code, the test batch votes). An encoder with fewer than five blocks has the G-prompt in the lower half. The "
        "authors' 5 epochs are 1000 steps; here a task has at least 400 (`tune_steps`), at the learning rate of the "
        "full batch.",
    )

    def __init__(
        self,
        g_blocks: int = 2,
        e_blocks: int = 3,
        g_length: int = 5,
        e_length: int = 5,
        pull: float = 1.0,
        clip: float = 1.0,
        tune_epochs: int = 5,
        tune_lr: float = 0.03,
        tune_batch: int = 24,
        tune_steps: int = 400,
    ) -> None:
        super().__init__(span="new")
        check_tuning(self.title, tune_epochs, tune_lr, tune_batch, tune_steps)
        if min(g_blocks, pull, clip) < 0 or min(e_blocks, g_length, e_length) < 1:
            raise ConfigError(
                f"DualPrompt: g_blocks ({g_blocks}), pull ({pull}) and clip ({clip}) must be at least 0, e_blocks "
                f"({e_blocks}), g_length ({g_length}) and e_length ({e_length}) at least 1"
            )
        self.g_blocks, self.e_blocks, self.g_length, self.e_length = g_blocks, e_blocks, g_length, e_length
        self.pull, self.clip = pull, clip
        self.tune_epochs, self.tune_lr, self.tune_batch, self.tune_steps = tune_epochs, tune_lr, tune_batch, tune_steps
        self.own_batch = tune_batch
        self.cost = Passes(4, epochs=tune_epochs, steps=tune_steps)

    def build(self, model: Model) -> Model:
        encoder, rng = model.encoder, generator(self.now.seed, "prompts")
        depth = len(encoder.blocks)
        general = min(self.g_blocks, depth // 2)
        expert = min(self.e_blocks, depth - general)
        prompts = GeneralAndExpert(general, expert, self.g_length, self.e_length, encoder.width, rng)
        head = LinearHead(encoder.width, zero=True)
        return PrefixedModel(encoder, head, prompts, model.precision).to(self.stream.device)

    @property
    def prompts(self) -> "GeneralAndExpert":
        return cast(GeneralAndExpert, cast(PrefixedModel, self.model).prompts)

    def needs(self, task: int) -> tuple[int, int]:
        kept, _ = super().needs(task)
        general, expert = self.prompts.general.numel(), self.prompts.size
        return kept + general + (task + 1) * expert, general + expert

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.prompts.grow(generator(self.now.seed, "prompts", task.index))

    def stages(self, task: Task) -> list[Stage]:
        prompts, head = self.prompts, cast(LinearHead, self.model.head)
        trained = [prompts.general, prompts.expert[-1], prompts.keys[-1]]
        stage = long_stage(
            self,
            task,
            epochs=self.tune_epochs,
            batch_size=self.tune_batch,
            least=self.tune_steps,
            groups=lambda: {"prompts": trained, "head": head.of(task.index)},
            optimiser="adam",
            lr=self.tune_lr * self.tune_batch / 256,
            clip=self.clip,
        )
        return [stage]

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """CE over the task's classes - pull cos(q, k_t)."""
        out = self.model(batch)
        return {
            "new": self.cross_entropy(out.logits, batch.targets),
            "pull": -self.pull * out.match.mean(),
        }

    def validation_loss(self, examples: Tensor) -> float:
        return float(self.cross_entropy(*self.scored(examples)))


class GeneralAndExpert(PrefixPrompts):
    """The G-prompt, and an E-prompt and a key for each task. In training all examples use the newest E-prompt;
    otherwise each uses the one with the nearest key.

    Args:
        g_blocks: the lowest blocks, which have the G-prompt.
        e_blocks: the blocks above them, which have E-prompts.
    """

    def __init__(
        self, g_blocks: int, e_blocks: int, g_length: int, e_length: int, width: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape = e_blocks, 2, e_length, width
        self.general = nn.Parameter(uniform(g_blocks, 2, g_length, width, generator=generator))
        self.expert = nn.ParameterList()  # (blocks, 2, length, width) each
        self.keys = nn.ParameterList()  # (width,) each

    @property
    def size(self) -> int:
        """The number of parameters that a task adds."""
        blocks, two, length, width = self.shape
        return (blocks * two * length + 1) * width

    def grow(self, generator: torch.Generator) -> None:
        """E_t starts as E_{t-1}; its key is new."""
        device = self.general.device
        key, first = (uniform(*shape, generator=generator).to(device) for shape in (self.shape[-1:], self.shape))
        self.expert.append(nn.Parameter(self.expert[-1].detach().clone() if len(self.expert) else first))
        self.keys.append(nn.Parameter(key))

    def forward(
        self,
        query: Tensor,  # (examples, width)
    ) -> tuple[dict[int, Prefix], Tensor]:  # by block, (examples, 1)
        cosines = F.normalize(query, dim=1) @ F.normalize(torch.stack(list(self.keys)), dim=1).T  # (examples, tasks)
        newest = torch.full((query.shape[0],), len(self.keys) - 1, device=query.device)
        chosen = newest if self.training else cosines.argmax(1)
        general = self.general.expand(query.shape[0], *self.general.shape)
        expert = torch.stack(list(self.expert))[chosen]  # (examples, blocks, 2, length, width)
        # not by unbind, which torch.export cannot store for an encoder that has no block for the G-prompt
        by_block = [prompt[:, i] for prompt in (general, expert) for i in range(prompt.shape[1])]
        prefixes = {block: (prompt[:, 0], prompt[:, 1]) for block, prompt in enumerate(by_block)}
        return prefixes, cosines.gather(1, chosen[:, None])


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """A parameter with uniform values in [0, 0.01)."""
    return torch.rand(shape, generator=generator) * 0.01
