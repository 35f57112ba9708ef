"""A command imports no slow module before it needs it."""

import subprocess
import sys

import pytest

SLOW = ("torch", "datasets", "plotly", "transformers", "sklearn", "pandas", "pyarrow", "scipy")


def imported(code: str) -> set[str]:
    """The slow packages that are imported after the code has run in a separate process."""
    program = f"{code}\nimport sys\nprint(*(name for name in {SLOW!r} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code", ["import bace; import bace.cli.main", "from bace.cli.main import main; main(['--help'])"]
)
def test_the_help_page_imports_nothing_slow(code):
    assert imported(code) == set()


def test_digits_are_loaded_without_what_training_does_not_need():
    code = """
from bace.config.parse import config_from
from bace.experiments.assemble import prepare_torch
from bace.experiments.run import run
from bace.data.digits import load_digits
prepare_torch(config_from({"benchmark": "digits", "method": "bace"}))
load_digits()
import sys
assert "torch._dynamo" not in sys.modules
"""
    assert imported(code) == {"torch"}


def test_a_run_on_pictures_begins_without_transformers():
    code = """
import bace
class Begun(Exception): ...
def show(done, text):
    raise Begun
try:
    bace.run(benchmark="digits", method="bace", show=show)
except Begun:
    pass
"""
    assert "transformers" not in imported(code)
