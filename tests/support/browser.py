"""A headless Chromium, spoken to over its debugging pipe: pages as their readers see them."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


class Page:
    """One tab. What the page logs as an error, or throws, is in `errors`."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in "Page", "Runtime", "Log":
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command, and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the reader's preferred colours."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load a page, up to its last script."""
        self.ask("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while self.run("document.readyState") != "complete" or self.run("location.href") != url:
            assert time.monotonic() < deadline, f"{url} does not load"

    def run(self, expression: str) -> Any:
        """The value of an expression of the page."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, such as `ArrowRight` or `Tab`."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in "keyDown", "keyUp":
            self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    def shoot(self, path: Path) -> None:
        """A picture of the whole page."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._read_fd], [], [], max(0, deadline - time.monotonic())
            )
            assert ready, "Chromium does not answer"
            read = os.read(self._read_fd, 1 << 20)
            assert read, "Chromium has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["params"]["exceptionDetails"])[:500])
        if found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
            self.errors.append(found["params"]["entry"]["text"])
        return found


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A browser with one tab, whose profile is in `directory`."""
    assert CHROMIUM is not None
    ours, theirs = os.pipe(), os.pipe()
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(
            "--no-first-run",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--disable-component-update",
        ),
        *(f"--user-data-dir={directory}", "--remote-debugging-pipe", "about:blank"),
    ]
    shell = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(ours[0], theirs[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Page(ours[1], theirs[0])
    finally:
        os.close(ours[1])  # Chromium ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(10)
        os.close(theirs[0])
