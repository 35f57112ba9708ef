"""Write docs/methods.md from the methods' cards and from the first lines of their formula tests.

python scripts/document_methods.py
"""

import ast
from pathlib import Path

from bace.core.method import Method
from bace.methods import METHODS

ROOT = Path(__file__).parent.parent
COLUMNS = ("method", "paper", "mechanism", "memory", "stages", "modalities", "cost", "O rows", "reading")
HEADER = """# Methods

Made by `python scripts/document_methods.py` from the methods' cards and the docstrings of their formula tests; a test
fails if it is not up to date. `bace list methods --json` gives the hyper-parameters.

*Cost* is that of a task after the first, with default settings. Passes through the encoder, where forward counts 1 and
there and back 3: for each new and each replayed example in every epoch; once for each example of the task and of the
memory. Networks of the encoder's size, if more than one is kept. `tests/test_cost.py` compares both with small runs.

*Memory*: of methods with a setting `mode`, how their authors replay: a separate batch from memory at each step
(`batch`, the default of all but IL2M), or the memory shuffled into the task's data (`concat`). *Reading* is what was
decided where the originals disagree or are silent. *O rows*: what is done with words labelled O (entities), which may
be entities of other tasks, or why a method refuses tokens.
"""


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def described(method: type[Method]) -> list[str]:
    card = method.card
    assert card is not None, f"{method.title} has no card"
    return [
        f"**{method.title}**",
        method.paper,
        card.mechanism,
        ("yes" if method.uses_memory else "no") + (f"; the authors: `mode={card.replay}`" if card.replay else ""),
        ", ".join(card.stages),
        ", ".join(sorted(method.modalities)),
        cost(method(), card.besides),
        card.o_rows,
        card.reading,
    ]


def cost(method: Method, besides: str) -> str:
    passes, networks = method.cost, method.networks + method.keeps_teacher
    every = {"new": passes.new, "replayed": passes.replayed}
    once = {"task": passes.task, "memory": passes.memory}
    epochs = f" in {passes.epochs} epochs" if passes.epochs else ""
    said = [", ".join(f"{count:g} {what}" for what, count in part.items() if count) for part in (every, once)]
    said = [said[0] and said[0] + epochs, said[1] and f"once {said[1]}"]
    if method.expands or networks > 1:
        said.append("a network for each task" if method.expands else f"{networks} networks")
    return "; ".join(filter(None, [*said, besides]))


def verified(method: type[Method]) -> list[str]:
    """The docstring of the method's formula tests, and how many there are."""
    path = next(
        path
        for name in (method.__module__.rpartition(".")[2], "baselines")
        if (path := ROOT / "tests" / "formulas" / f"test_{name}.py").exists()
    )
    tree = ast.parse(path.read_text())
    tests = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
    said = " ".join((ast.get_docstring(tree) or "").split())
    return [f"**{method.title}**", said, f"[{tests}](../tests/formulas/{path.name})"]


def document() -> str:
    return "\n".join(
        [
            HEADER,
            table(COLUMNS, [described(method) for method in METHODS]),
            "## What is verified, and how\n",
            "Beside these every method passes the conformance suite (`tests/checks.py`) on each of its modalities\n"
            "and a sanity band on the embedded digits (`tests/golden/`).\n",
            table(("method", "established by", "formula tests"), [verified(method) for method in METHODS]),
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "methods.md").write_text(document())
