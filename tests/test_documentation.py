"""docs/methods.md and docs/data.md agree with the code, and the targets of all references exist."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
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


# -- references

FOLDERS = ("src", "tests", "benchmarks", "scripts", "docs", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md")]
FILES += sorted(ROOT.glob("*.md"))


def prose(path: Path) -> str:
    """The text of a page, or the docstrings and comments of code."""
    text = path.read_text()
    if path.suffix == ".md" or not re.search(r"\.(?:py|md)\b", text):
        return text
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def test_files_and_sections_that_are_referred_to_exist() -> None:
    """Modules and pages, by their names or the ends of their paths, and the numbered sections of docs/bace.md. The
    output of a command (`> claims.md`) and the file of a user's class (`file.py:Class`) do not count."""
    paths = [f"/{file.relative_to(ROOT)}" for file in FILES]
    sections = set(re.findall(r"^(?:## |- )(\d+(?:\.\d+)?) ", (ROOT / "docs" / "bace.md").read_text(), re.MULTILINE))
    missing = []
    for path in FILES:
        text = prose(path)
        found = re.findall(r"(?<!> )(?<![\w./-])[\w./-]*\w\.(?:py|md)\b(?!:[A-Z])", text)
        named = {name.removeprefix("../") for name in found}
        missing += [(path, name) for name in named if not any(file.endswith(f"/{name}") for file in paths)]
        for numbers in re.findall(r"bace\.md\)?,? (?:section )?(\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*)", text):
            missing += [(path, f"docs/bace.md {number}") for number in set(numbers.split(", ")) - sections]
    assert not missing
