"""Compare `bace serve` under load, on the loopback and with one picture per request, with prediction one by one without
a server.

    python benchmarks/serve.py [--clients 32] [--seconds 30] [--backbone digits-vit] [--image_size SIDE] [--json]

Both sides predict the same PNG files with the same saved learner (SLDA, ten digits), each in a separate process with
one thread for torch. They alternate in slices of five seconds, so that other work of the machine affects both.
"""

import argparse
import asyncio
import http.client
import io
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image
from sklearn.datasets import load_digits

LIMIT = 2.0  # requests per second, relative to predictions one by one
SLICE = 5.0  # seconds
PATIENCE = 60.0  # seconds that an answer may take


def make_model(folder: Path, backbone: str, image_size: int | None) -> None:
    import torch

    import bace

    torch.set_num_threads(1)
    digits = load_digits()
    settings: dict[str, Any] = {"image_size": image_size} if image_size else {}
    learner = bace.Learner("slda", backbone={"name": backbone, **settings})
    learner.partial_fit((digits.images[:200] * 255 / 16).astype(np.uint8), digits.target[:200])
    learner.save(folder)


def picture_files() -> list[bytes]:
    files = []
    for image in load_digits().images[:100]:
        file = io.BytesIO()
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return files


# -- one by one: a process that predicts for a given number of seconds


def predict_alone(folder: Path, pipe: Connection) -> None:
    import torch

    import bace

    torch.set_num_threads(1)
    learner, files = bace.Learner.load(folder), picture_files()
    learner.predict([files[0]])
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        times, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            learner.predict_proba([files[len(times) % len(files)]])
            times.append(time.perf_counter() - start)
        pipe.send(times)


# -- the clients: one process that does little but write and read, because it shares two cores with the server


def load(port: int, clients: int, pipe: Connection) -> None:
    requests = [
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n%s"
        % (port, len(file), file)
        for file in picture_files()
    ]

    async def client(number: int, end: float, times: list[float], errors: list[str]) -> None:
        """Requests, one after the other, on one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        with closing(writer):
            while (start := time.perf_counter()) < end:
                writer.write(requests[turn % len(requests)])
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith(b"HTTP/1.1 200") or len(json.loads(body)["predictions"]) != 1:
                    errors.append(f"{head[:50]!r}: {body[:200]!r}")
                times.append(time.perf_counter() - start)
                turn += clients

    async def together(seconds: float) -> tuple[list[float], list[str]]:
        times: list[float] = []
        errors: list[str] = []
        end = time.perf_counter() + seconds
        work = (asyncio.wait_for(client(n, end, times, errors), seconds + PATIENCE) for n in range(clients))
        ended = await asyncio.gather(*work, return_exceptions=True)
        return times, errors + [repr(error) for error in ended if error is not None]

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    while (seconds := pipe.recv()) is not None:
        pipe.send(loop.run_until_complete(together(seconds)))


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Start a server in a separate process and return its port."""
    command = [sys.executable, "-m", "bace", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "served at" in line, line
        yield int(line.partition("127.0.0.1:")[2].partition(";")[0])
    finally:
        process.terminate()
        process.wait()


def measure(folder: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Run slices of both sides in turn, until the clients have had their seconds."""
    context = multiprocessing.get_context("spawn")
    alone_pipe, alone_end = context.Pipe()
    load_pipe, load_end = context.Pipe()
    with served(folder) as port:
        processes = [
            context.Process(target=predict_alone, args=(folder, alone_end), daemon=True),
            context.Process(target=load, args=(port, clients, load_end), daemon=True),
        ]
        for process in processes:
            process.start()
        for end in (alone_end, load_end):
            end.close()  # so that a process that has died is noticed
        alone_pipe.recv()
        load_pipe.send(1.0)  # to warm up
        load_pipe.recv()
        alone: list[float] = []
        times: list[float] = []
        errors: list[str] = []
        rates: list[tuple[float, float]] = []
        spent = 0.0
        while spent < seconds:
            part = min(SLICE, seconds - spent)
            alone_pipe.send(part)
            found = alone_pipe.recv()
            load_pipe.send(part)
            more, wrong = load_pipe.recv()
            alone, times, errors, spent = alone + found, times + more, errors + wrong, spent + part
            rates.append((len(found) / part, len(more) / part))
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/health")
            health = json.loads(connection.getresponse().read())
        for pipe in (alone_pipe, load_pipe):
            pipe.send(None)
        for process in processes:
            process.join()
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": len(times),
        "errors": len(errors),
        "first_errors": errors[:3],
        "requests_per_second": len(times) / seconds,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * float(np.quantile(times, 0.99)),
        "examples_per_batch": health["examples"] / health["batches"],
        "one_by_one_per_second": len(alone) / seconds,
        "one_by_one_p50_ms": 1000 * statistics.median(alone),
        "one_by_one_p99_ms": 1000 * float(np.quantile(alone, 0.99)),
        "ratio": len(times) / len(alone),
        "ratios_of_slices": [round(server / single, 2) for single, server in rates],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--backbone", default="digits-vit")
    parser.add_argument("--image_size", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = multiprocessing.get_context("spawn").Process(
            target=make_model, args=(Path(folder) / "model", options.backbone, options.image_size)
        )
        made.start()
        made.join()
        found = measure(Path(folder) / "model", options.clients, options.seconds)
    passed = found["ratio"] >= LIMIT and not found["errors"]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:22} {value:.2f}" if isinstance(value, float) else f"{name:22} {value}")
        print(f"ratio >= {LIMIT:g} without an error: {'pass' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
