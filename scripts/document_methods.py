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

`python scripts/document_methods.py` generates this page from the methods' cards and the docstrings of their formula
tests. A test fails if the page is out of date. `bace list methods --json` lists the hyper-parameters.

The columns mean:

- *Memory* says whether the method keeps examples. For methods with the setting `mode`, it also says how their authors
  replay: with a separate batch from memory at each step (`batch`, the default of all methods except IL2M), or with the
  memory shuffled into the task's data (`concat`).
- *Cost* is the cost of a task after the first, with default settings, and of the first where it is another kind of
  task than plain training. It counts passes through the encoder, where a
  forward pass counts 1 and a forward and backward pass counts 3. For example, "3 new, 3 replayed; once 1 task" means
  3 passes for each new and each replayed example in every epoch, and 1 pass for each example of the task once. It also
  gives the number of networks of the encoder's size if there is more than one. `tests/test_cost.py` compares the passes
  and the networks with small runs.
- *O rows* (entities) says how the method treats words labelled O, which may be entities of other tasks, or why it
  refuses tokens.
- *Reading* says what we decided where the originals disagree or are silent.
"""


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def described(method: type[Method]) -> list[str]:
    card = method.card
    assert card is not None, f"{method.title} has no card"
    return [
        named(method),
        method.paper,
        card.mechanism,
        ("yes" if method.uses_memory else "no") + (f"; the authors use `mode={card.replay}`" if card.replay else ""),
        ", ".join(card.stages),
        ", ".join(sorted(method.modalities)),
        cost(method(), card.besides),
        card.o_rows,
        card.reading,
    ]


def named(method: type[Method]) -> str:
    return "**" + method.title.replace("*", "\\*") + "**"  # the star of SEQ* is not markup


def cost(method: Method, besides: str) -> str:
    passes, networks = method.cost, method.networks + method.keeps_teacher
    every = {"new": passes.new, "replayed": passes.replayed}
    once = {"task": passes.task, "memory": passes.memory}
    epochs = f" in {passes.epochs} epoch{'s' * (passes.epochs > 1)}" if passes.epochs else ""
    epochs += f" and at least {passes.steps} steps" if passes.steps else ""
    said = [", ".join(f"{count:g} {what}" for what, count in part.items() if count) for part in (every, once)]
    said = [said[0] and said[0] + epochs, said[1] and f"once {said[1]}"]
    if passes.first not in (None, passes.task):
        said.append(f"{passes.first:g} in all for each example of the first task")
    if method.expands or networks > 1:
        said.append("a network for each task" if method.expands else f"{networks} networks")
    return "; ".join(filter(None, [*said, besides]))


def verified(method: type[Method]) -> list[str]:
    """The docstring of the method's formula tests, and their number."""
    path = next(
        path
        for name in (method.__module__.rpartition(".")[2], "baselines")
        if (path := ROOT / "tests" / "formulas" / f"test_{name}.py").exists()
    )
    tree = ast.parse(path.read_text())
    tests = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
    said = " ".join((ast.get_docstring(tree) or "").split())
    return [named(method), said, f"[{tests}](../tests/formulas/{path.name})"]


def document() -> str:
    return "\n".join(
        [
            HEADER,
            table(COLUMNS, [described(method) for method in METHODS]),
            "## How each method is verified\n",
            "In addition to these formula tests, every method passes the conformance suite (`tests/checks.py`) on\n"
            "each of its modalities, and its scores stay in a sanity band (`tests/golden/`): on the embedded digits,\n"
            "or, if it does not take images, on generated texts or sentences.\n",
            table(("method", "what the tests check", "formula tests"), [verified(method) for method in METHODS]),
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "methods.md").write_text(document())
