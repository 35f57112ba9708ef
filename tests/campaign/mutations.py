"""Functions that damage bytes, lines and JSON."""

import random
from typing import Any

STRANGE: list[Any] = [None, True, False, 0, -1, 1, 2, 0.5, 1e308, float("nan"), float("inf"), 10**30]
STRANGE += ["", " ", "a", "\ud800", "\0", "../..", "/etc/passwd", "x" * 100_000]
STRANGE += [[], [[]], [None], ["a", 1, None], [0] * 10_000, {}, {"": None}, {"a": {"b": []}}]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Apply one to three changes: flip bits, replace bytes (often near the beginning, where formats keep their
    headers), remove, double, zero or move a piece, make numbers large, cut off the end, or insert or append
    something."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = rng.choice(WAYS)(bytearray(content or b"\0"), rng)
    return content


def flip(content: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[place(content, rng)] ^= 1 << rng.randrange(8)
    return bytes(content)


def replace(content: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 2, 4, 16))):
        content[place(content, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(content)


def enlarge(content: bytearray, rng: random.Random) -> bytes:
    start, width = place(content, rng), rng.choice((2, 4, 8))
    content[start : start + width] = rng.choice(
        (b"\xff" * width, b"\x7f" + b"\xff" * (width - 1), b"\xff" * (width - 1))
    )
    return bytes(content)


def remove(content: bytearray, rng: random.Random) -> bytes:
    start, length = piece(content, rng)
    del content[start : start + length]
    return bytes(content)


def double(content: bytearray, rng: random.Random) -> bytes:
    start, length = piece(content, rng)
    content[start:start] = content[start : start + length] * rng.choice((1, 2, 50))
    return bytes(content)


def zero(content: bytearray, rng: random.Random) -> bytes:
    start, length = piece(content, rng)
    content[start : start + length] = bytes(length)
    return bytes(content)


def cut(content: bytearray, rng: random.Random) -> bytes:
    return bytes(content[: rng.randrange(len(content) + 1)])


def insert(content: bytearray, rng: random.Random) -> bytes:
    start = place(content, rng)
    content[start:start] = rng.choice(
        (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\n", b",", b"\t", b"\\", b"\xe2\x80\xa8")
    )
    return bytes(content)


def lengthen(content: bytearray, rng: random.Random) -> bytes:
    return bytes(content) + rng.randbytes(rng.choice((1, 10, 1000)))


WAYS = (flip, flip, replace, enlarge, remove, double, zero, cut, insert, lengthen)


def place(content: bytearray, rng: random.Random) -> int:
    end = min(len(content), rng.choice((16, 64, 512, len(content))))
    return rng.randrange(max(1, end)) if rng.random() < 0.8 else len(content) - 1 - rng.randrange(min(64, len(content)))


def piece(content: bytearray, rng: random.Random) -> tuple[int, int]:
    return place(content, rng), rng.choice((1, 4, 16, 64, 256))


def strange_json(value: Any, rng: random.Random) -> Any:
    """Return a copy in which something is replaced, removed, added or renamed."""
    value = json_copy(value)
    nodes = [(value, key) for value, key in places(value)]
    for _ in range(rng.choice((1, 1, 2))):
        inside, key = rng.choice(nodes)
        way = rng.choice(("replace", "replace", "replace", "remove", "add", "rename"))
        try:
            if way == "remove":
                del inside[key]
            elif way == "add" and isinstance(inside, dict):
                inside[f"{key}x"] = rng.choice(STRANGE)
            elif way == "rename" and isinstance(inside, dict):
                inside[f" {key}"] = inside.pop(key)
            else:
                inside[key] = rng.choice(STRANGE)
        except (KeyError, IndexError):  # the first change removed it
            pass
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in nested lists and dicts, and of long lists only the ends."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    items = items if isinstance(value, dict) or len(items) < 6 else [*items[:3], *items[-3:]]
    return [(value, key) for key, _ in items] + [found for _, inner in items for found in places(inner)]


def json_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: json_copy(inner) for key, inner in value.items()}
    return [json_copy(inner) for inner in value] if isinstance(value, list) else value
