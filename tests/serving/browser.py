"""A Chromium without a window, driven over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]


class Browser:
    """One tab. `errors` are the messages of its console that are errors, and uncaught exceptions."""

    def __init__(self, profile: Path):
        assert BROWSER
        to_browser, from_browser = os.pipe(), os.pipe()

        def pipes() -> None:  # Chromium reads from 3 and writes to 4
            reading, writing = os.dup(to_browser[0]), os.dup(from_browser[1])
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self.process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._to, self._from = os.fdopen(to_browser[1], "wb", 0), os.fdopen(from_browser[0], "rb", 0)
        self._held, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        pages = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window, and light or dark colours."""
        phone = width < 600
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Save what the tab shows as PNG."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._to.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._from.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = self._from.read(65536)
            assert part, "the browser ended"
            self._held += part
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)
