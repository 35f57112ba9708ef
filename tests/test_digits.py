"""The embedded default: what `bace demo` shows, on one seed and half of the digits."""

from pathlib import Path

import pytest
import torch

from bace.cli.main import main
from bace.data.digits import load_digits
from bace.report import load_runs, summary_rows


def test_demo_ranks_the_methods_and_leaves_runs_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--benchmark", "digits", "--method", "SEQ", "ER", "BaCE", "MTL", "--seeds", "1", "--train.threads", "1"]
    words += ["--benchmark.train_per_class", "60"]
    assert main(["compare", *words, "--out", str(tmp_path / "demo")]) == 0
    score = {row.method: row.A_last.mean for row in summary_rows(load_runs([tmp_path / "demo"])) if row.A_last}
    assert score["SEQ"] < 40
    assert score["ER"] > score["SEQ"] + 30
    assert score["BaCE"] > score["SEQ"] + 30
    assert score["MTL"] > max(score["ER"], score["BaCE"])
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1_000_000  # plotly is inside
    printed = capsys.readouterr().out
    assert all(name in printed for name in score)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits as published

    raw = published()
    train, test = load_digits()
    expected = torch.from_numpy(raw.images * (255 / 16)).round().to(torch.uint8)
    assert len(train) + len(test) == len(expected)
    assert train.labels[:5] == [str(label) for label in raw.target[:5]]
    assert isinstance(train.inputs, torch.Tensor)
    assert torch.equal(train.inputs[:20, 0], expected[:20])
