"""`make test-export` compares every method that can be exported, on every modality, with onnxruntime.

    python tests/onnx_parity.py [METHOD ...]

Each learner is taught two tiny tasks and exported. onnxruntime must then give the learner's scores within 1e-4 of the
largest and the same argmax for every example, in batches of every size from one to all. The exit code is 1 if not.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from checks import shown_examples
from conftest import Tiny
from test_export import encoder_inputs, taught

from bace.methods import METHODS
from bace.models.weights import first_line
from bace.serving.export import AGREE, PREDICTORS, export


def compare(tiny: Tiny, method: str, modality: str, path: Path) -> tuple[float, int, int]:
    """The largest difference relative to the largest score, the number of rows whose argmax agrees, and of all rows."""
    learner = taught(tiny, method, modality)
    assert learner.method is not None
    export(learner, path)
    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    inputs = {k: v for k, v in encoder_inputs(learner, shown_examples(tiny, modality)[0]).items() if k in names}
    rows = torch.ones(len(inputs[names[0]]), dtype=torch.bool)
    if modality == "token":
        rows = inputs["attention_mask"].bool()
    expected = PREDICTORS[modality](learner.method)(**inputs)[rows]
    finite = expected.isfinite()  # a class without examples has the score -inf
    worst, agree, count = 0.0, 0, 0
    for size in range(1, len(rows) + 1):
        parts = [{k: v.split(size)[i].numpy() for k, v in inputs.items()} for i in range(-(-len(rows) // size))]
        found = torch.cat([torch.from_numpy(session.run(None, part)[0]) for part in parts])[rows]
        off = (found - expected)[finite].abs().max() / expected[finite].abs().max().clamp(min=1)
        worst = max(worst, float(off))
        agree += int((found.argmax(1) == expected.argmax(1)).sum())
        count += len(expected)
    return worst, agree, count


def main(wanted: list[str]) -> int:
    failures = 0
    print("| method | data | largest difference | same argmax |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        tiny: Any = Tiny(Path(folder) / "tiny")
        for method in METHODS:
            for modality in sorted(method.modalities) if not wanted or method.title in wanted else ():
                if method.not_exportable is not None:
                    print(f"| {method.title} | {modality} | refused: {method.not_exportable} | |", flush=True)
                    continue
                try:
                    worst, agree, count = compare(tiny, method.title, modality, Path(folder) / "model.onnx")
                except Exception as error:  # torch raises many kinds of errors
                    failures += 1
                    print(f"| {method.title} | {modality} | {first_line(error)} | |", flush=True)
                    continue
                failures += not (worst <= AGREE and agree == count)
                print(f"| {method.title} | {modality} | {worst:.1e} | {agree} of {count} |", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
