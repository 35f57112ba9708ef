"""The cost of the library's loop relative to a bare PyTorch loop with the same mathematics: SEQ, ER and BaCE, with crop
and flip.

The bare loops below use plain tensors, without stream, hooks, logging or checks. Both sides learn the same second task
(2,000 pictures, batches of 64 new and 64 old) with the same small ViT, alternating in one process on one thread. The
fastest of several repetitions counts for every step.

    python benchmarks/overhead.py [--repeat N] [--examples N] [--json]
"""

import argparse
import copy
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import CLASSES, Bar, Mark, ignore, least, peak_memory, second_task, step_times, trained_by_library
from torch import Tensor

from bace.models.model import Model

METHODS = ("SEQ", "ER", "BaCE")
BATCH, PADDING = 64, 4
ALPHA, W0, K = 1.0, 0.95, 5


def framework(method: str, examples: int) -> Callable[[Mark], None]:
    """The library's whole training of a task, ready to run."""
    settings = {"neighbour_scores": "exact"} if method == "BaCE" else {}  # as in the bare loop
    return trained_by_library(method, examples, BATCH if method == "SEQ" else 2 * BATCH, **settings)


def augment(pixels: Tensor) -> Tensor:  # (batch, 3, side, side) uint8 -> float
    """Random crop and flip of a whole batch, and normalisation to [-1, 1]."""
    side = pixels.shape[-1]
    padded = F.pad(pixels, [PADDING] * 4)
    top, left = torch.randint(2 * PADDING + 1, (2, len(pixels)))
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)
    cut = windows[torch.arange(len(pixels)), :, top, left]
    flip = torch.rand(len(pixels), 1, 1, 1) < 0.5
    return torch.where(flip, cut.flip(3), cut).float() / 127.5 - 1


class Bare:
    """The same network called directly: encoder, class token, cosine head."""

    def __init__(self, model: Model) -> None:
        self.encoder, self.head = model.encoder, model.head

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder({"pixel_values": values}, pooled=True)[:, 0]
        weight = torch.cat(list(self.head.blocks))
        return features, self.head.sigma * F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))


def bare(method: str, examples: int) -> Callable[[Mark], None]:
    """The same training, by hand."""
    learned, stream, _ = second_task(method, examples, 2 * BATCH)
    teacher = Bare(copy.deepcopy(learned.model).requires_grad_(False))
    learned.grow(stream[1])
    network = Bare(learned.model)
    pixels, targets = stream.data.pixels, stream.targets
    new, old = stream[1].train, learned.memory.examples
    optimiser = torch.optim.SGD(learned.model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def epoch(mark: Mark) -> None:
        views = torch.empty(0)
        if method == "BaCE":
            views = torch.cat([augment(pixels[part]) for part in new.split(128)])
            with torch.inference_mode():
                features, logits = (torch.cat(c) for c in zip(*(teacher(v) for v in views.split(128)), strict=True))
            features, log_old = F.normalize(features.clone(), dim=1), F.log_softmax(logits.clone(), 1)
            distance = torch.cdist(features, features).fill_diagonal_(torch.inf)
            distance, neighbours = distance.topk(K, largest=False)
            closeness = 1 / distance.clamp(min=1e-6)
            weights = (1 - W0) * closeness / closeness.sum(1, keepdim=True)
        for part in torch.randperm(len(new)).split(BATCH):
            x = views[part] if method == "BaCE" else augment(pixels[new[part]])
            y = targets[new[part]]
            if method == "SEQ":
                loss = F.cross_entropy(network(x)[1], y)
            else:
                drawn = old[torch.randint(len(old), (BATCH,))]
                x_old, y_old = augment(pixels[drawn]), targets[drawn]
                z_new, z_old = network(torch.cat([x, x_old]))[1].split([len(x), BATCH])
                if method == "ER":
                    loss = F.cross_entropy(z_new, y) + F.cross_entropy(z_old, y_old)
                else:
                    unique, position = torch.unique(neighbours[part], return_inverse=True)
                    with torch.inference_mode():
                        beside = torch.cat([network(views[ids])[1] for ids in unique.split(128)])
                        target = teacher(x_old)[1]
                    beside, target = F.softmax(beside.clone(), 1)[position, y[:, None]], target.clone()
                    log_s = F.log_softmax(z_new, 1)
                    joint = W0 * log_s.gather(1, y[:, None])[:, 0].exp() + (weights[part] * beside).sum(1)
                    distil = F.kl_div(log_s[:, :CLASSES], log_old[part], log_target=True, reduction="batchmean")
                    match = F.mse_loss(z_old[:, :CLASSES], target)
                    loss = -joint.log().mean() + ALPHA * distil + F.cross_entropy(z_old, y_old) + match
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            mark()

    return epoch


def run_once(side: Callable[[str, int], Callable[[Mark], None]], method: str, examples: int) -> None:
    side(method, examples)(ignore)


def timed(method: str, examples: int, repeat: int) -> tuple[float, float]:
    """The seconds of an epoch by the library and by hand."""
    ours, theirs = [], []
    for _ in range(repeat):
        ours.append(step_times(framework(method, examples)))
        theirs.append(step_times(bare(method, examples)))
    return least(ours), least(theirs)


def measure(method: str, examples: int, repeat: int) -> dict[str, float]:
    ours, theirs = timed(method, examples, repeat)
    return {
        "ratio": ours / theirs,
        "seconds": ours,
        "bare_seconds": theirs,
        "peak_memory_mb": peak_memory(run_once, framework, method, examples),
        "bare_peak_memory_mb": peak_memory(run_once, bare, method, examples),
    }


def bars(tiny: bool) -> dict[str, Bar]:
    examples, repeat = (64, 1) if tiny else (1000, 3)
    found = {method: timed(method, examples, repeat) for method in METHODS}
    return {f"loop over a bare loop, {method}": Bar(ours / theirs, 1.05) for method, (ours, theirs) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {method: measure(method, options.examples, options.repeat) for method in METHODS}
    if options.json:
        print(json.dumps(result))
        return
    print("one epoch of a second task, the library over a bare loop (fastest of", options.repeat, "for each step)")
    for name in METHODS:
        r = result[name]
        print(
            f"  {name:5} {r['seconds']:.3f} / {r['bare_seconds']:.3f} s = {r['ratio']:.3f}"
            f"   memory {r['peak_memory_mb']} / {r['bare_peak_memory_mb']} MB"
        )


if __name__ == "__main__":
    main()
