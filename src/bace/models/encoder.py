"""A pre-trained transformer with one interface for all families: embed, run the blocks, finish, pool.

Every family is divided into the same three parts (`embeddings`, `blocks`, `norm`), so that prompts, adapters, taps,
copied top blocks and frozen prefixes are written once, by composing `embed`, `run_block`, `finish` and `pool`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bace.config.schema import Backbone
from bace.data.modalities.image import Images
from bace.data.modality import Examples
from bace.errors import ConfigError
from bace.models import prefix_attention
from bace.models.allocation import keep_freed_memory
from bace.models.frozen_prefix import PictureCache, PrefixCache, PrefixCaches, TextCache
from bace.models.prefix_attention import Prefix
from bace.models.products import use_fast_products

Modality = Literal["image", "text"]
Site = tuple[nn.Module, str]  # a module and the name of its attribute
CACHED = 5_000_000  # bytes; near the best of the sizes tried for four cases (docs/performance.md)
NO_PREFIXES: Mapping[int, Prefix] = MappingProxyType({})


@dataclass
class PassCounter:
    """Counts the examples that pass forward through all encoders of a run. A forward and backward pass counts three.

    The encoders of a run and their copies, such as teachers, share one counter.
    """

    total: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "PassCounter":
        return self


class Encoder(nn.Module):
    """A pre-trained transformer, from raw inputs to one vector per token.

    Attributes:
        config: its shape, as in transformers' config.json.
        width: numbers per token.
        embeddings, blocks, norm: the three parts; `norm` is the identity if the family has no final LayerNorm.
        frozen: the number of lowest blocks that are frozen with the embeddings; None if nothing is (`freeze_prefix`).
        passes: the passes of the run so far.
        cache: the outputs of the frozen blocks for examples that were read before, if they are kept.
        pieces: the parts in which `read_rows` reads a batch that needs gradients (train.accumulate).
        whole: whether all tokens pass the last block even if only the class token is read, for code that inspects it.
        recompute: whether blocks are computed again in the backward pass (train.recompute).
        states: for each state that a pass depends on besides its inputs (gates, additions), a function that saves it
            and returns a function that restores it.
    """

    modality: ClassVar[Modality]
    movable: ClassVar[str]  # the input that a gradient can move
    # Where things are in the model: its class in transformers (except of a ViT, which is ours), whether that takes
    # `add_pooling_layer`, and module paths.
    transformers_class: ClassVar[str]
    has_pooler: ClassVar[bool] = True
    blocks_at: ClassVar[str] = "encoder.layer"
    norm_at: ClassVar[str | None] = None
    attention: ClassVar[str] = "sdpa"  # which of transformers' implementations
    attention_end: str  # within a block: the Linear that ends the attention branch
    mlp_end: str  # within a block: the Linear that ends the MLP branch
    # within a block: the modules that take the input of the MLP branch, and return what is added to that input
    mlp_branch: ClassVar[tuple[str, str]]
    query_and_value: ClassVar[tuple[str, str]]  # within a block: the Linears that make them
    key: ClassVar[str]  # the Linear that makes the keys; of families that take prefixes
    attention_norm: ClassVar[str | None] = None  # within a block: the LayerNorm before the attention, where it has one
    takes_prefixes: ClassVar[bool] = False  # whether its blocks hand `prefix` on to bace.models.prefix_attention

    pieces: int = 1
    whole: bool = False
    recompute: bool = False
    states: tuple[Callable[[], Callable[[], AbstractContextManager[None]]], ...] = ()

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = cast(Any, model.config)
        self.width: int = self.config.hidden_size
        self.embeddings = model.get_submodule("embeddings")
        self.blocks = cast(nn.ModuleList, model.get_submodule(self.blocks_at))
        self.norm = nn.Identity() if self.norm_at is None else model.get_submodule(self.norm_at)
        use_fast_products(self.blocks)
        keep_freed_memory()
        self.frozen: int | None = None
        self.passes = PassCounter()
        self.cache: PrefixCache | None = None

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), mask
        """The hidden states that enter the first block, and the attention mask in the form the blocks take."""
        raise NotImplementedError

    def mask(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """The attention mask alone, in the form the blocks take."""
        return None

    def relax(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same inputs in the form that contains `movable`, for methods that optimise inputs."""
        return inputs

    def clamp(self, moved: Tensor) -> Tensor:
        """`movable` values, moved back into the range of inputs."""
        return moved

    def shared(self) -> dict[str, Tensor]:
        """The keywords that every block of the family takes besides hidden states and mask. Only DeBERTa has some."""
        return {}

    def run_block(
        self,
        block: int | nn.Module,  # an index, or a block that is not (or no longer) one of `blocks`, such as a copy
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor | None,
        prefix: Prefix | None = None,  # before the keys and the values of its attention, for each example its own
    ) -> Tensor:  # (examples, tokens, width)
        module = self.blocks[block] if isinstance(block, int) else block
        options: dict[str, Any] = self.shared()
        if prefix is not None:
            self.check_prefixes()
            options = {**options, "prefix": prefix}
        run = functools.partial(module, **options)
        out = cast(Tensor, self.again(run, hidden, mask) if self.recompute else run(hidden, mask))
        if not torch.compiler.is_exporting():  # where the number of examples is a symbol
            self.passes.total += len(hidden) * (3 if out.requires_grad else 1) / len(self.blocks)
        return out

    def check_prefixes(self) -> None:
        """Refuse a family whose blocks take no prefix."""
        if not self.takes_prefixes:
            raise ConfigError(
                f"{type(self).__name__} takes no keys and values before those of its blocks, which prefix prompts are. "
                "Choose a backbone of the families ViT, DeiT, DINOv2, CLIP, BERT, RoBERTa or DistilBERT"
            )

    def again(self, run: Callable[..., Any], *inputs: Any) -> Any:
        """The output of `run`, without the activations that its backward pass needs. They are computed again in the
        backward pass, in the same state and with the same dropout, and are not counted a second time.

        Parameters that were exchanged for this pass (torch.func.functional_call) would be gone by then, so such a pass
        is an ordinary one. A pass without gradient is ordinary, too."""
        if not torch.is_grad_enabled() or any(not isinstance(p, nn.Parameter) for p in self.parameters()):
            return run(*inputs)
        states, first = [note() for note in self.states], True

        def counted_once(*inputs: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return run(*inputs)
            before = self.passes.total
            with ExitStack() as stack:
                for state in states:
                    stack.enter_context(state())
                try:
                    return run(*inputs)
                finally:  # torch leaves by an exception as soon as it has everything it needs
                    self.passes.total = before

        return checkpoint(counted_once, *inputs, use_reentrant=False)

    def finish(
        self,
        hidden: Tensor,  # (examples, tokens, width)
    ) -> Tensor:  # (examples, tokens, width)
        """The final LayerNorm, where the family has one."""
        return cast(Tensor, self.norm(hidden))

    def pool(
        self,
        hidden: Tensor,  # (examples, tokens, width), finished
        inputs: dict[str, Tensor],  # what they were made of: a mean over tokens needs their mask
    ) -> Tensor:  # (examples, width)
        """The feature of a whole example: its class token, which is the first token in every family so far."""
        return hidden[:, 0]

    def rows(
        self,
        hidden: Tensor,  # (examples, tokens, width), finished
        inputs: dict[str, Tensor],
        at: Tensor | None,  # (rows, 2) example and token of each row; None: a row is a whole example
    ) -> Tensor:  # (rows, width)
        return self.pool(hidden, inputs) if at is None else hidden[at[:, 0], at[:, 1]]

    @property
    def pools_class_token(self) -> bool:
        """Whether `pool` reads only the class token, which is the first token."""
        return True

    def forward(
        self, inputs: dict[str, Tensor], taps: bool = False, pooled: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:  # (examples, tokens, width), and that for each block
        """The finished hidden states; with `taps` also the output of each block, before the final LayerNorm. With
        `pooled`, only what `pool` reads is finished: the class token alone, if that is enough."""
        short = pooled and not taps and self.shortens
        if self.cache is not None and not taps and self.cache.takes(inputs):
            hidden, mask, start = self._prefix(inputs, self.cache), self.mask(inputs), self.cache.depth
            return self.run(hidden, mask, start=start, class_token=short)[0]
        hidden, outputs = self.run(*self.embed(inputs), taps=taps, class_token=short)
        return (hidden, outputs) if taps else hidden

    def _prefix(self, inputs: dict[str, Tensor], cache: PrefixCache) -> Tensor:  # (examples, tokens, width)
        """The input of the first block that is not frozen, taken from the cache where possible."""

        def compute(inputs: dict[str, Tensor]) -> Tensor:
            hidden, mask = self.embed(inputs)
            for block in range(cache.depth):
                hidden = self.run_block(block, hidden, mask)
            return hidden

        before = self.passes.total
        hidden = cache.read(inputs, compute)
        # cached examples count as passed; otherwise the cost of a method would depend on earlier runs
        self.passes.total = before + len(hidden) * cache.depth / len(self.blocks)
        return hidden

    def run(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        *,
        start: int = 0,
        taps: bool = False,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,  # by block
        class_token: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:  # (examples, tokens, width) both, and that for each block
        """From the input of block `start` to the finished hidden states; with `taps` also the output of each block.
        With `class_token` the last block returns only this token, which not every encoder supports (`shortens`)."""
        size = None if taps or prefixes else examples_at_once(hidden)
        if size is not None and size < len(hidden):
            masks = itertools.repeat(mask) if mask is None else mask.split(size)
            run = functools.partial(self.run, start=start, class_token=class_token)
            return torch.cat([run(*part)[0] for part in zip(hidden.split(size), masks, strict=False)]), []
        outputs = []
        for block in range(start, len(self.blocks)):
            if class_token and block == len(self.blocks) - 1:
                hidden = self.run_last(block, hidden, mask)
            else:
                hidden = self.run_block(block, hidden, mask, prefixes.get(block))
            if taps:
                outputs.append(hidden)
        return self.finish(hidden), outputs

    @property
    def shortens(self) -> bool:
        """Whether the last block can and may be run for the class token alone. This is not possible during an export,
        because the number of tokens is a symbol."""
        able = self.takes_prefixes and self.config._attn_implementation == prefix_attention.NAME
        return able and self.pools_class_token and not self.whole and not torch.compiler.is_exporting()

    def run_last(
        self,
        block: int | nn.Module,
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor | None,
    ) -> Tensor:  # (examples, 1, width)
        """The output of the last block for the class token. It needs only keys and values of the other tokens, which
        come before its own like prefixes, so the block costs a sixth. Only if `shortens`."""
        module = self.blocks[block] if isinstance(block, int) else block
        # contiguous, because torch multiplies a strided input in another order if the weights need no gradient, and
        # student and frozen teacher would differ in the last digit
        own, others = hidden[:, :1].contiguous(), hidden[:, 1:].contiguous()
        if self.attention_norm is not None:
            others = module.get_submodule(self.attention_norm)(others)
        prefix = (module.get_submodule(self.key)(others), module.get_submodule(self.query_and_value[1])(others))
        if mask is not None:
            mask = torch.cat([mask[..., 1:], mask[..., :1]], -1)
        return self.run_block(block, own, mask, prefix)

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """A context in which every pass goes through all blocks, for examples that are synthesised for one step and for
        tensors whose values cannot be read (torch.func)."""
        cache, self.cache = self.cache, None
        try:
            yield
        finally:
            self.cache = cache

    def example(self) -> dict[str, Tensor]:  # of one example
        """The simplest inputs that it accepts."""
        raise NotImplementedError

    def reads(self) -> dict[str, str]:
        """A description of its inputs, as "input" and "normalisation"."""
        raise NotImplementedError

    def adapter_sites(self, block: nn.Module) -> tuple[Site, Site]:
        """The sites of the Linear that ends the attention branch and of the one that ends the MLP branch.

        The rest of the branch (DINOv2's layer scale, dropout, the residual sum, LayerNorm) comes after them.
        """
        attention, mlp = (path.rpartition(".") for path in (self.attention_end, self.mlp_end))
        return (block.get_submodule(attention[0]), attention[2]), (block.get_submodule(mlp[0]), mlp[2])

    def train(self, mode: bool = True) -> Self:
        """Set the mode, except that a frozen prefix stays in eval mode: it is a fixed function without dropout."""
        super().train(mode)
        for module in frozen_modules(self):
            module.eval()
        return self


def examples_at_once(hidden: Tensor) -> int | None:  # (examples, tokens, width)
    """The maximum number of examples that pass the blocks together; None: any. A processor passes examples without
    gradient faster if the widest hidden state of a block, which has four times the width, stays in its cache."""
    if torch.compiler.is_exporting() or torch.is_grad_enabled() or hidden.device.type != "cpu":
        return None
    return max(CACHED // max(4 * hidden[:1].nbytes, 1), 1)


def frozen_modules(encoder: Encoder) -> list[nn.Module]:
    """The embeddings and the frozen blocks, or nothing."""
    return [] if encoder.frozen is None else [encoder.embeddings, *encoder.blocks[: encoder.frozen]]


def freeze_prefix(encoder: Encoder, blocks: int) -> None:
    """Freeze the embeddings and the lowest `blocks` blocks; 0 freezes the embeddings alone.

    Even with all blocks (`blocks == len(encoder.blocks)`), the final LayerNorm stays trainable. Frozen parameters need
    no gradient, so the prefix builds no graph and keeps no activations, unless its input (a learned prompt) needs one.
    Its dropout is off even in train mode. It is never unfrozen: a later call with a smaller number changes nothing.
    """
    if not 0 <= blocks <= len(encoder.blocks):
        most = len(encoder.blocks)
        raise ConfigError(f"cannot freeze {blocks} blocks: this encoder has {most}. Give a number from 0 to {most}.")
    encoder.frozen = max(blocks, encoder.frozen or 0)
    for module in frozen_modules(encoder):
        module.requires_grad_(False)
    encoder.train(encoder.training)


def keep_prefix(
    encoder: Encoder, settings: Backbone, precision: torch.dtype, caches: PrefixCaches, data: Examples
) -> None:
    """Let an encoder cache the output of its frozen blocks for each example. Without such blocks this does nothing."""
    depth, room, half = encoder.frozen, settings.cache * 1_000_000, settings.cache_half
    if not depth or not room:
        return

    def make() -> PrefixCache:
        if isinstance(data, Images):
            passing = len(data) if data.augment and not data.views else 0
            return PictureCache(depth, room, half, len(data) * data.repeated, passing)
        return TextCache(depth, room, half)

    weights = [p for module in frozen_modules(encoder) for p in module.parameters()]
    about = (type(encoder).__name__, depth, room, half, precision, encoder.config.to_json_string())
    shown = data.fingerprint() if isinstance(data, Images) else ""  # pictures are found by number, texts by content
    encoder.cache = caches.find(repr((*about, shown)), weights, make)
