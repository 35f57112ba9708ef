"""The examples run unchanged, and what they say about the command line is true."""

import contextlib
import functools
import io
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from bace.cli.main import main

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.xdist_group("examples")  # examples write data that their commands read


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the examples write their data."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(desk: Path) -> Callable[[str], str]:
    """The output of an example. Each example runs once, for the first test that asks."""

    @functools.cache
    def run(name: str) -> str:
        with contextlib.chdir(desk), contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return out.getvalue()

    return run


def percentages(text: str) -> list[list[float]]:
    """The percentages in each line that has some."""
    lines = [[float(number) for number in re.findall(r"([\d.]+)%", line)] for line in text.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize(
    ("name", "least"),
    [("pictures", [[95], [90, 90]]), ("texts", [[75], [75, 85]]), ("entities", [[80, 75], [75, 60, 70]])],
)
def test_an_example_learns_two_months_of_classes(
    name: str, least: list[list[float]], printed: Callable[[str], str]
) -> None:
    scores = percentages(printed(name))
    assert [len(line) for line in scores] == [len(line) for line in least]
    for line, bars in zip(scores, least, strict=True):
        assert all(score >= bar for score, bar in zip(line, bars, strict=True)), (line, bars)


@pytest.mark.parametrize("name", ["pictures", "texts", "entities"])
def test_the_commands_of_an_example_do_the_same(
    name: str,
    desk: Path,
    printed: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed(name)  # this writes the data
    monkeypatch.chdir(desk)
    commands = re.findall(r"^    (bace .*)$", (EXAMPLES / f"{name}.py").read_text(), flags=re.MULTILINE)
    *learning, prediction = [shlex.split(command.replace(" model ", f" {tmp_path / 'model'} ")) for command in commands]
    for _, *words in learning:
        assert main(words) == 0
    capsys.readouterr()
    predicted = []
    for model in (str(tmp_path / "model"), f"{name}-model"):
        assert main(["predict", model, *prediction[3:]]) == 0
        predicted.append(capsys.readouterr().out)
    assert predicted[0] == predicted[1]
    assert len(predicted[0].splitlines()) > 20
