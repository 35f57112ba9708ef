"""The examples in the README work as written."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import bace
from bace.methods import find_method

README = (ROOT / "README.md").read_text()


def code_with(word: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return next(block for block in blocks if word in block)


@pytest.mark.parametrize("modality", ["image", "text", "token"])
def test_the_method_of_the_readme_runs(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modality: str
) -> None:
    (tmp_path / "mypackage.py").write_text(code_with("class MyReplay"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mypackage", raising=False)
    method = {"name": "mypackage.MyReplay", "weight": 0.5}
    result = bace.run(tiny.settings(modality, method=method), out=tmp_path / "run")
    assert result.metrics["A_last"] >= 0
    assert find_method("mypackage.MyReplay").hyper_parameters()["weight"].default == 1.0
    assert '"old"' in (tmp_path / "run" / "log.jsonl").read_text()


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_learner_of_the_readme_is_that_of_an_example() -> None:
    assert code_with("Learner.load") in (ROOT / "examples" / "pictures.py").read_text()
