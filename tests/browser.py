"""A headless Chromium for tests, driven over its debugging pipe, so that only the browser itself must be installed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
PATIENCE = 60  # seconds


class Page:
    """One tab. `complaints` collects errors and warnings of the console, and files that the page failed to load."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser, self.unread = to_browser, from_browser, b""
        self.number, self.session = 0, ""
        self.complaints: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its answer."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def read(self) -> dict[str, Any]:
        """The next message; events that arrive before it are recorded."""
        parts = [self.unread]
        while b"\0" not in parts[-1]:
            assert select.select([self.from_browser], [], [], PATIENCE)[0], "the browser does not answer"
            parts.append(os.read(self.from_browser, 1 << 16))
            assert parts[-1], "the browser has gone"
        text, _, self.unread = b"".join(parts).partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        about = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(about["args"]))
        elif message.get("method") == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif message.get("method") == "Page.loadEventFired":
            self.loaded = True
        return message

    def open(self, path: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file or a URL on a screen of this width in the reader's preferred theme; wait until it is drawn."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints, self.loaded = [], False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self.loaded:
            self.read()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key on the keyboard: "Tab", "Enter"."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, height: int | None = None) -> Path:
        """The page from its top as PNG, whole or cut at `height`."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or 16_000, size["height"]), "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


@contextmanager
def browser() -> Iterator[Page]:
    """A fresh Chromium with one tab, which is closed afterwards."""
    assert CHROMIUM is not None
    theirs, ours = os.pipe()
    read, write = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4, whatever these descriptors are in this process.
    high = [fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (theirs, write)]
    os.close(theirs)
    os.close(write)

    def place() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, close_fds=False, preexec_fn=place, stdout=quiet, stderr=quiet)
        for pipe in high:
            os.close(pipe)
        try:
            yield Page(ours, read)
        finally:
            os.close(ours)  # closing the pipe ends the browser
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(read)
