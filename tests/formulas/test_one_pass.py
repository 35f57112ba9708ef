"""The predictions of methods that learn by statistics do not depend on the order of tasks or on the rest of a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from checks import short
from steps import array, make
from torch import Tensor

from bace.core.trainer import Trainer

METHODS = [
    {"name": "simplecil"},
    {"name": "ranpac", "M": 30, "ridge": 2.0, "adapt": False},
    {"name": "acil", "expansion": 30},
    {"name": "fecam"},
    {"name": "fecam", "common": True},
    {"name": "slda", "exact": True},
]


def name(method: dict[str, Any]) -> str:
    return str(method["name"]) + (" common" if "common" in method else "")


def scores_of(tiny: Any, modality: str, method: dict[str, Any], **changes: Any) -> tuple[list[str], Tensor, Any]:
    """Return the classes in their order, the scores of the test examples in the order of the class names, and the
    method."""
    made, stream, config = make(tiny, modality, method, **{"benchmark.tasks": [2, 1, 2], **changes})
    Trainer(made, stream, config).run()
    tests = torch.cat([task.test for task in stream])
    with stream.licence("a test", tests):
        by_class = {n: stream.batch(tests[stream.targets[tests] == c]) for c, n in enumerate(stream.names)}
        scores = torch.cat([made.predict(by_class[n]) for n in sorted(by_class)])
    return stream.names, scores, made


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("method", METHODS, ids=name)
def test_the_order_of_tasks_does_not_matter(tiny: Any, modality: str, method: dict[str, Any]) -> None:
    names, scores, _ = scores_of(tiny, modality, method)
    order = ["eel", "bee", "dog", "ant", "cat"]
    others, again, _ = scores_of(tiny, modality, method, **{"benchmark.class_order": order})
    assert others == order
    columns = [others.index(n) for n in names]
    np.testing.assert_allclose(array(again[:, columns]), array(scores), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", [{"name": "simplecil"}, {"name": "slda"}, short("aper")], ids=name)
def test_the_mean_of_o_is_that_of_all_words_labelled_o_in_any_task(tiny: Any, method: dict[str, Any]) -> None:
    """This includes entities of other tasks, which are labelled O in this task."""
    made, stream, config = make(tiny, "token", method, **{"benchmark.tasks": [2, 1, 2]})
    Trainer(made, stream, config).run()
    everything = torch.cat([task.train for task in stream])
    with stream.licence("a test", everything):
        batch = stream.batch(everything)
    x, y = array(made.features(batch)), batch.targets.numpy()
    means = made.means if method["name"] == "slda" else made.statistics.means
    assert len(means) == 11
    for c in range(11):
        np.testing.assert_allclose(array(means[c]), x[y == c].mean(0), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
@pytest.mark.parametrize("method", METHODS, ids=name)
def test_a_prediction_does_not_depend_on_its_batch(tiny: Any, modality: str, method: dict[str, Any]) -> None:
    made, stream, config = make(tiny, modality, method)
    Trainer(made, stream, config).run()
    test = stream[0].test
    with stream.licence("a test", test):
        together = made.predict(stream.batch(test))
        alone = torch.cat([made.predict(stream.batch(test[i : i + 1])) for i in range(len(test))])
    np.testing.assert_allclose(array(alone), array(together), rtol=1e-7, atol=1e-9)
