"""A learned model as one file that programs without bace can run: ONNX, or torch.export's format.

The file maps the encoder's inputs to the scores of all classes. It also holds, as JSON under the name `bace`, the names
of the classes in the order of the scores and the preparation that an example needs. The file of a text model also holds
the tokenizer, under the name `tokenizer.json`.
"""

import json
import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bace.core.method import Method
from bace.data.batch import Batch
from bace.data.modalities.text import tokenizer_of
from bace.data.settings import data_settings
from bace.errors import BaceError, ConfigError
from bace.learner import Learner
from bace.models.encoder import Encoder
from bace.models.image_encoder import ImageEncoder
from bace.models.text_encoder import TextEncoder
from bace.models.weights import first_line

Format = Literal["onnx", "torch"]
AGREE = 1e-4  # how far a score of the file may be from the learner's, relative to the largest score


class Predictor(nn.Module):
    """The scores of all classes, from the encoder's inputs."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        # Hidden from torch, so that its tensors become constants of the exported program, which predictions may read.
        self.hidden_method = (method.eval(),)

    def scores(self, inputs: dict[str, Tensor], at: Tensor | None = None) -> Tensor:  # (rows, classes)
        rows = (next(iter(inputs.values())) if at is None else at).shape[0]
        nobody = torch.zeros(rows, dtype=torch.int64)
        method = self.hidden_method[0]
        found = method.predict(Batch(inputs, nobody, nobody, nobody, at)).float()
        return found[:, method.stream.known] if method.stream.forgotten else found


class PicturePredictor(Predictor):
    def forward(self, pixel_values: Tensor) -> Tensor:  # (pictures, channels, height, width) -> (pictures, classes)
        return self.scores({"pixel_values": pixel_values})


class TextPredictor(Predictor):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (texts, tokens) -> (texts, classes)
        return self.scores({"input_ids": input_ids, "attention_mask": attention_mask})


class TokenPredictor(Predictor):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(sentences, tokens) -> (sentences, tokens, classes). A word has the scores of its first token."""
        sentences, tokens = input_ids.shape
        which, where = torch.arange(sentences)[:, None], torch.arange(tokens)[None]
        at = torch.stack([which.expand(-1, tokens), where.expand(sentences, -1)], 2).flatten(0, 1)
        found = self.scores({"input_ids": input_ids, "attention_mask": attention_mask}, at)
        return found.reshape(sentences, tokens, -1)


PREDICTORS: dict[str, type[Predictor]] = {"image": PicturePredictor, "text": TextPredictor, "token": TokenPredictor}


def export(learner: Learner, path: str | Path, format: Format = "onnx") -> None:
    """Write the model of a learner to one file, and check that the file gives the learner's scores.

    Args:
        learner: a taught `Learner`, or the model of a run (`bace.load`).
        path: where the file is written.
        format: `onnx` for onnxruntime and similar programs, `torch` for `torch.export.load`.
    """
    method, modality = learner.method, learner.modality
    if method is None or modality is None:
        raise ConfigError("this learner has learned nothing yet: there is nothing to export")
    if modality not in PREDICTORS:
        raise ConfigError(f"models of {modality} data cannot be exported: only {', '.join(PREDICTORS)} models can")
    if Path(path).is_dir() or not Path(path).parent.is_dir():  # known before the model is traced, which takes long
        said = "is a folder" if Path(path).is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"'{path}' {said}: name a file in a folder that exists")
    if why := method.not_exportable:
        raise ConfigError(f"{method.title} cannot be exported: {why}")
    predictor = PREDICTORS[modality](method)
    few, many = (sample(method.model.encoder, *shape) for shape in ((2, 5), (3, 7)))
    expected = predictor(**many)  # first, because values that a method caches must not be symbols
    program = traced(predictor, method.title, few)
    noted = {"bace": json.dumps(description(learner)), **tokenizer(learner)}
    if format == "torch":
        files = {"bace.json" if name == "bace" else name: text for name, text in noted.items()}
        torch.export.save(program, path, extra_files=files)
        found = torch.export.load(path).module()(**many)
    else:
        found = write_onnx(program, Path(path), noted, many)
    finite = expected.isfinite()  # a class without examples has the score -inf
    off = float((found - expected)[finite].abs().max() / expected[finite].abs().max().clamp(min=1))
    if not (off <= AGREE and torch.equal(found.isfinite(), finite)):
        Path(path).unlink()
        raise BaceError(f"the exported {method.title} is not exact: its scores are off by {off:.1g} of the largest")


