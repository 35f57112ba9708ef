"""bace demo"""

from pathlib import Path

from bace.cli import compare


def command(*, out: Path = Path("demo")) -> None:
    """Compare SEQ, ER, BaCE and MTL on the embedded digits with 3 seeds, and make a table and a page.

    Args:
        out: the folder that keeps the runs and the page, report.html. Finished runs are not run again.
    """
    compare.command(method=["SEQ", "ER", "BaCE", "MTL"], seeds=3, out=out, benchmark="digits")
