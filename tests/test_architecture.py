"""The folders are the architecture: imports only go down this list, without exceptions or cycles."""

import ast
from pathlib import Path

import pytest

import bace

SOURCE = Path(bace.__file__).parent

# Every module belongs to the first line that names it or its package, and imports only from its own line and below.
LAYERS = (
    ("bace.__main__", "bace.cli"),
    ("bace.paper",),
    ("bace.report",),
    ("bace.serving",),
    ("bace.learner",),
    ("bace.experiments",),
    ("bace.studies",),
    ("bace.config.parse",),
    ("bace.methods",),
    ("bace.core",),
    ("bace.models",),
    ("bace.data",),
    ("bace.config.schema",),
    ("bace.config.parser",),
    ("bace.errors", "bace.files", "bace.progress", "bace.randomness", "bace.ranks"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
MODULES = [name for name in FILES if name not in ("bace", "bace.config")]  # the root re-exports, the other is empty


def layer(module: str) -> int:
    found = [i for i, line in enumerate(LAYERS) for name in line if f"{module}.".startswith(f"{name}.")]
    assert found, f"{module} belongs to no layer"
    return found[0]


def imported(module: str) -> set[str]:
    """The modules of bace that a module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name.startswith("bace") and name not in FILES:
                name = name.rpartition(".")[0]
            if name.startswith("bace"):
                found.add(name)
    return found - {module}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_layer_and_those_below(module: str) -> None:
    upward = sorted(
        name
        for name in imported(module)
        if (name not in ("bace.config",) and name not in MODULES) or (name in MODULES and layer(name) < layer(module))
    )
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    inner = {module: imported(module) & set(MODULES) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(inner[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_root_holds_at_most_eight_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_nothing_that_learns_or_looks_on_asks_which_modality_it_is() -> None:
    for module in (name for name in MODULES if name.startswith(("bace.core", "bace.methods", "bace.studies"))):
        compared = [node for node in ast.walk(ast.parse(FILES[module].read_text())) if isinstance(node, ast.Compare)]
        attributes = {part.attr for node in compared for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        assert "modality" not in attributes, module


@pytest.mark.parametrize("module", FILES)
def test_no_function_is_longer_than_sixty_lines(module: str) -> None:
    functions = [node for node in ast.walk(ast.parse(FILES[module].read_text())) if isinstance(node, ast.FunctionDef)]
    lines = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    assert [(name, count) for name, count in lines if count > 60] == []
