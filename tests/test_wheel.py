"""The wheel contains everything that bace needs, and installs with only the packages that it requires."""

import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement


def closure(requirements: list[Requirement]) -> dict[str, Distribution]:
    """The installed packages among these requirements and their own requirements, by name."""
    found: dict[str, Distribution] = {}
    asked: set[tuple[str, str]] = set()
    while requirements:
        wanted = requirements.pop()
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) in asked:
                continue
            asked.add((wanted.name, extra))
            found[wanted.name] = distribution(wanted.name)
            theirs = map(Requirement, found[wanted.name].requires or [])
            requirements += [one for one in theirs if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy because setuptools writes beside its sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, copy]
    subprocess.run(build, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with only the packages that the wheel requires; it does not contain bace's own source."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    needs = [Requirement(line) for line in distribution("bace-cil").requires or []]
    for package in closure([need for need in needs if need.marker is None]).values():
        for part in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / part
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(part))))
    # without an index, pip finds every requirement satisfied or fails
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index"]
    subprocess.run([*pip, "--no-compile", wheel], check=True, capture_output=True)
    yield folder
    shutil.rmtree(folder)


def test_the_wheel_has_the_files_that_are_no_code(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = [path for path in (source / "bace").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(source)) for path in files} <= names
    for name in ("data/digits_vit/model.safetensors", "report/template.html", "paper/claims.csv", "py.typed"):
        assert f"bace/{name}" in names
    others = {name for name in names if not name.startswith("bace/")}
    assert all(".dist-info/" in name for name in others)


def test_an_installed_wheel_runs_without_the_source(installed: Path, tmp_path: Path) -> None:
    def told(program: str, *words: str) -> str:
        command, own = [installed / "bin" / program, *words], {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    home = told("python", "-c", "import bace; print(bace.__file__)")
    assert Path(home).is_relative_to(installed)
    assert told("bace", "--version").strip() == distribution("bace-cil").version
    assert "BaCE" in told("bace", "list", "methods")
    told("bace", "run", "--method", "slda", "--benchmark.train_per_class", "20", "--out", "run")
    assert (tmp_path / "run" / "metrics.json").is_file()
