"""The scores of every method on a small stream do not change, so that a broken method is noticed (tests/golden/)."""

import pytest
import torch
from golden.record import CASES, STREAMS, golden, measured, tells_apart

BANDS = {stream: golden(stream)["methods"] for stream in STREAMS.values()}
DIGITS = BANDS["digits"]
# all methods that SEQ is far below; on digits some are not much better
FAR = [
    (stream, title)
    for stream, title in CASES
    if title != "SEQ" and (stream != "digits" or DIGITS[title]["A_last"][0] > DIGITS["SEQ"]["A_last"][0] + 20)
]


@pytest.mark.parametrize(("stream", "method"), CASES)
def test_a_method_scores_as_recorded(stream: str, method: str) -> None:
    found = measured(stream, method, **{"train.threads": torch.get_num_threads()})
    outside = {
        name: f"{found[name]}, not {middle} ± {half}"
        for name, (middle, half) in BANDS[stream][method].items()
        if abs(found[name] - middle) > half
    }
    assert not outside


@pytest.mark.parametrize("method", ["ACIL", "APER", "FeCAM", "MOS", "RanPAC", "SLDA"])
def test_the_band_of_a_method_on_features_has_no_room_for_class_means_alone(method: str) -> None:
    assert tells_apart(DIGITS["SimpleCIL"], DIGITS[method])


@pytest.mark.parametrize(("stream", "method"), FAR)
def test_the_band_of_a_method_that_remembers_has_no_room_for_one_that_does_not(stream: str, method: str) -> None:
    assert tells_apart(BANDS[stream]["SEQ"], BANDS[stream][method])
