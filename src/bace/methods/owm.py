"""OWM: orthogonal weights modification.

Zeng, Chen, Cui, Yu, "Continual learning of context-dependent processing in neural networks", Nature Machine
Intelligence 2019.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bace.core.method import Card, Method
from bace.core.stage import Stage
from bace.core.stream import Task
from bace.data.batch import Batch
from bace.errors import ConfigError, TrainingError
from bace.methods.parts.ridge import without
from bace.models.adapters import own_adapters
from bace.models.encoder import freeze_prefix
from bace.models.heads import LinearHead
from bace.models.model import Model
from bace.models.share import Share
from bace.randomness import generator


class OWM(Method):
    """Change each layer only in directions orthogonal to the inputs it has seen, so that its outputs for them stay the
    same.

    Args:
        alpha: ridge of the projectors; a smaller ridge protects inputs more strictly.
        decay: the ridge falls to `decay` times its value over a task; 1 keeps it constant.
        trains: `adapters` in the blocks of the encoder and the head, or the `head` alone.
        mode: when mean inputs of a batch are stored: at every step (`per_batch`, the authors' code), or only in one
            pass over a finished task (`end_of_task`, the text of their paper).
        latent: hidden size of the adapters; backbone.adapter takes precedence.
        clip: maximum gradient norm; 0 means no clipping.
    """

    title = "OWM"
    paper = "Zeng et al., Continual Learning of Context-Dependent Processing in Neural Networks, 2019"
    takes_o = False
    cannot_forget = "its projectors are made of the inputs of all classes"
    card = Card(
        mechanism="updates projected to be orthogonal to past inputs; only adapters and head are trained",
        besides="for each layer and step, an update of its (inputs, inputs) projector by every token position and one "
        "product",
        o_rows="refused: O hides old entities, and the projectors protect their inputs from being learned again",
        reading="Adapters and a linear head are trained, all without bias and with frozen LayerNorms: biases and "
        "LayerNorms, like the norms and scale of a cosine head, would change the outputs for stored inputs. The "
        "update is projected, not the gradient, because momentum and Adam would undo the projection. A batch stores "
        "one input for each token position: the mean over its examples, normalised to length 1, as the authors do for "
        "the positions of a convolution. One mean over all tokens protects so little that adapters forget (digits: "
        "53.5 instead of 80.0; `trains=head`, a frozen encoder: 76.8). The ridge is constant (the authors' falls, "
        "`decay`; on features with the length of a LayerNorm's output it stops all learning).",
    )

    whole_batches = True  # P takes the mean inputs of a batch

    def __init__(
        self,
        alpha: float = 1.0,
        decay: float = 1.0,
        trains: Literal["adapters", "head"] = "adapters",
        mode: Literal["per_batch", "end_of_task"] = "per_batch",
        latent: int = 64,
        clip: float = 10.0,
    ) -> None:
        super().__init__()
        if alpha <= 0 or decay <= 0:
            raise ConfigError(f"OWM: alpha ({alpha}) and decay ({decay}) must be above 0: a projector divides by them")
        if clip < 0 or latent < 1:
            raise ConfigError(f"OWM: clip ({clip}) must be at least 0, latent ({latent}) at least 1")
        self.alpha, self.decay, self.trains, self.mode = alpha, decay, trains, mode
        self.latent, self.clip = latent, clip
        self.layers: list[nn.Module] = []  # the Linear layers of the adapters, then the head
        self.before: list[list[Tensor]] = []  # their weights before the step
        self.inputs: list[Tensor] = []  # inputs of each layer in the step, (inputs, positions)

    def build(self, model: Model) -> Model:
        encoder, trained = model.encoder, list[nn.Linear]()
        if self.trains == "adapters":
            adapters = own_adapters(encoder, self.latent, generator(self.now.seed, "adapters"))
            trained = [linear for a in adapters if a.up.weight.requires_grad for linear in (a.down, a.up)]
        else:
            freeze_prefix(encoder, len(encoder.blocks))  # a fixed function without dropout, also in train mode
        encoder.requires_grad_(False)
        for linear in trained:
            linear.weight.requires_grad_(True)
        encoder.whole = True  # the inputs of its layers are looked at, token by token
        model.head = LinearHead(encoder.width, bias=False).to(self.stream.device)
        self.layers = [*trained, model.head]
        for i, width in enumerate([*(linear.in_features for linear in trained), encoder.width]):
            self.register_buffer(f"P{i}", torch.eye(width, dtype=torch.float64))  # (inputs, inputs)
        return model

    def stages(self, task: Task) -> list[Stage]:
        return [self.stage(task, clip=self.clip)]

    def loss(self, batch: Batch) -> Tensor:
        with mean_inputs(self.layers, batch) as self.inputs:
            logits = self.model(batch).logits
        return F.cross_entropy(logits, batch.targets)

    def before_step(self, batch: Batch) -> None:
        now = self.now
        if self.mode == "per_batch":
            self.store((now.epoch + now.step / now.steps) / now.epochs)
        self.before = [[weight.detach().clone() for weight in weights] for weights in self.weights()]

    @torch.no_grad()
    def after_step(self, batch: Batch) -> None:
        """W <- W + dW P: for any optimiser, dW P r is almost zero for a stored input r."""
        for i, (before, weights) in enumerate(zip(self.before, self.weights(), strict=True)):
            for old, weight in zip(before, weights, strict=True):
                weight.copy_(old.double() + (weight.double() - old.double()) @ self.get_buffer(f"P{i}"))

    def after_task(self, task: Task) -> None:
        super().after_task(task)
        if self.mode == "end_of_task":
            examples = self.training_examples(task)
            order = torch.randperm(len(examples), generator=self.now.rng("order"))
            for part in examples[order].split(self.batch_size):
                batch = self.stream.batch(part)
                with mean_inputs(self.layers, batch) as self.inputs:
                    self.infer([batch])
                self.store(progress=1.0)
        if not bool(torch.stack([self.get_buffer(f"P{i}").isfinite().all() for i in range(len(self.layers))]).all()):
            raise TrainingError(f"OWM: rounding has destroyed a projector: raise alpha (now {self.alpha:g}).")

    def store(self, progress: float) -> None:
        """Protect the inputs of the latest pass."""
        for i, R in enumerate(self.inputs):
            P = self.get_buffer(f"P{i}")
            P.copy_(without(P, R, self.alpha * self.decay**progress))

    def needs(self, task: int) -> tuple[int, int]:
        kept, trained = super().needs(task)
        return kept + 2 * sum(P.numel() for P in self.buffers() if P.dtype == torch.float64), trained

    def weights(self) -> list[list[nn.Parameter]]:
        """One matrix for each layer; for the head, one for each task."""
        return [[p for p in layer.parameters() if p.requires_grad] for layer in self.layers]


@contextmanager
def mean_inputs(layers: list[nn.Module], batch: Batch) -> Iterator[list[Tensor]]:
    """The inputs of each layer in a pass of this batch, (inputs, positions) each: at every token position the mean over
    the examples (without padding), normalised to length 1, so that one ridge suits all layers."""
    found: dict[int, Tensor] = {}
    real, share = batch.inputs.get("attention_mask"), Share(batch)  # (examples, tokens)

    def note(i: int) -> Any:
        def hook(layer: nn.Module, arguments: tuple[Tensor]) -> None:
            x = arguments[0].detach().float()  # (passed examples, tokens, inputs); the head's: (examples, inputs)
            if x.ndim == 3 and real is not None:
                x = x * share.own(real)[:, :, None]
            total = share.sum(x) if x.ndim == 3 else x.sum(0)
            found[i] = F.normalize(total.double().view(-1, x.shape[-1]).T, dim=0)  # the mean up to its length

        return hook

    means: list[Tensor] = []
    handles = [layer.register_forward_pre_hook(note(i)) for i, layer in enumerate(layers)]
    try:
        yield means
        means += [found[i] for i in range(len(layers))]
    finally:
        for handle in handles:
            handle.remove()
