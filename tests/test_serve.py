"""`bace serve` offers a model over HTTP; tests use real sockets, and a real browser if one is installed."""

import asyncio
import base64
import http.client
import io
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from browser import CHROMIUM, Page, browser
from checks import shown_examples, training_examples
from fastapi import Request
from PIL import Image

import bace
from bace.cli.main import main
from bace.errors import DataError
from bace.serving.batching import Batcher, Overloaded
from bace.serving.examples import MOST_LETTERS, READERS, SMALL, Held, Limits, Readers, Refused, read_body
from bace.serving.served import Served, Watched
from bace.serving.server import LOOPBACK, listen, make_app, own_names

pytestmark = pytest.mark.xdist_group("serve")  # all tests share one server for each modality
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
LIMITS = Limits(body=100_000, examples=20, total=150_000)
EVIL = "<img src=x onerror=window.hit=1>"
JSON = {"Content-Type": "application/json"}
PLAIN = {"Content-Type": "text/plain; charset=utf-8"}


def ask(port: int, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET" if body is None else "POST", path, body, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if "json" in answer.headers["Content-Type"] else text.decode()


def inputs(*examples: Any) -> bytes:
    return json.dumps({"inputs": examples}).encode()


def form(*files: bytes, name: str = "x.png") -> tuple[bytes, dict[str, str]]:
    head = f'--edge\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    body = b"".join(head + file + b"\r\n" for file in files) + b"--edge--\r\n"
    return body, {"Content-Type": "multipart/form-data; boundary=edge"}


class Service:
    """A learner that is served at `port`."""

    def __init__(self, learner: bace.Learner, folder: Path) -> None:
        self.learner, self.folder = learner, folder
        learner.save(folder)
        self.watched = Watched(folder, lambda: bace.Learner.load(folder), every=0)
        self.batcher = Batcher(8)
        self.socket = listen("127.0.0.1", 0)
        self.port = int(self.socket.getsockname()[1])
        app = make_app(self.watched, self.batcher, LIMITS, hosts=LOOPBACK)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.port}/"

    def predictions(self, body: bytes, headers: dict[str, str] | None = None, query: str = "") -> list[Any]:
        status, found = ask(self.port, f"/predict{query}", body, headers)
        assert status == 200, found
        return list(found["predictions"])

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


def taught(tiny: Any, modality: str, classes: tuple[int, ...]) -> bace.Learner:
    kept = {k: v for k, v in tiny.settings(modality).items() if not k.startswith("benchmark")}
    learner = bace.Learner("er", **{**kept, "train.epochs": 2})
    x, y = training_examples(tiny, modality, classes)
    return learner.partial_fit(x, [EVIL if label == "bee" else label for label in y])


@contextmanager
def serving(tiny: Any, modality: str, folder: Path) -> Iterator[Service]:
    service = Service(taught(tiny, modality, (0, 1)), folder)
    try:
        yield service
    finally:
        service.close()


@pytest.fixture(scope="module")
def services(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Service]]:
    """A service for each modality, created at its first use."""
    made: dict[str, Service] = {}

    def get(modality: str) -> Service:
        if modality not in made:
            made[modality] = Service(taught(tiny, modality, (0, 1)), tmp_path_factory.mktemp("served") / modality)
        return made[modality]

    yield get
    for service in made.values():
        service.close()


@pytest.fixture(scope="module")
def files(tiny: Any) -> list[bytes]:
    return [path.read_bytes() for path in sorted((tiny.folder / "pictures" / "test").glob("*/*.png"))[:4]]


# -- predictions


def test_pictures_are_taken_as_files_raw_and_in_base64(services: Any, files: list[bytes]) -> None:
    service = services("image")
    expected = service.learner.predict_proba(files)
    names = service.learner.classes_
    body, headers = form(*files)
    as_files = service.predictions(body, headers)
    raw = [service.predictions(file, {"Content-Type": "image/png"})[0] for file in files]
    coded = [base64.b64encode(file).decode() for file in files]
    as_json = service.predictions(inputs(*coded[:2], *(f"data:image/png;base64,{code}" for code in coded[2:])), JSON)
    for found in (as_files, raw, as_json):
        assert [each["class"] for each in found] == [names[c] for c in expected.argmax(1)]
        for each, row in zip(found, expected, strict=True):
            assert each["probability"] == pytest.approx(row.max(), abs=1e-4)
            assert {one["class"]: one["probability"] for one in each["top"]} == pytest.approx(
                dict(zip(names, row.tolist(), strict=True)), abs=1e-4
            )


