"""A real browser for tests: Debian's chromium, driven through chromedriver by plain HTTP (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "about:blank",
    ),
)
WAIT_S = 20.0


def missing() -> str:
    """Return the program that is missing, or ""."""
    programs = ("chromium", "chromedriver")
    return next((name for name in programs if shutil.which(name) is None), "")


class Browser:
    """A window of a headless browser, with its console and the addresses that it asked for."""

    def __init__(self, profile: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.session = ""
        self._until(self._is_ready)
        self.session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self.addresses()  # those of the browser itself

    def close(self) -> None:
        try:
            self._call("DELETE", f"/session/{self.session}")
        finally:
            self.driver.terminate()
            self.driver.wait()

    # ---- what a user does ----

    def open(self, address: str) -> None:
        """Go to an address; without a new document (another #...), reload it."""
        self._post(f"/session/{self.session}/url", {"url": "about:blank"})
        self._post(f"/session/{self.session}/url", {"url": address})

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, theme: str) -> None:
        """Prefer a dark or a light theme, as the user's system does."""
        self.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post(f"/session/{self.session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page, and return its result."""
        return self._post(f"/session/{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: object) -> Any:
        """Wait until JavaScript in the page returns something true."""
        return self._until(lambda: self.run(script, *arguments), script)

    def screenshot(self, path: Path) -> None:
        """Save the whole page, also below the window's end."""
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(picture["data"]))

    def console(self) -> list[str]:
        """Return the errors and warnings of the console since the last call."""
        entries = self._post(f"/session/{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def addresses(self) -> list[str]:
        """Return the addresses that were requested since the last call."""
        entries = self._post(f"/session/{self.session}/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    # ---- the protocol ----

    def devtools(self, command: str, parameters: dict[str, object] | None = None) -> Any:
        path = f"/session/{self.session}/goog/cdp/execute"
        return self._post(path, {"cmd": command, "params": parameters or {}})

    def _is_ready(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _post(self, path: str, body: object) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"].splitlines()[0]) from None

    def _until(self, is_so: Callable[[], Any], what: str = "the browser starts") -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := is_so()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {WAIT_S:g} s in vain until {what}")
            time.sleep(0.02)
        return found
