"""What optional settings of training, and the products of oneDNN, gain on this machine: the seconds of ER's steps over
those with the defaults.

    python benchmarks/settings.py [--encoder NAME] [--repeat N] [--steps N]

The first steps, in which torch.compile compiles, are not counted. `train.tf32` acts on GPUs only.
"""

import argparse
import dataclasses
import os

import torch
from bace_cost import BATCH, ENCODERS, EXAMPLES
from common import second_epoch, second_task, small_vit, step_times

from bace.models.products import prefers_onednn

WARM = 4  # steps
SETTINGS = {
    "defaults": {},
    "train.channels_last=true": {"channels_last": True},
    "train.compile=true": {"compile": True},
    "train.prefetch=2": {"prefetch": 2},
    "train.deterministic=false": {"deterministic": False},
}
ENVIRONMENT = "BACE_ONEDNN=0", "BACE_ONEDNN=1"


def seconds(changes: dict[str, object], shape: dict[str, int], steps: int) -> float:
    """The fastest step. The settings act as in `experiments/assemble.py`."""
    encoder = small_vit(**shape)
    encoder.channels_last = bool(changes.get("channels_last"))
    if changes.get("compile"):
        for block in encoder.blocks:
            block.compile()
    torch.set_deterministic_debug_mode("warn" if changes.get("deterministic", True) else "default")
    method, stream, config = second_task("ER", EXAMPLES, BATCH, encoder)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))
    return min(step_times(second_epoch(method, stream, config), WARM + steps)[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=ENCODERS, default="micro ViT")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    least = dict.fromkeys([*SETTINGS, *ENVIRONMENT], float("inf"))
    for _ in range(options.repeat):
        for name, changes in SETTINGS.items():
            least[name] = min(least[name], seconds(changes, ENCODERS[options.encoder], options.steps))
        for name in ENVIRONMENT:
            variable, _, value = name.partition("=")
            os.environ[variable] = value
            prefers_onednn.cache_clear()
            least[name] = min(least[name], seconds({}, ENCODERS[options.encoder], options.steps))
            del os.environ[variable]
            prefers_onednn.cache_clear()
    for name, time in least.items():
        print(f"{name:30} {1000 * time:7.0f} ms a step, {time / least['defaults']:.3f}")


if __name__ == "__main__":
    main()
