"""Pre-trained transformers behind one surface: embed, run the blocks, finish.

Every family is cut into the same three parts (`embeddings`, `blocks`, `norm`), so that prompts, adapters, taps, copied
top blocks and frozen prefixes are written once, by composing `embed`, `run_block` and `finish`. The class token is
position 0 everywhere.

`transformers` takes a second or more to import, so it is imported where it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bace.errors import ConfigError, DataError
from bace.files import inside
from bace.models.backbones import backbone_path, find_backbone
from bace.models.frozen_prefix import PrefixCache, shared_cache
from bace.models.weights import Weights, first_line, read_json, read_weights

Modality = Literal["image", "text"]
Site = tuple[nn.Module, str]  # a module and the name of its attribute


class Encoder(nn.Module):
    """A pre-trained transformer, from raw inputs to one vector per token.

    Attributes:
        config: transformers' description of it.
        width: numbers per token.
        embeddings, blocks, norm: the three parts; `norm` is the identity where the family has no final LayerNorm.
        frozen: how many of the lowest blocks are frozen, besides the embeddings; None if nothing is (`freeze_prefix`).
    """

    modality: ClassVar[Modality]
    # examples that have gone forward through any encoder of this process; one that goes back as well counts three times
    passes: ClassVar[float] = 0.0
    movable: ClassVar[str]  # the input that a gradient can move
    # Where things are in the transformers model: its class, whether that takes `add_pooling_layer`, and module paths.
    transformers_class: ClassVar[str]
    has_pooler: ClassVar[bool] = True
    blocks_at: ClassVar[str] = "encoder.layer"
    norm_at: ClassVar[str | None] = None
    attention_end: str  # within a block: the Linear that ends the attention branch
    mlp_end: str  # within a block: the Linear that ends the MLP branch

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = cast(Any, model.config)
        self.width: int = self.config.hidden_size
        self.embeddings = model.get_submodule("embeddings")
        self.blocks = cast(nn.ModuleList, model.get_submodule(self.blocks_at))
        self.norm = nn.Identity() if self.norm_at is None else model.get_submodule(self.norm_at)
        self.frozen: int | None = None

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), mask
        """The hidden states that enter the first block, and the attention mask in the form the blocks take."""
        raise NotImplementedError

    def relax(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same inputs in the form that holds `movable`, for methods that optimise inputs."""
        return inputs

    def clamp(self, moved: Tensor) -> Tensor:
        """`movable` values, brought back to where inputs can be."""
        return moved

    def run_block(
        self,
        block: int | nn.Module,  # an index, or a block that is not (or no longer) one of `blocks`, such as a copy
        hidden: Tensor,  # (examples, tokens, width)
        mask: Tensor | None,
    ) -> Tensor:  # (examples, tokens, width)
        module = self.blocks[block] if isinstance(block, int) else block
        out = cast(Tensor, module(hidden, mask))
        Encoder.passes += len(hidden) * (3 if out.requires_grad else 1) / len(self.blocks)
        return out

    def finish(
        self,
        hidden: Tensor,  # (examples, tokens, width)
    ) -> Tensor:  # (examples, tokens, width)
        """The final LayerNorm, where the family has one."""
        return cast(Tensor, self.norm(hidden))

    def forward(
        self, inputs: dict[str, Tensor], taps: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:  # (examples, tokens, width), and that for each block
        """The finished hidden states; with `taps` also what each block put out, before the final LayerNorm."""
        hidden, outputs = self.run(*self.embed(inputs), taps=taps)
        return (hidden, outputs) if taps else hidden

    def run(
        self, hidden: Tensor, mask: Tensor | None, *, start: int = 0, taps: bool = False
    ) -> tuple[Tensor, list[Tensor]]:  # (examples, tokens, width) both, and that for each block
        """From what enters block `start` to the finished hidden states; with `taps` also what each block put out."""
        outputs = []
        for block in islice(self.blocks, start, None):
            hidden = self.run_block(block, hidden, mask)
            if taps:
                outputs.append(hidden)
        return self.finish(hidden), outputs

    def adapter_sites(self, block: nn.Module) -> tuple[Site, Site]:
        """Where the Linear that ends the attention branch hangs, and the one that ends the MLP branch.

        What follows them in the branch (DINOv2's layer scale, dropout, the residual sum, LayerNorm) comes after.
        """
        attention, mlp = (path.rpartition(".") for path in (self.attention_end, self.mlp_end))
        return (block.get_submodule(attention[0]), attention[2]), (block.get_submodule(mlp[0]), mlp[2])

    def train(self, mode: bool = True) -> Self:
        """Sets the mode as usual, but a frozen prefix stays in eval mode: it is a fixed function, without dropout."""
        super().train(mode)
        for module in frozen_modules(self):
            module.eval()
        return self


def frozen_modules(encoder: Encoder) -> list[nn.Module]:
    """The embeddings and the frozen blocks, or nothing."""
    return [] if encoder.frozen is None else [encoder.embeddings, *encoder.blocks[: encoder.frozen]]


def freeze_prefix(encoder: Encoder, blocks: int) -> None:
    """Freezes the embeddings and the lowest `blocks` blocks; 0 freezes the embeddings alone.

    All of them (`blocks == len(encoder.blocks)`) still leaves the final LayerNorm trainable. Frozen parameters ask for
    no gradient, so the prefix builds no graph and keeps no activations, unless what enters it (a learned prompt) asks
    for one; its dropout is off also in train mode. It never thaws: a later call with a smaller number changes nothing.
    """
    if not 0 <= blocks <= len(encoder.blocks):
        raise ConfigError(f"cannot freeze {blocks} blocks: this encoder has {len(encoder.blocks)}. Give 0 to that.")
    encoder.frozen = max(blocks, encoder.frozen or 0)
    for module in frozen_modules(encoder):
        module.requires_grad_(False)
    encoder.train(encoder.training)


def keep_prefix(encoder: Encoder, megabytes: int, precision: torch.dtype) -> None:
    """Lets a text encoder keep what its frozen blocks make of each text; without frozen blocks there is nothing to."""
    if not isinstance(encoder, TextEncoder):
        raise ConfigError(
            f"backbone.cache is {megabytes}, but only texts are kept: pictures are augmented. Set it to 0."
        )
    if encoder.frozen:
        weights = [p for module in frozen_modules(encoder) for p in module.parameters()]
        about = f"{type(encoder).__name__} {precision} {encoder.config.to_json_string()}"
        encoder.cache = shared_cache(about, weights, encoder.frozen, megabytes)


# Images -------------------------------------------------------------------------------------------------------------

_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageEncoder(Encoder):
    """An encoder of pictures: `pixel_values` (examples, channels, height, width), normalised, float.

    Attributes:
        channels, patch: what it takes; both sides of a picture must be multiples of `patch`.
        image_size: the side at which pictures should be given. Others work too: positions are interpolated.
        mean, std: what to normalise pixels in [0, 1] with, one number per channel.
    """

    modality = "image"
    movable = "pixel_values"
    norm_at = "layernorm"
    attention_end = "attention.o_proj"
    mlp_end = "mlp.fc2"
    default_mean: ClassVar[tuple[float, ...]] = _IMAGENET_MEAN
    default_std: ClassVar[tuple[float, ...]] = _IMAGENET_STD

    def __init__(
        self, model: nn.Module, preprocessing: dict[str, Any] | None = None, image_size: int | None = None
    ) -> None:
        """`preprocessing` is the content of a preprocessor_config.json."""
        super().__init__(model)
        self.channels: int = self.config.num_channels
        self.patch: int = self.config.patch_size
        preprocessing = preprocessing or {}
        # DINOv2's table is for 518 pixels but its pictures are cut to 224: the preprocessing knows better.
        crop = preprocessing.get("crop_size") if preprocessing.get("do_center_crop", True) else None
        if isinstance(crop, dict):
            crop = crop.get("height")
        self.image_size: int = (crop or self.config.image_size) if image_size is None else image_size
        if self.image_size < 1 or self.image_size % self.patch:
            raise ConfigError(f"image size {self.image_size} is not a multiple of the backbone's patch, {self.patch}.")
        normalised = preprocessing.get("do_normalize", True)
        self.mean = self._per_channel(preprocessing, "image_mean", self.default_mean if normalised else (0.0,) * 3)
        self.std = self._per_channel(preprocessing, "image_std", self.default_std if normalised else (1.0,) * 3)

    def _per_channel(self, preprocessing: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        found = preprocessing.get(key) if preprocessing.get("do_normalize", True) else None
        numbers = default[: self.channels] if found is None else found
        if not isinstance(numbers, list | tuple) or len(numbers) != self.channels:
            raise DataError(
                f"the backbone takes {self.channels} channels, but its {key} is {numbers!r}. "
                f"Give {self.channels} numbers as {key} in its preprocessor_config.json."
            )
        return tuple(float(number) for number in numbers)

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), None
        pixels = inputs["pixel_values"]
        channels, height, width = pixels.shape[1:]
        if channels != self.channels or height % self.patch or width % self.patch:
            raise DataError(
                f"pictures of {channels} x {height} x {width} do not fit the backbone: it takes {self.channels} "
                f"channels and sides that are multiples of {self.patch}."
            )
        return self._embed(pixels), None

    def patch_map(
        self,
        hidden: Tensor,  # (examples, tokens, width)
        inputs: dict[str, Tensor],
    ) -> Tensor:  # (examples, width, height, width of the grid)
        """The patches where they lie; what stands before them (class token, distillation token) is left out."""
        height, width = (side // self.patch for side in inputs["pixel_values"].shape[2:])
        return hidden[:, -height * width :].transpose(1, 2).reshape(len(hidden), -1, height, width)

    def clamp(self, moved: Tensor) -> Tensor:  # (examples, channels, height, width)
        mean, std = (moved.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return moved.clamp(-mean / std, (1 - mean) / std)  # pixels are in [0, 1] before they are normalised

    def _embed(self, pixels: Tensor) -> Tensor:
        # At the table's own size this is the table itself.
        return cast(Tensor, self.embeddings(pixels, interpolate_pos_encoding=True))


class ViTEncoder(ImageEncoder):
    transformers_class = "ViTModel"
    blocks_at = "layers"
    default_mean = default_std = _HALF


class DeiTEncoder(ImageEncoder):
    """DeiT with its distillation token, at position 1. (DeiT without one is stored, and loaded, as a ViT.)"""

    transformers_class = "DeiTModel"
    blocks_at = "layers"


class Dinov2Encoder(ImageEncoder):
    transformers_class = "Dinov2Model"
    has_pooler = False

    def __init__(
        self, model: nn.Module, preprocessing: dict[str, Any] | None = None, image_size: int | None = None
    ) -> None:
        super().__init__(model, preprocessing, image_size)
        if self.config.use_swiglu_ffn:
            self.mlp_end = "mlp.down_proj"
        # For pre-training only; a parameter that never gets a gradient would upset training in several processes.
        self.embeddings.register_parameter("mask_token", None)

    def _embed(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.embeddings(pixels))  # always interpolates where it must


# Texts --------------------------------------------------------------------------------------------------------------


class TextEncoder(Encoder):
    """An encoder of texts: `input_ids`, `attention_mask` and, if wanted, `token_type_ids`, each (examples, tokens).
    Instead of ids it also takes word vectors, `inputs_embeds` (examples, tokens, width).

    Attributes:
        max_tokens: the longest text its position table can take, special tokens included.
        cache: what the frozen blocks made of texts that were read before, if that is kept.
    """

    modality = "text"
    movable = "inputs_embeds"
    has_token_types: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.max_tokens: int = self.config.max_position_embeddings
        self.cache: PrefixCache | None = None

    def forward(
        self, inputs: dict[str, Tensor], taps: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:  # (examples, tokens, width), and that for each block
        if self.cache is None or self.cache.off or taps or "input_ids" not in inputs:
            return super().forward(inputs, taps)
        before = Encoder.passes
        hidden = self.cache.read(inputs, self._prefix)
        # what is found counts as passed: else the cost of a method would depend on the runs before it
        Encoder.passes = before + len(hidden) * self.cache.depth / len(self.blocks)
        return self.run(hidden, _columns(inputs["attention_mask"]), start=self.cache.depth)[0]

    def _prefix(self, inputs: dict[str, Tensor]) -> Tensor:  # (examples, tokens, width)
        assert self.cache is not None
        hidden, mask = self.embed(inputs)
        for block in range(self.cache.depth):
            hidden = self.run_block(block, hidden, mask)
        return hidden

    def embed(
        self,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # (examples, tokens, width), (examples, 1, 1, tokens)
        """The mask is true where a token may be attended to; one more token is one more column of it."""
        ids, vectors = inputs.get("input_ids"), inputs.get("inputs_embeds")
        tokens = inputs["attention_mask"].shape[1]
        if tokens > self.max_tokens:
            raise DataError(f"a text of {tokens} tokens is too long: the backbone takes up to {self.max_tokens}.")
        types = {"token_type_ids": inputs["token_type_ids"]} if self._takes_types(inputs) else {}
        hidden: Tensor = self.embeddings(ids, inputs_embeds=vectors, **types)
        return hidden, _columns(inputs["attention_mask"])

    def relax(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Word vectors instead of ids: what `embed` looks up before positions are added."""
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        with torch.no_grad():
            return {**rest, "inputs_embeds": self.embeddings.get_submodule("word_embeddings")(inputs["input_ids"])}

    def _takes_types(self, inputs: dict[str, Tensor]) -> bool:
        return self.has_token_types and "token_type_ids" in inputs


def _columns(attention_mask: Tensor) -> Tensor:  # (examples, tokens) -> (examples, 1, 1, tokens)
    """Broadcasts over heads and queries. Same numbers as the square mask transformers makes, and easier to extend."""
    return attention_mask.bool()[:, None, None, :]


class BertEncoder(TextEncoder):
    transformers_class = "BertModel"
    attention_end = "attention.output.dense"
    mlp_end = "output.dense"


class RobertaEncoder(BertEncoder):
    transformers_class = "RobertaModel"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.max_tokens -= self.config.pad_token_id + 1  # RoBERTa counts positions from there


class DistilBertEncoder(TextEncoder):
    transformers_class = "DistilBertModel"
    has_pooler = False
    has_token_types = False
    blocks_at = "transformer.layer"
    attention_end = "attention.out_lin"
    mlp_end = "ffn.lin2"


FAMILIES: dict[str, type[ImageEncoder] | type[TextEncoder]] = {  # by the `model_type` of config.json
    "vit": ViTEncoder,
    "deit": DeiTEncoder,
    "dinov2": Dinov2Encoder,
    "bert": BertEncoder,
    "roberta": RobertaEncoder,
    "distilbert": DistilBertEncoder,
}


# Loading ------------------------------------------------------------------------------------------------------------


def load_encoder(name: str, *, image_size: int | None = None) -> Encoder:
    """A pre-trained encoder, in torch's default dtype (float32 unless set otherwise) and eval mode.

    Args:
        name: a name of `bace list backbones`, a hub id, a folder in the layout of transformers or of timm's hub sets,
            or a weights file of a ViT: `.npz` as Google published them, `.safetensors` or PyTorch's `.pth` with timm's
            names.
        image_size: side of the pictures it will be given, if not the one it was made for; images only.
    """
    path = backbone_path(name)
    file = _weights_file(path)
    family, model, preprocessing = _load_file(file, name) if file else _load_folder(path)
    if issubclass(family, ImageEncoder):
        return family(model, preprocessing, image_size).eval()
    if image_size is not None:
        raise ConfigError(f"backbone '{name}' reads texts: leave image_size out, it is {image_size}.")
    return family(model).eval()


def describe_backbone(name: str) -> dict[str, Any]:
    """What `bace check backbone` prints, after the backbone was loaded and has read one example."""
    path = backbone_path(name)
    encoder = load_encoder(name)
    if isinstance(encoder, ImageEncoder):
        side = encoder.image_size
        example = {"pixel_values": torch.zeros(1, encoder.channels, side, side)}
        reads = {
            "input": f"pictures of {side} x {side}, {encoder.channels} channels, in patches of {encoder.patch}",
            "normalisation": f"mean {_numbers(encoder.mean)}; std {_numbers(encoder.std)}",
        }
    else:
        assert isinstance(encoder, TextEncoder)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        reads = {"input": f"texts of up to {encoder.max_tokens} tokens", "normalisation": "none"}
    with torch.no_grad():
        features = cast(Tensor, encoder(example))
    if not torch.isfinite(features).all():
        raise DataError(f"backbone '{name}' loads, but gives numbers that are not finite: its weights are damaged.")
    declared = find_backbone(name)
    return {
        "files": str(path),
        "family": next(key for key, family in FAMILIES.items() if type(encoder) is family),
        "width": encoder.width,
        "layers": len(encoder.blocks),
        "parameters": f"{sum(p.numel() for p in encoder.parameters()):,}",
        **reads,
        "classifier": _classifier(path),
        "source": (declared and declared.hub) or "no hub id",
        "terms": declared.terms if declared else "not one of `bace list backbones`: see where you have it from",
        "note": declared.note if declared else "",
    }


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _classifier(path: Path) -> str:
    file = _weights_file(path)
    classes = read_weights(file).classes if file else None
    return "none" if classes is None else f"of {classes} classes, left out"


def _weights_file(path: Path) -> Path | None:
    """The file itself, or that of a folder in timm's layout, whose config.json has no model_type."""
    if path.is_file():
        return path
    config = path / "config.json"
    return path / "model.safetensors" if config.exists() and "architecture" in read_json(config) else None


_Loaded = tuple[type[ImageEncoder] | type[TextEncoder], nn.Module, dict[str, Any]]


def _load_file(path: Path, name: str) -> _Loaded:
    weights = read_weights(path)
    try:
        model = _fill_vit(weights)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:  # torch lists the tensors, one a line
        reason = str(error).splitlines()[-1].strip()
        raise DataError(f"{path} is not a plain ViT with a square grid of positions: {reason}") from error
    preprocessing = weights.preprocessing
    if not preprocessing and "deit" in f"{name} {path.name}".lower():  # a DeiT file looks like any ViT's
        preprocessing = {"image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD}
    return ViTEncoder, model, preprocessing


def _fill_vit(weights: Weights) -> nn.Module:
    """A ViT of the shape that its weights have."""
    from transformers import ViTConfig, ViTModel

    tensors = weights.tensors
    projection = tensors["embeddings.patch_embeddings.projection.weight"]
    width, channels, patch, _ = projection.shape
    grid = round((tensors["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=len({key.split(".")[1] for key in tensors if key.startswith("layers.")}),
        num_attention_heads=weights.heads,
        intermediate_size=tensors["layers.0.mlp.fc1.weight"].shape[0],
        image_size=grid * patch,
        patch_size=patch,
        num_channels=channels,
        layer_norm_eps=1e-6,  # of both JAX and timm; transformers' default is 1e-12
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):  # shapes only: no time and no random numbers spent on values that are replaced
        model: nn.Module = ViTModel(config, add_pooling_layer=False)
    tensors = {key: tensor.to(torch.get_default_dtype()).contiguous() for key, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    return model


def _load_folder(folder: Path) -> _Loaded:
    config_file = folder / "config.json"
    if not config_file.exists():
        raise DataError(f"{folder} has no config.json: give a folder in the layout of transformers (save_pretrained).")
    model_type = read_json(config_file).get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{config_file} has model_type {model_type!r}, which is not supported. Supported: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    weights = _check_weights(folder)
    import transformers

    options: dict[str, Any] = {"add_pooling_layer": False} if family.has_pooler else {}
    with _quiet():
        try:
            model, info = getattr(transformers, family.transformers_class).from_pretrained(
                folder,
                dtype=torch.get_default_dtype(),
                attn_implementation="sdpa",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        except Exception as error:  # transformers raises many kinds; to the user they all mean the same
            raise DataError(
                f"{weights} does not fit {config_file} ({type(error).__name__}: {first_line(error)}). "
                "Get both from the same model again."
            ) from error
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would start these at random, and say so only in its log
        raise DataError(f"{weights} lacks {len(missing)} tensors of a {model_type} model, such as {missing[0]}.")
    preprocessing = folder / "preprocessor_config.json"
    return family, model, read_json(preprocessing) if preprocessing.exists() else {}


def _check_weights(folder: Path) -> Path:
    """The file with the weights (or with the index of their parts), after a look at every header."""
    from safetensors import SafetensorError, safe_open

    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if weights.exists():
        parts = [weights]
    elif index.exists():
        weights = index
        try:
            parts = [inside(folder, part) for part in sorted(set(read_json(index)["weight_map"].values()))]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{index} is no list of the parts of a model in its folder ({error}).") from error
    else:
        raise DataError(
            f"{folder} has no model.safetensors. Pickled weights (pytorch_model.bin) are not read: load the model with "
            "transformers and save_pretrained it once."
        )
    for part in parts:
        try:
            with safe_open(part, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DataError(f"{part} cannot be read ({first_line(error)}): it is cut short or damaged.") from error
    return weights


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no report of ignored heads while weights are loaded; afterwards all is as it was."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
