"""A browser without a window, for tests of pages: Chromium, spoken to by its DevTools protocol over pipes."""

import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One window.

    Attributes:
        complaints: of the page that is open: errors, warnings, and whatever it asked the network for.
    """

    def __init__(self, profile: Path) -> None:
        (theirs, self._out), (self._in, ours) = os.pipe(), os.pipe()
        # They speak over 3 and 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "-"]
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*shell, CHROMIUM, *options, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(theirs, ours),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs), os.close(ours)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.complaints: list[str] = []
        pages = (t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=next(pages)["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Shows a page, and waits until its charts are drawn."""
        self.complaints = []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[look])
        self.ask("Page.navigate", url=page.as_uri())
        drawn = "document.readyState == 'complete' && document.querySelector('.chart:not(:has(svg))') == null"
        assert self.until(drawn), f"{page} is not drawn: {self.complaints}"

    def until(self, expression: str) -> object:
        """What JavaScript says as soon as it is true, for half a minute at most."""
        for _ in range(600):
            if value := self.value(expression):
                return value
            time.sleep(0.05)
        return None

    def value(self, expression: str) -> object:
        """Of JavaScript."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out), os.close(self._in)

    def ask(self, method: str, **params: object) -> dict:
        """Sends a command, and takes note of what is said until it is answered."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != number:
            self._note(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.complaints.append(f"it asks for {url}")
