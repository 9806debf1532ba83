"""A headless Chromium, driven over the pipe of its DevTools protocol: no package and no port needed."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("chromium-headless-shell", "chromium")
SECONDS = 60  # for one answer, on a machine with other work
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4. Plain sh knows one-digit ones only.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{there_read} 4>&{there_write}', "bash"]
            + [program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(there_read, there_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(there_read)
        os.close(there_write)
        self.output, self.input = here_read, here_write
        self.waiting = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self.session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")

    def close(self) -> None:
        os.close(self.input)
        os.close(self.output)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self.waiting:
            if not select.select([self.output], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self.output, 1 << 20)
            if not piece:
                raise ConnectionError(f"the browser ended, exit status {self.process.wait()}")
            self.waiting += piece
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters or {}} | more
        os.write(self.input, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def page(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.call(method, parameters, sessionId=self.session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.page("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "the script failed"))
        return answer["result"].get("value")

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light", media: str = "") -> None:
        self.page(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.page("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.page("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.settle()

    def settle(self) -> None:
        """Until two frames have been drawn: what a resize or a new colour scheme sets off has happened."""
        frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, {}))))"
        self.evaluate(frame.format(150))

    def errors(self) -> list[str]:
        """What went wrong in the page since it was opened: exceptions, failed promises, console errors, log entries."""
        found = []
        for event in self.events:
            known = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                details = known["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and known["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(value.get("value", value)) for value in known["args"]))
            elif event["method"] == "Log.entryAdded" and known["entry"]["level"] in ("error", "warning"):
                found.append(known["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """All that the page asked for since it was opened, itself included."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self) -> bytes:
        """A PNG of the whole page."""
        size = self.page("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.page("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def picture(self) -> np.ndarray:
        """The whole page as [height, width, 3] of 0 to 1."""
        from matplotlib.image import imread

        return imread(io.BytesIO(self.screenshot()), format="png")[..., :3]
