"""Compare the search for neighbours with faiss-cpu's flat index and with bare matrix products, on one thread."""

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Bar, fastest, peak_memory
from peers import default_folder, environment
from torch import Tensor

from bace.methods.parts.neighbours import nearest

K = 5


def random_features(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def search(rows: int, width: int) -> None:
    nearest(random_features(rows, width), K)


def share_of_products(features: Tensor, seconds: float) -> float:
    """The time of the bare matrix products of all pairs, divided by the time of the search."""

    def products() -> None:
        for block in features.split(256):
            for part in features.split(4096):
                torch.mm(block, part.T)

    return fastest(products, 2) / seconds


def by_faiss(features: Tensor, repeat: int) -> tuple[float, Tensor]:  # seconds, (rows, K + 1) with the row itself
    python = environment(default_folder())
    script = Path(__file__).parent / "faiss_peer.py"
    with tempfile.TemporaryDirectory() as name:
        given, out = Path(name) / "features.npy", Path(name) / "found.npy"
        np.save(given, features.numpy())
        words = [str(python), str(script), str(given), str(K + 1), str(repeat), str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return float(done.stdout), torch.from_numpy(np.load(out))


def agreement(features: Tensor, ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The share of rows with the same neighbours as faiss, and the share without a farther neighbour than faiss (in
    double precision). faiss does not rank distances that its rounding makes equal."""
    own = torch.arange(len(features))[:, None]
    others = theirs[theirs != own].view(len(features), K)
    same = (ours.sort(1).values == others.sort(1).values).all(1).float().mean()
    nearer = [_lengths(features, ours, at) <= _lengths(features, others, at) + 1e-9 for at in own[:, 0].split(1000)]
    return float(same), float(torch.cat(nearer).all(1).float().mean())


def _lengths(features: Tensor, found: Tensor, at: Tensor) -> Tensor:  # (rows, width), (rows, K), (some,) -> (some, K)
    difference = features[at, None].double() - features[found[at]].double()
    return torch.linalg.vector_norm(difference, dim=2).sort(1).values


def bars(tiny: bool) -> dict[str, Bar]:
    rows, many, width, repeat = (500, 600, 64, 1) if tiny else (20_000, 100_000, 768, 2)
    features = random_features(rows, width)
    ours: list[Tensor] = []
    seconds = fastest(lambda: ours.append(nearest(features, K)[0]), repeat)
    theirs, found = by_faiss(features, repeat)
    same, nearer = agreement(features, ours[0], found)
    return {
        "neighbours of 20,000 x 768: seconds over faiss-cpu's": Bar(seconds / theirs, 0.5),
        "neighbours: share of rows equal to faiss-cpu's": Bar(same),
        "neighbours: share of rows with none farther than faiss-cpu's": Bar(nearer, 1.0, least=True),
        "neighbours: share of the rate of bare products": Bar(share_of_products(features, seconds), 0.7, least=True),
        "neighbours of 100,000 x 768: peak memory (MB)": Bar(peak_memory(search, many, width), 1000),
    }