def traced(predictor: Predictor, title: str, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    """The predictor as a program for any number of examples and, for texts, any number of tokens."""
    encoder = predictor.hidden_method[0].model.encoder
    longest = encoder.max_tokens if isinstance(encoder, TextEncoder) else None
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=2, max=longest)
    shapes = {name: {0: batch} if value.ndim == 4 else {0: batch, 1: tokens} for name, value in inputs.items()}
    try:
        with torch.no_grad():
            return torch.export.export(predictor, (), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many kinds
        raise BaceError(
            f"{title} cannot be exported: torch cannot trace its prediction ({first_line(error)})"
        ) from error


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, noted: dict[str, str], inputs: dict[str, Tensor]
) -> Tensor:  # the scores that onnxruntime gives for the inputs
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch needs it)
    except ImportError as error:
        raise ConfigError("ONNX needs more packages: pip install 'bace-cil[export]'") from error
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):  # operators of torchvision, constants that stay: no matter
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about torch's own code
        written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.model.metadata_props.update(noted)
    written.save(str(path))
    session = onnxruntime.InferenceSession(str(path))
    names = [given.name for given in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: inputs[name].numpy() for name in names})[0])


def sample(encoder: Encoder, examples: int, tokens: int) -> dict[str, Tensor]:
    """Inputs for tracing and for comparing scores."""
    rng = torch.Generator().manual_seed(examples)
    if isinstance(encoder, ImageEncoder):
        side = encoder.image_size
        return {"pixel_values": torch.randn(examples, encoder.channels, side, side, generator=rng)}
    assert isinstance(encoder, TextEncoder)
    ids = torch.randint(min(1000, encoder.config.vocab_size), (examples, tokens), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def description(learner: Learner) -> dict[str, Any]:
    """The facts that a program needs to use the file."""
    assert learner.method is not None
    assert learner.config is not None
    encoder = learner.method.model.encoder
    stream = learner.method.stream
    classes = [stream.names[c] for c in stream.known]
    about = {"bace": version("bace-cil"), "method": learner.method.title, "classes": classes}
    if isinstance(encoder, ImageEncoder):
        side = encoder.image_size
        steps: dict[str, Any] = {
            "mode": "RGB",
            "stored": learner.picture,
            "resize": [side, side],
            "interpolation": "bicubic, antialiased",
        }
        if learner.picture and min(learner.picture) >= 128:
            steps["centre_crop_before_resize"] = 0.875
        return {**about, "picture": {**steps, "scale": 1 / 255, "mean": encoder.mean, "std": encoder.std}}
    length = data_settings(learner.config).max_length
    return {**about, "text": {"tokenizer": learner.config.backbone.name, "max_length": length}}


def tokenizer(learner: Learner) -> dict[str, str]:
    """The tokenizer of a text model in the format of the package `tokenizers`. It adds special tokens, truncates to the
    model's length, and pads."""
    assert learner.method is not None
    assert learner.config is not None
    encoder = learner.method.model.encoder
    if not isinstance(encoder, TextEncoder):
        return {}
    own = tokenizer_of(encoder)
    fast = type(own.backend_tokenizer).from_str(own.backend_tokenizer.to_str())  # a copy: ours must not change
    fast.enable_truncation(data_settings(learner.config).max_length, direction=own.truncation_side)
    fast.enable_padding(pad_id=own.pad_token_id or 0, pad_token=own.pad_token or "[PAD]")
    return {"tokenizer.json": fast.to_str()}
