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

    The file maps the encoder's inputs to the scores of all classes. It holds the names of the classes and says what has
    to be done to an example first. It is kept only if it gives the model's own scores.

    Args:
        model: the folder of a run, of a comparison (whose best run is taken), or of a saved Learner.
        out: the file that is written.
        format: `onnx`, for onnxruntime and its like; `torch`, for `torch.export.load`.
        trust: a method of your own that MODEL names may be imported, which runs its code.
        force: export though run.json was changed after the run.
    """
    from bace.cli.predict import open_model
    from bace.serving.export import export

    export(open_model(model, trust=trust, force=force), out, format)
    print(f"written: {out}")
