"""What it gains that freed memory is kept (models/allocation.py), and that passes without gradient go through the
blocks in small parts (models/encoder.py): passes with and without both, in turn, in processes of their own.

    python benchmarks/allocation.py [--repeat N]
"""

import argparse
import functools
import json
import os
import subprocess
import sys

import torch
from bace_cost import ENCODERS
from common import fastest, small_vit

import bace.models.encoder
from bace.models.allocation import keep_freed_memory

PICTURES = 128
SWITCHES = {"kept": None, "returned": ""}  # GLIBC_TUNABLES: even an empty one counts as settings of the user


def measure() -> dict[str, float]:
    """Milliseconds of each pass."""
    torch.set_num_threads(1)
    found = {}
    for name, shape in ENCODERS.items():
        encoder = small_vit(**shape)
        inputs = {"pixel_values": torch.randn(PICTURES, 3, encoder.image_size, encoder.image_size)}

        def forward(encoder=encoder, inputs=inputs, part=bace.models.encoder.CACHED) -> None:
            bace.models.encoder.CACHED = part
            with torch.inference_mode():
                encoder(inputs, pooled=True)

        def train(encoder=encoder, inputs=inputs) -> None:
            encoder(inputs, pooled=True).sum().backward()

        found[f"{name}, without gradient"] = 1000 * fastest(forward, 15)
        found[f"{name}, without gradient, in one part"] = 1000 * fastest(functools.partial(forward, part=2**40), 15)
        found[f"{name}, forward and backward"] = 1000 * fastest(train, 15)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([keep_freed_memory(), measure()]))
        return
    least: dict[str, dict[str, float]] = {}
    for _ in range(options.repeat):
        for switch, tunables in SWITCHES.items():
            own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
            changes = {} if tunables is None else {"GLIBC_TUNABLES": tunables}
            words = [sys.executable, __file__, "--measure"]
            done = subprocess.run(words, env=own | changes, capture_output=True, text=True, check=True)
            told, found = json.loads(done.stdout)
            assert told == (tunables is None), "this C library cannot be told"
            for name, time in found.items():
                times = least.setdefault(name, {})
                times[switch] = min(times.get(switch, time), time)
    print(f"{PICTURES} pictures, one thread, milliseconds")
    for name, times in least.items():
        kept, returned = times["kept"], times["returned"]
        print(f"  {name:45} kept {kept:7.1f}   returned {returned:7.1f}   {kept / returned:.2f}")


if __name__ == "__main__":
    main()
