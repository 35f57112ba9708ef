"""The documentation builds as a site without a warning, shows everything public, and loads nothing from other hosts."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from mkdocs.commands.build import build
from mkdocs.config import load_config

import bace


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))  # a warning is an error
    return folder


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    others = {"index.html", "contributing.html", "changelog.html", "404.html"}
    assert {path.name for path in site.glob("*.html")} == pages | others


def test_the_reference_explains_everything_that_is_public(site: Path) -> None:
    explained = set(re.findall(r'<h2 id="bace\.(\w+)"', (site / "api.html").read_text()))
    assert explained == set(bace.__all__)


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?([^"' >]+)""")
    for page in site.glob("*.html"):
        loaded = loads.findall(page.read_text())
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []


def test_links_to_code_do_not_leave_the_site(site: Path) -> None:
    text = (site / "methods.html").read_text()
    assert "tests/formulas/test_bace.py" in text
    assert not re.search(r'href="[^"]*\.py"', text)