def test_texts_are_taken_as_json_and_as_lines(services: Any, tiny: Any) -> None:
    service, (texts, _) = services("text"), shown_examples(tiny, "text")
    texts = texts[:4]
    expected = service.learner.predict(texts)
    assert [each["class"] for each in service.predictions(inputs(*texts), JSON)] == expected
    lines = "\n".join([*texts[:2], "", *texts[2:]]).encode()
    assert [each["class"] for each in service.predictions(lines, PLAIN)] == expected
    assert [each["class"] for each in service.predictions(*form(lines, name="lines.txt"))] == expected
    assert [each["class"] for each in service.predictions(b'{"inputs": "w1 w2"}', JSON)] == service.learner.predict(
        ["w1 w2"]
    )


def test_sentences_are_taken_as_strings_words_and_conll(services: Any) -> None:
    service = services("token")
    words = ["w51", "w1", "w5s", "w55", "."]
    [expected] = service.learner.describe([words])
    found = service.predictions(inputs(" ".join(words), words), JSON)
    assert found == [expected, expected] == json.loads(json.dumps([expected, expected]))
    conll = "".join(f"{word} O\n" for word in words).encode()
    assert service.predictions(conll, PLAIN) == [expected]


def test_an_improbable_class_is_unknown_if_asked(services: Any, files: list[bytes]) -> None:
    service = services("image")
    [plain] = service.predictions(files[0])
    above, below = min(1, plain["probability"] + 0.001), plain["probability"] - 0.001
    assert service.predictions(files[0], query=f"?reject={above}")[0]["class"] == "unknown"
    assert service.predictions(files[0], query=f"?reject={below}")[0]["class"] == plain["class"] != "unknown"
    assert len(service.predictions(files[0], query="?top=1")[0]["top"]) == 1


def test_classes_health_and_the_description_are_told(services: Any) -> None:
    service = services("image")
    status, found = ask(service.port, "/classes")
    assert (status, found["classes"], found["modality"]) == (200, service.learner.classes_, "image")
    assert found["limits"] == {"body": LIMITS.body, "examples": LIMITS.examples, "total": LIMITS.total}
    status, found = ask(service.port, "/health")
    assert (status, found["status"], found["classes"], found["waiting"]) == (200, "ok", 2, 0)
    _, found = ask(service.port, "/openapi.json")
    assert set(found["paths"]) == {"/predict", "/classes", "/health"}
    assert {"application/json", "multipart/form-data"} <= set(
        found["paths"]["/predict"]["post"]["requestBody"]["content"]
    )
    assert "413" in found["paths"]["/predict"]["post"]["responses"]


# -- refusals


