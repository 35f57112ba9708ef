"""The examples of a request are read, limited and checked before they join the examples of other requests."""

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from bace.data.files import TABLE_SUFFIXES
from bace.data.modality import valid
from bace.data.table import as_inputs
from bace.errors import BaceError, DataError
from bace.files import parse_json
from bace.serving.batching import Overloaded
from bace.serving.served import Served

UNTOLD = {"", "application/x-www-form-urlencoded"}  # sent by clients that do not set a type
FILE_TYPES = {*UNTOLD, "text/plain", "application/octet-stream"}  # the body is one file
MOST_LETTERS = 100_000  # of a text or sentence
TABLES = {"text/csv", "text/tab-separated-values", "application/jsonl", "application/vnd.apache.parquet"}


class Refused(BaceError):
    """A request that cannot be answered; `status` is HTTP's number for the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """The most bytes in the body of a request, examples in a request, and bytes (`total`) of all requests together."""

    body: int = 16 * 1024**2
    examples: int = 256
    total: int = 256 * 1024**2


UPLOAD = 60.0  # seconds that a body may take to arrive: what has arrived is held, and others wait for its room


class Held:
    """Counts the bytes of all bodies from their arrival to the answer. Only the thread of the event loop uses it.

    Args:
        most: bytes that may be held; a request that would hold more is refused.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Give a function that counts the bytes of a request, and subtract them all when the request ends."""
        own = 0

        def take(count: int) -> None:
            nonlocal own
            if self.bytes + count > self.most:
                others = f"{self.bytes - own:,} bytes of other requests are held"
                raise Overloaded(f"{others}, and at most {self.most:,} may be: try again in a second")
            own += count
            self.bytes += count

        try:
            yield take
        finally:
            self.bytes -= own


SMALL = 2**16  # bytes of a body that does not wait for larger ones
READERS = 8  # threads for the larger ones


class Readers:
    """The threads that read and decode requests. Small bodies have a thread of their own, so that they do not wait for
    large ones; several threads would wait for each other and read fewer."""

    def __init__(self) -> None:
        self.small, self.large = ThreadPoolExecutor(1, "reader"), ThreadPoolExecutor(READERS, "reader of large bodies")

    async def read(self, size: int, work: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        lane = self.small if size <= SMALL else self.large
        return await asyncio.wrap_future(lane.submit(work, *arguments))

    def close(self) -> None:
        for lane in (self.small, self.large):
            lane.shutdown(wait=False, cancel_futures=True)


async def read_body(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """Read the body, and never hold more of it than allowed; `take` counts its bytes as they arrive."""
    body = bytearray()
    too_large = Refused(413, f"the body has more than {most:,} bytes: send fewer or smaller examples at a time")
    if int(request.headers.get("content-length", "0")[:18]) > most:  # the HTTP parser has checked that it is a number
        raise too_large

    try:
        async with asyncio.timeout(UPLOAD):
            async for part in request.stream():
                take(len(part))
                body.extend(part)
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        said = f"the body did not arrive within {UPLOAD:g} seconds: send fewer or smaller examples at a time"
        raise Refused(408, said) from None
    return bytes(body)


def is_json(headers: Headers, body: bytes) -> bool:
    """Whether the body is JSON, by its type or, if that says nothing (curl's default), by its first letter."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.endswith(("/json", "+json")) or (kind in UNTOLD and body.lstrip()[:1] == b"{")


async def read_files(headers: Headers, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """The name and content of each file: the parts of a form, or the body itself."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":

        async def stream() -> AsyncGenerator[bytes, None]:
            yield body

        try:
            form = await MultiPartParser(headers, stream(), max_files=most, max_fields=most).parse()
        except (MultiPartException, KeyError, ValueError) as error:
            said = "it has no boundary" if isinstance(error, KeyError) else str(error)
            raise Refused(400, f"the form cannot be read ({said})") from error
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        found = [(file.filename or "the file", await file.read()) for file in files]
        await form.close()
        if not found:
            raise Refused(400, "the form has no file: send it as in `curl -F file=@FILE`")
        return found
    if kind in TABLES:
        raise Refused(415, f"a body of type {kind} is a table: send its examples as JSON, or use `bace predict`")
    if kind not in FILE_TYPES and not kind.startswith("image/"):
        known = "application/json, multipart/form-data, text/plain or image/*"
        raise Refused(415, f"a body of type {kind!r:.100} cannot be read: set Content-Type to {known}")
    return [("the body", body)]


def from_json(model: Served, body: bytes, limits: Limits) -> list[Any]:
    """The examples in `{"inputs": [...]}`: texts, sentences (strings or lists of words), or pictures in base64."""
    try:
        found = parse_json(body.decode())
    except ValueError as error:
        raise Refused(400, f"the body is not usable JSON ({error})") from error
    inputs = found.get("inputs") if isinstance(found, dict) else None
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, list) or set(found) != {"inputs"}:
        raise Refused(422, 'expected {"inputs": [...]} with a list of examples, and nothing else')
    check_count(len(inputs), limits)
    if model.modality.picture_input:
        return pictures(model, [(f"example {i}", from_base64(value, i)) for i, value in enumerate(inputs)])
    return words(model, inputs)


def from_base64(value: Any, i: int) -> bytes:
    """The bytes of a picture in base64, with or without the start of a data URL."""
    try:
        if not isinstance(value, str):
            raise ValueError("it is no string")
        head, comma, rest = value.partition(",")
        return base64.b64decode(rest if comma and head.startswith("data:") else value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(422, f"example {i} is no picture in base64: {error}") from error


def from_files(model: Served, files: Sequence[tuple[str, bytes]], limits: Limits) -> list[Any]:
    """The examples in files: one picture per file, or one text or sentence per line (or CoNLL's layout)."""
    if model.modality.picture_input:
        check_count(len(files), limits)
        return pictures(model, files)
    found: list[Any] = []
    for name, content in files:
        if Path(name).suffix.lower() in TABLE_SUFFIXES:
            raise Refused(415, f"{name!r:.100} is a table: send its examples as JSON, or use `bace predict`")
        try:
            lines = content.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            plural = model.modality.plural
            raise Refused(422, f"{name!r:.100} is not text in UTF-8, and this model takes {plural}") from error
        found += [example for _, example in model.modality.from_lines(lines, name)]
        check_count(len(found), limits, empty=True)
    check_count(len(found), limits)
    return words(model, found)


def check_count(count: int, limits: Limits, *, empty: bool = False) -> None:
    if count > limits.examples:
        raise Refused(413, f"more than {limits.examples} examples: send them in several requests")
    if not count and not empty:
        raise Refused(422, "there are no examples: send at least one")


def pictures(model: Served, files: Sequence[tuple[str, bytes]]) -> list[Any]:
    """Pictures in the size that the model learned, decoded one by one so that an error names its picture."""
    found = []
    for name, content in files:
        try:
            _, pixels = as_inputs([content], modality=model.modality.name, image_size=model.learner.picture)
        except DataError as error:
            said = str(error).partition(": ")[2] or str(error)
            raise DataError(f"{name[:100]}: {said}") from error
        found.append(np.ascontiguousarray(np.asarray(pixels)[0].transpose(1, 2, 0)))
    return found


def words(model: Served, examples: list[Any]) -> list[Any]:
    """Check that the model can take these texts or sentences."""
    for i, example in enumerate(examples):
        if isinstance(example, str):
            valid(example, f"example {i}")
            letters = len(example)
            if not example.strip():
                raise Refused(422, f"example {i} is empty")
        else:
            if model.modality.one_label and isinstance(example, list):
                raise Refused(422, f"example {i} is a list, and this model takes {model.modality.plural} as strings")
            _, inputs = as_inputs([example], modality=model.modality.name)  # says what is wrong
            letters = sum(map(len, inputs[0])) if isinstance(inputs, list) else 0
            if not letters:
                raise Refused(422, f"example {i} is empty")
        if letters > MOST_LETTERS:
            raise Refused(413, f"example {i} has {letters:,} letters; at most {MOST_LETTERS:,} are read")
    return examples
