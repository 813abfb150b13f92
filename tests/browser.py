"""Drives a headless Chromium by the DevTools protocol over a pair of pipes: no driver, no port, no package.

A page is asked with `value` and acted upon with `click`, `type` and `press`; what it loads and complains of is noted.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = "these tests need Chromium: sudo apt-get install chromium"
PATIENCE_SECONDS = 60

_FIRST_FREE_DESCRIPTOR = 64
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
)


_MIDDLE = """(element) => {
    element.scrollIntoView({block: "center"});
    const box = element.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
}"""


class Browser:
    """One browser with one page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.loaded: list[str] = []  # addresses
        self.complaints: list[str] = []  # errors, warnings of the console, violations of the content policy
        self._to, self._from = to_browser, from_browser
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result; events that come first are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is worth."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait until an expression is true; returns what it then is."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never became true: {expression}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """As a pointer would: in the middle of it, and it must be there to be hit."""
        place = self.value(f"({_MIDDLE})(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def prefer(self, scheme: str) -> None:
        """light or dark"""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        file.write_bytes(base64.b64decode(picture))

    def _receive(self) -> Any:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_SECONDS)
            assert ready, "the browser has fallen silent"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.loaded.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, with nothing remembered; `profile` is a folder it may fill."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, INSTALL
    their_in, our_out = _pipe()
    our_in, their_out = _pipe()
    flags = [*_FLAGS, f"--user-data-dir={profile}"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    # The protocol is spoken on descriptors 3 and 4, which only a shell can hand over under these very numbers.
    command = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", program, *flags]
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(their_in, their_out))
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        os.close(our_out)  # at which it ends
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()
            os.close(our_in)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends lie out of the way of descriptors with a meaning."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_DESCRIPTOR) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