def png(width: int, height: int) -> bytes:
    """The header of a PNG of this size, with almost no pixel data: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def grey() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(file, "PNG")
    return file.getvalue()


BAD: list[tuple[str, str, bytes, dict[str, str], int, str]] = [
    ("image", "", b"", {}, 422, "cannot be decoded"),
    ("image", "", b"nonsense", {"Content-Type": "image/png"}, 422, "none of JPEG, PNG"),
    ("image", "", grey()[:45], {}, 422, "cannot be decoded"),
    ("image", "", png(9000, 9000), {}, 422, "9000 x 9000 pixels; at most 64,000,000"),
    ("image", "", png(50_000, 50_000), {}, 422, "decompression bomb"),
    ("image", "", png(1, 70_000), {}, 422, "65,535 a side"),
    ("image", "", *form(grey(), b"nonsense", name="cat.png"), 422, "cat.png: the picture cannot"),
    ("image", "", *form(*[grey()] * 21), 400, "files"),
    ("image", "", inputs(*["AAAA"] * 21), JSON, 413, "more than 20 examples"),
    ("image", "", inputs("AAA"), JSON, 422, "example 0 is no picture in base64"),
    ("image", "", inputs("/etc/passwd.png"), JSON, 422, "no picture in base64"),
    ("image", "", inputs(5), JSON, 422, "it is no string"),
    ("image", "", b"x" * 100_001, {}, 413, "more than 100,000 bytes"),
    ("image", "", b"--edge--", {"Content-Type": "multipart/form-data; boundary=edge"}, 400, "no file"),
    ("image", "", b"x", {"Content-Type": "multipart/form-data"}, 400, "boundary"),
    ("image", "", b"x", {"Content-Type": "multipart/form-data; boundary=edge"}, 400, "cannot be read"),
    ("image", "?reject=nan", grey(), {}, 422, "reject: "),
    ("image", "?reject=2", grey(), {}, 422, "reject: "),
    ("image", "?top=0", grey(), {}, 422, "top: "),
    ("text", "", b"", JSON, 400, "not usable JSON"),
    ("text", "", b"\xff", JSON, 400, "not usable JSON"),
    ("text", "", b"[" * 5000, JSON, 400, "not usable JSON"),
    ("text", "", b'{"inputs": ["\\ud800"]}', JSON, 400, "not usable JSON"),
    ("text", "", b'{"inputs": ["a"], "rejects": 1}', JSON, 422, "expected"),
    ("text", "", b'["a"]', JSON, 422, "expected"),
    ("text", "", b'{"inputs": []}', JSON, 422, "no examples"),
    ("text", "", inputs("a", 3), JSON, 422, "Expected a string"),
    ("text", "", inputs("a", None), JSON, 422, "Expected a string"),
    ("text", "", inputs(["a", "b"]), JSON, 422, "takes texts as strings"),
    ("text", "", inputs({"text": "a"}), JSON, 422, "xpected"),
    ("text", "", inputs(" "), JSON, 422, "example 0 is empty"),
    ("text", "", b"\n\n", PLAIN, 422, "no examples"),
    ("text", "", b"a\n" * 21, PLAIN, 413, "more than 20 examples"),
    ("text", "", b"text\na", {"Content-Type": "text/csv"}, 415, "is a table"),
    ("text", "", b"<a/>", {"Content-Type": "application/xml"}, 415, "'application/xml' cannot be read"),
    ("text", "", b'{"inputs": []}', {}, 422, "no examples"),
    ("text", "", b'{"inputs": []}', {"Content-Type": "Application/vnd.api+JSON; x=y"}, 422, "no examples"),
    ("text", "", *form(b"text\na", name="a.csv"), 415, "'a.csv' is a table"),
    ("text", "", *form(grey()), 422, "takes texts"),
    ("token", "", inputs([]), JSON, 422, "empty"),
    ("token", "", inputs([""]), JSON, 422, "empty"),
    ("token", "", inputs(["a", 1]), JSON, 422, "expected a list of words"),
    ("token", "", inputs([["a"]]), JSON, 422, "expected a list of words"),
    ("token", "?reject=0.5", inputs("a"), JSON, 422, "reject is for"),
]


@pytest.mark.parametrize(
    ("modality", "query", "body", "headers", "status", "reason"), BAD, ids=[f"{n}" for n, bad in enumerate(BAD)]
)
def test_bad_input_is_refused_with_a_reason(
    services: Any, modality: str, query: str, body: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    found, answer = ask(services(modality).port, f"/predict{query}", body, headers)
    assert found == status, answer
    assert reason in answer["detail"]
    assert "Traceback" not in answer["detail"]
    assert "object at" not in answer["detail"]


def test_a_text_too_long_is_refused_before_it_is_tokenised(services: Any) -> None:
    model = services("text").watched.model
    with pytest.raises(bace.errors.BaceError, match=f"{MOST_LETTERS + 1:,} letters"):
        bace.serving.examples.words(model, ["a" * (MOST_LETTERS + 1)])


def test_broken_bodies_never_fail_the_server(services: Any, files: list[bytes]) -> None:
    rng = np.random.default_rng(0)
    good = [("image", *form(*files[:2])), ("image", files[0], {}), ("token", inputs("w1 w2", ["w1"]), JSON)]
    for round_ in range(90):
        modality, body, headers = good[round_ % len(good)]
        bad = bytearray(body)
        for place in rng.integers(0, len(bad), 3):
            bad[place] = rng.integers(256)
        if round_ % 2:
            del bad[rng.integers(len(bad)) :]
        status, answer = ask(services(modality).port, "/predict", bytes(bad), headers)
        assert status == 200 or 400 <= status < 500, (status, answer, bytes(bad))
        assert ask(services(modality).port, "/health")[0] == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *((name, 200) for name in ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000")),
        *((name, 400) for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:8000", "")),
    ],
)
def test_a_foreign_name_for_the_loopback_is_refused(services: Any, name: str, status: int) -> None:
    found, answer = ask(services("image").port, "/classes", headers={"Host": name})
    assert found == status, answer
    assert status == 200 or "this server is called 127.0.0.1 or localhost" in answer["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1", "0:0:0:0:0:0:0:1"])
def test_the_loopback_has_its_own_names_in_both_kinds_of_addresses(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with closing(listen(host, 0)) as listening:
        names = own_names(listening.getsockname()[0])
    assert set(names) >= {"127.0.0.1", "localhost", "[::1]"}
    assert own_names("0.0.0.0") == own_names("::") == own_names("192.0.2.1") == ()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_text_is_never_looked_up_as_a_file(services: Any, tmp_path: Path) -> None:
    there, missing = tmp_path / "there.png", tmp_path / "missing.png"
    there.write_bytes(grey())
    for text in (there, missing):
        assert len(services("text").predictions(inputs(str(text)), JSON)) == 1


def test_bytes_of_all_requests_together_are_limited(services: Any) -> None:
    """A request that stops in the middle of its body holds the bytes that have arrived until it ends."""
    service = services("text")

    def wait_for_held(wanted: int) -> None:
        deadline = time.monotonic() + 30
        while (held := ask(service.port, "/health")[1]["held"]) != wanted:
            assert time.monotonic() < deadline, held
            time.sleep(0.02)

    wait_for_held(0)
    body = inputs("w1 " * 30_000)
    with closing(socket.create_connection(("127.0.0.1", service.port))) as slow:
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body[:80_000])
        wait_for_held(80_000)
        status, answer = ask(service.port, "/predict", body, JSON)
        assert (status, "80,000" in answer["detail"], "150,000" in answer["detail"]) == (503, True, True)
        assert len(service.predictions(inputs("w1"), JSON)) == 1  # this request fits
        wait_for_held(80_000)
    wait_for_held(0)
    assert len(service.predictions(body, JSON)) == 1


# -- requests that are predicted together


class Slow:
    """A model that waits for a signal and doubles numbers."""

    def __init__(self) -> None:
        self.passed: list[int] = []
        self.busy, self.go = threading.Event(), threading.Event()

    def predict(self, examples: list[int]) -> list[int]:
        self.busy.set()
        assert self.go.wait(30)
        self.passed.append(len(examples))
        if 13 in examples:
            raise DataError("13")
        return [2 * each for each in examples]


def test_requests_that_wait_at_the_same_time_are_passed_together() -> None:
    model, batcher = Slow(), Batcher(4)
    first = batcher.submit(model.predict, [0])
    assert model.busy.wait(30)
    others = [batcher.submit(model.predict, [n]) for n in range(1, 6)]
    large = batcher.submit(model.predict, list(range(9)))
    model.go.set()
    assert [future.result(30) for future in (first, *others)] == [[2 * n] for n in range(6)]
    assert large.result(30) == [2 * n for n in range(9)]
    assert model.passed == [1, 4, 1, 9]
    batcher.close()
    assert (batcher.requests, batcher.examples, batcher.batches, batcher.waiting) == (7, 15, 4, 0)


def test_a_request_that_fails_does_not_fail_those_it_was_passed_with() -> None:
    model, batcher = Slow(), Batcher(8)
    first = batcher.submit(model.predict, [0])
    assert model.busy.wait(30)
    good, bad, last = (batcher.submit(model.predict, [n]) for n in (1, 13, 2))
    model.go.set()
    assert (first.result(30), good.result(30), last.result(30)) == ([0], [2], [4])
    with pytest.raises(DataError, match="13"):
        bad.result(30)
    batcher.close()
    assert batcher.waiting == 0


def test_examples_of_two_models_are_never_passed_together() -> None:
    old, new, batcher = Slow(), Slow(), Batcher(8)
    futures = [batcher.submit(model.predict, [n]) for n, model in enumerate((old, old, new, new, old))]
    old.go.set()
    new.go.set()
    assert [future.result(30) for future in futures] == [[0], [2], [4], [6], [8]]
    batcher.close()
    assert sum(new.passed) == 2
    assert sum(old.passed) == 3


def test_a_small_request_does_not_wait_while_large_ones_are_read() -> None:
    readers, go_on = Readers(), threading.Event()

    async def both() -> tuple[list[Any], list[list[Any]]]:
        large = [asyncio.ensure_future(readers.read(SMALL + 1, lambda: [go_on.wait(60)])) for _ in range(READERS + 1)]
        small = await asyncio.wait_for(readers.read(SMALL, lambda: ["small"]), 30)
        assert not any(each.done() for each in large)
        go_on.set()
        return small, await asyncio.gather(*large)

    small, large = asyncio.run(both())
    readers.close()
    assert small == ["small"]
    assert large == [[True]] * (READERS + 1)


def test_more_than_may_wait_is_refused() -> None:
    model, batcher = Slow(), Batcher(8, most_waiting=3)
    first = batcher.submit(model.predict, [1, 2, 3])
    with pytest.raises(Overloaded, match="3 examples are waiting"):
        batcher.submit(model.predict, [4])
    model.go.set()
    assert first.result(30) == [2, 4, 6]
    assert batcher.submit(model.predict, [4] * 5).result(30) == [8] * 5  # alone, any number of examples fits
    batcher.close()


def test_a_request_that_nobody_waits_for_any_more_is_left_out() -> None:
    model, batcher = Slow(), Batcher(8)
    first = batcher.submit(model.predict, [0])
    assert model.busy.wait(30)
    gone, last = batcher.submit(model.predict, [1, 1]), batcher.submit(model.predict, [2])
    assert gone.cancel()
    model.go.set()
    assert (first.result(30), last.result(30)) == ([0], [4])
    assert batcher.submit(model.predict, [3]).result(30) == [6]
    batcher.close()
    assert (model.passed, batcher.waiting) == ([1, 1, 1], 0)


# -- another model in the folder


def test_the_model_is_exchanged_while_requests_are_answered(tiny: Any, tmp_path: Path, files: list[bytes]) -> None:
    with serving(tiny, "image", tmp_path / "model") as service:
        done, answers = threading.Event(), []

        def client(_: int) -> None:
            while not done.is_set():
                answers.append(ask(service.port, "/predict", files[0]))

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, n) for n in range(4)]
            service.watched.look()  # nothing has changed
            assert service.watched.model.version == 1
            service.learner.partial_fit(*training_examples(tiny, "image", (2, 3)))
            service.learner.save(service.folder)
            service.watched.look()
            assert (service.watched.model.version, len(service.watched.model.learner.classes_)) == (2, 4)
            shutil.copytree(service.folder, tmp_path / "other")
            shutil.rmtree(service.folder)
            service.watched.look()  # the folder is gone: the model stays, and the problem is reported
            assert "cannot" in service.watched.problem or "holds no" in service.watched.problem
            assert service.watched.model.version == 2
            (tmp_path / "other").rename(service.folder)
            service.watched.look()
            assert (service.watched.problem, service.watched.model.version) == (None, 3)
            count = len(answers)
            while len(answers) < count + 8:
                time.sleep(0.01)
            done.set()
            for each in clients:
                each.result()
        assert {status for status, _ in answers} == {200}
        assert {found["version"] for _, found in answers} >= {1, 3}


def test_a_folder_is_watched_by_itself(tiny: Any, tmp_path: Path) -> None:
    learner = taught(tiny, "text", (0, 1))
    learner.save(tmp_path / "model")
    watched = Watched(tmp_path / "model", lambda: bace.Learner.load(tmp_path / "model"), every=0.02)
    learner.save(tmp_path / "model")
    deadline = time.monotonic() + 30
    while watched.model.version == 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    watched.close()
    assert watched.model.version >= 2


# -- the command


def test_the_command_says_what_is_wrong(
    services: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(services("text").folder)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert main(["serve", folder, "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err
    assert main(["serve", folder, "--batch", "0"]) == 2
    assert "--batch is 0" in capsys.readouterr().err
    assert main(["serve", folder, "--threads", "0"]) == 2
    assert "--threads is 0: it must be at least 1" in capsys.readouterr().err
    assert main(["serve", folder, "--max_total", "8"]) == 2
    assert "--max_total is 8: it must be at least 16 (--max_body)" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "neither a run folder nor" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "bace.serving.server", None)
    assert main(["serve", folder]) == 2
    assert "bace-cil[serve]" in capsys.readouterr().err


def test_the_command_serves_a_run_on_the_loopback_until_it_is_stopped(
    tiny: Any, tmp_path: Path, files: list[bytes]
) -> None:
    bace.run(tiny.settings("image", method="ER", **{"train.epochs": 1}), out=tmp_path / "runs" / "er")
    command = [sys.executable, "-m", "bace", "serve", str(tmp_path / "runs"), "--port", "0"]
    process = subprocess.Popen([*command, "--threads", "2"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "(5 classes) is served at http://127.0.0.1:" in line
        port = int(line.partition("127.0.0.1:")[2].partition(";")[0])
        deadline = time.monotonic() + 60
        while True:  # the socket listens before the server answers
            status, found = ask(port, "/predict", files[0])
            assert time.monotonic() < deadline
            if status == 200:
                break
        assert found["predictions"][0]["class"] == bace.load(tmp_path / "runs" / "er").predict([files[0]])[0]
        _, health = ask(port, "/health")
        assert health["threads"] == 2  # whatever the run was trained with
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


# -- the page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def wait_for(page: Page, script: str) -> Any:
    """The result of the script, as soon as it has one."""
    deadline = time.monotonic() + 30
    while not (found := page.run(script)):
        assert time.monotonic() < deadline, f"{script}: {page.run('document.body.innerText')}"
        time.sleep(0.02)
    return found


def dropped(page: Page, *given: tuple[str, str, bytes]) -> None:
    """Drop files, given by name, type and content, on the page."""
    made = ",".join(
        f"new File([Uint8Array.from(atob('{base64.b64encode(data).decode()}'), c => c.charCodeAt(0))], "
        f"'{name}', {{type: '{kind}'}})"
        for name, kind, data in given
    )
    page.run(
        f"(() => {{ const data = new DataTransfer(); for (const file of [{made}]) data.items.add(file);"
        "document.getElementById('drop').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})) })()"
    )


LINES = "[...document.querySelectorAll('#results > li')].map(line => line.innerText)"
READY = "!document.getElementById('about').textContent.startsWith('Asking')"


@needs_chromium
def test_pictures_dropped_on_the_page_are_predicted(services: Any, page: Page, files: list[bytes]) -> None:
    service = services("image")
    page.open(service.url)
    wait_for(page, READY)
    assert "2 classes (ER, version 1)" in page.run("document.getElementById('about').textContent")
    dropped(page, *((f"{n}.png", "image/png", file) for n, file in enumerate(files)), ("b.png", "image/png", b"x"))
    wait_for(page, f"{LINES}.length === 5 && !{LINES}.some(line => line.includes('…'))")
    lines = page.run(LINES)
    names = service.learner.predict(files)
    for n, name in enumerate(names):
        assert any(f"{n}.png" in line and str(name) in line and "%" in line for line in lines)
    assert any("b.png" in line and "cannot be decoded" in line for line in lines)
    bars = "[...document.querySelectorAll('.share i')].map(bar => bar.offsetWidth / bar.parentElement.offsetWidth)"
    told = "[...document.querySelectorAll('dd.number')].map(number => parseFloat(number.textContent) / 100)"
    assert page.run(bars) == pytest.approx(page.run(told), abs=0.02)  # bars are as long as the probability is high
    page.run("document.getElementById('reject').value = 1")
    page.run("document.getElementById('clear').click()")
    dropped(page, ("0.png", "image/png", files[0]))
    wait_for(page, f"{LINES}.some(line => line.includes('unknown'))")
    page.run("document.getElementById('clear').click()")
    dropped(page, ("large.png", "image/png", files[0] + bytes(LIMITS.body)))
    wait_for(page, f"{LINES}.some(line => line.includes('the server takes 100,000'))")
    assert page.run("window.hit") is None  # no script ran, although a class has the name of a tag
    assert [said for said in page.complaints if "422" not in said] == []


@needs_chromium
def test_texts_are_written_on_the_page_and_dropped_as_files(services: Any, page: Page, tiny: Any) -> None:
    service, (texts, _) = services("text"), shown_examples(tiny, "text")
    page.open(service.url)
    wait_for(page, READY)
    page.run(f"document.getElementById('texts').value = {json.dumps(chr(10).join(texts[:2]))}")
    page.run("document.querySelector('form button').click()")
    wait_for(page, f"{LINES}.length === 2 && !{LINES}.some(line => line.includes('…'))")
    expected = service.learner.predict(texts[:2])
    for line, text, name in zip(page.run(LINES), texts[:2], expected, strict=True):
        assert text in line
        assert name in line
    dropped(page, ("three.txt", "text/plain", "\n".join(texts[:3]).encode()))
    wait_for(page, f"{LINES}.length === 5 && !{LINES}.some(line => line.includes('…'))")
    dropped(page, ("a.csv", "text/csv", b"text\na"))
    wait_for(page, f"{LINES}.some(line => line.includes('is a table'))")
    assert page.run("window.hit") is None
    assert [said for said in page.complaints if "415" not in said] == []


@needs_chromium
def test_entities_of_sentences_are_marked_on_the_page(services: Any, page: Page, tiny: Any) -> None:
    service, (sentences, _) = services("token"), shown_examples(tiny, "token")
    sentence = next(each for each in sentences if service.learner.describe([each])[0]["entities"])
    [expected] = service.learner.describe([" ".join(sentence)])
    page.open(service.url, width=390, dark=True)
    wait_for(page, READY)
    page.run(f"document.getElementById('texts').value = {json.dumps(' '.join(sentence))}")
    page.run("document.querySelector('form button').click()")
    wait_for(page, "document.querySelector('mark') !== null")
    marks = page.run("[...document.querySelectorAll('mark')].map(mark => mark.textContent)")
    assert marks == [entity["text"] + entity["type"] for entity in expected["entities"]]
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.complaints == []


@needs_chromium
def test_the_service_is_described_on_a_page_that_loads_nothing_from_elsewhere(services: Any, page: Page) -> None:
    page.open(services("text").url + "docs")
    wait_for(page, "document.querySelectorAll('h2').length === 3")
    text = page.run("document.body.innerText")
    for word in ("POST /predict", "GET /classes", "GET /health", "curl http://127.0.0.1", "413"):
        assert word in text
    assert page.complaints == []
    status, html = ask(services("text").port, "/")
    assert status == 200
    assert "{{" not in html
    assert "http:" not in html
    assert "https:" not in html


def test_a_served_model_answers_with_the_names_as_they_were_given(tiny: Any) -> None:
    x, _ = training_examples(tiny, "image", (0, 1))
    kept = {k: v for k, v in tiny.settings("image").items() if not k.startswith("benchmark")}
    learner = bace.Learner("slda", **kept).partial_fit(x, [7] * (len(x) // 2) + [8] * (len(x) - len(x) // 2))
    model = Served(learner, 1, "now")
    assert model.answer(np.array([0.25, 0.75]), None, 1)["top"] == [{"class": 8, "probability": 0.75}]


def test_a_body_that_does_not_arrive_is_refused_and_its_bytes_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bace.serving.examples.UPLOAD", 0.05)
    held = Held(100)
    parts = iter([{"type": "http.request", "body": b"half of", "more_body": True}])

    async def receive() -> dict[str, Any]:
        if part := next(parts, None):
            return part
        await asyncio.sleep(60)  # the client sends nothing more
        raise AssertionError

    async def answer() -> None:
        with held.request() as take:
            await read_body(Request({"type": "http", "headers": []}, receive), 50, take)

    with pytest.raises(Refused, match=r"did not arrive within 0\.05 seconds") as refused:
        asyncio.run(answer())
    assert refused.value.status == 408
    assert held.bytes == 0
