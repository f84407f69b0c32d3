"""TensorBoard, and a headless Chromium that looks at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

TIMEOUT_S = 60.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_NODES = """
function* nodes(root) {
  const children = [...(root.shadowRoot ? root.shadowRoot.childNodes : []), ...root.childNodes];
  for (const node of children) { yield node; yield* nodes(node); }
}
const inside = name => [...nodes(document)].filter(node => node.localName === name);
"""
_TEXT = """
const visible = parent => parent.checkVisibility ? parent.checkVisibility() : true;
return inside(arguments[0]).flatMap(root => [...nodes(root)]).filter(
  node => node.nodeType === 3 && node.data.trim()
    && !["STYLE", "SCRIPT"].includes(node.parentNode.nodeName) && visible(node.parentNode)
).map(node => node.data.trim());
"""


def missing() -> str | None:
    """What there is to install before any of this can work; None if nothing is."""
    if not any(map(shutil.which, BROWSERS)):
        return "needs Debian's package chromium"
    return None if shutil.which("chromedriver") else "needs Debian's package chromium-driver"


def wait_for(
    what: str, found: Callable[[], Any], *, timeout_s: float = TIMEOUT_S, poll_s: float = 0.05
) -> Any:
    """What `found` gives, as soon as that is true; raises TimeoutError."""
    until = time.monotonic() + timeout_s
    while not (result := found()):
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} after {timeout_s:.0f} s")
        time.sleep(poll_s)
    return result


class Server:
    """A TensorBoard on a port of its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str) -> Any:
        """What the server answers, from JSON."""
        with urllib.request.urlopen(self.address + path, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def wait_for_tag(self, tag: str, runs: int) -> None:
        """Until that many runs have the scalar `tag`: TensorBoard answers before it has read
        everything.
        """
        wait_for(f"{tag} of {runs} runs", lambda: self._having(tag) >= runs)

    def _having(self, tag: str) -> int:
        return sum(tag in tags for tags in self.get("data/plugin/scalars/tags").values())


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Server]:
    """TensorBoard on `folder`, of which its pages show the name alone."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        folder.name,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        command, cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"http://\S+", line):
                break
        else:
            raise RuntimeError(f"tensorboard ended: {''.join(said)}")
        yield Server(match[0])
    finally:
        process.kill()
        process.communicate()


class Browser:
    """A page, and what can be seen on it; TensorBoard's own elements hide theirs from ordinary
    queries.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Load the page afresh, even if only what follows the # differs."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def texts(self, element: str = "body") -> list[str]:
        """Every piece of text to be seen in elements of that name."""
        found: list[str] = self.driver.execute_script(_NODES + _TEXT, element)
        return found

    def count(self, element: str, condition: str = "true") -> int:
        """How many elements of that name there are of which the JavaScript `condition` on `node` is
        true.
        """
        script = f"{_NODES} return inside(arguments[0]).filter(node => {condition}).length"
        number: int = self.driver.execute_script(script, element)
        return number

    def click(self, element: str, condition: str) -> None:
        """Click each element of that name of which the JavaScript `condition` on `node` is true."""
        script = (
            f"{_NODES} inside(arguments[0]).filter(node => {condition}).forEach(node =>"
            " node.click())"
        )
        self.driver.execute_script(script, element)

    def wait_for_texts(self, *expected: str, inside: str = "body") -> list[str]:
        """The texts in elements of that name, once they hold all that is expected."""
        texts: list[str] = []

        def all_there() -> bool:
            texts[:] = self.texts(inside)
            return set(expected) <= set(texts)

        try:
            wait_for("texts", all_there)
        except TimeoutError:
            raise TimeoutError(
                f"no {sorted(set(expected) - set(texts))} in {inside}, which shows {texts}"
            ) from None
        return texts


@contextlib.contextmanager
def chromium(width: int, height: int) -> Iterator[Browser]:
    """A headless Chromium whose page is of that size [pixels]."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    flags = ["--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]
    for flag in [*flags, *(["--no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.set_page_load_timeout(TIMEOUT_S)
        driver.set_script_timeout(TIMEOUT_S)
        yield Browser(driver)
    finally:
        driver.quit()
