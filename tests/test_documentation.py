"""docs/methods.md and docs/data.md say what the code says."""

import sys
from typing import Any

import pytest
from conftest import ROOT

from bace.methods import METHODS

sys.path.insert(0, str(ROOT / "scripts"))
import document_data
from document_methods import document


def test_the_table_of_methods_is_up_to_date() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == document(), "run python scripts/document_methods.py"


def test_the_page_of_data_and_backbones_is_up_to_date() -> None:
    assert (ROOT / "docs" / "data.md").read_text() == document_data.document(), "run python scripts/document_data.py"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_every_hyper_parameter_is_explained(method: Any) -> None:
    explained = method.__doc__ or ""
    for base in method.__mro__[1:]:
        explained += base.__doc__ or ""
    missing = [name for name in method.hyper_parameters() if f"\n        {name}:" not in explained]
    assert not missing
