"""bace export"""

from pathlib import Path
from typing import Literal


def command(
    model: Path,
    out: Path,
    *,
    format: Literal["onnx", "torch"] = "onnx",
    trust: bool = False,
    force: bool = False,
) -> None:
    """Write a learned model to one file that runs without bace.

    The file maps the encoder's inputs to the scores of all classes. It holds the names of the classes, describes how an
    example becomes an input and, for texts and sentences, holds the tokenizer. It is kept only if it gives the same
    scores as the model.

    Args:
        model: the folder of a run, of a comparison (its best run is used), or of a saved Learner.
        out: the file to write.
        format: `onnx` for onnxruntime and similar programs, `torch` for `torch.export.load`.
        trust: allow a method of your own that MODEL names to be imported, which runs its code.
        force: export even if run.json was changed after the run.
    """
    from bace.learner.opening import open_model
    from bace.serving.export import export

    export(open_model(model, trust=trust, force=force), out, format)
    print(f"written: {out}")
