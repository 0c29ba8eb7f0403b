"""A headless Chromium, driven over its own protocol (DevTools) through two pipes: no port, no other package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
SWITCHES = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
PATIENCE = 60  # seconds


class Tab:
    """One page of a browser. `requests`: the addresses that the page has requested."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._rest, self._number = reads, writes, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._writes, json.dumps(asked).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def show(self, address: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a page in a viewport of this size, and return when it is loaded."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.prefer(dark)
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def prefer(self, dark: bool) -> None:
        """Change the colour scheme that the reader prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page's scripts, and what its policy has blocked."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in methods]

    @property
    def requests(self) -> list[str]:
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return as soon as a script's expression is true, at the latest after `PATIENCE`, and then fail."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never so: {condition}"
            self.evaluate("new Promise((done) => requestAnimationFrame(() => done()))")

    def mouse(self, action: str, x: float, y: float) -> None:
        """Move or press the mouse (mouseMoved, mousePressed, mouseReleased)."""
        pressed = {"button": "left", "clickCount": 1} if action != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=action, x=x, y=y, **pressed)

    def screenshot(self, path: Path) -> None:
        """Return a screenshot of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))[0]
            data = os.read(self._reads, 2**20) if ready else b""
            assert data, "Chromium does not answer"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a fresh profile, and end it on exit from the block."""
    assert CHROMIUM
    (asked_out, asked_in), (told_out, told_in) = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    script = f'exec "$@" 3<&{asked_out} 4>&{told_in}'
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command], pass_fds=(asked_out, told_in),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(asked_out)
    os.close(told_in)
    try:
        yield Tab(told_out, asked_in)
    finally:
        os.close(asked_in)  # Chromium exits when this pipe closes
        os.close(told_out)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
