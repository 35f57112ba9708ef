"""The scores of an example do not depend on the other examples of its batch, whichever method predicts."""

from typing import Any

import numpy as np
import pytest
import torch
from checks import short
from steps import array, make

from bace.core.trainer import Trainer
from bace.methods import METHODS

CASES = [(method.title, modality) for method in METHODS for modality in sorted(method.modalities)]


@pytest.mark.parametrize(("method", "modality"), CASES)
def test_the_scores_of_an_example_do_not_depend_on_its_batch(tiny: Any, method: str, modality: str) -> None:
    """By all rules of prediction of the method, also if it chooses prompts or adapters or adapts to each example. Texts
    have different lengths, so they are padded in a batch and not alone."""
    made, stream, config = make(tiny, modality, short(method), **{"train.epochs": 1})
    trainer = Trainer(made, stream, config)
    for task in stream:
        trainer.learn(task)
    made.eval()
    shown = torch.cat([task.test[:3] for task in stream])
    with stream.licence("a test", shown):
        together, *alone = (stream.batch(ids) for ids in (shown, *shown.split(1)))
        for scorer in (None, *made.scorers):
            expected = torch.cat([made.predict(batch, scorer) for batch in alone])
            np.testing.assert_allclose(array(made.predict(together, scorer)), array(expected), rtol=1e-7, atol=1e-9)
