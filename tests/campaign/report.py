"""docs/reliability.md from the records."""
from pathlib import Path
from typing import Any


def write_report(path: Path, folder: Path, campaigns: dict[str, Any]) -> None: ...
