"""Take docs/images/streamlit-light.png and -dark.png from the app in a real browser: `make screenshots`.

Needs Chromium and its driver (apt-get install chromium chromium-driver). Takes a minute on a quiet machine.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "How often is the filter of the Willow A3 replaced?",
    "How long does the filter of the Willow A3 last?",
)
PATIENCE_S = 900.0  # for one step: a busy machine needs minutes to load the models and to answer
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,1050",
)


def wait_for(what: str, holds: Callable[[], Any], server: subprocess.Popen[bytes]) -> Any:
    """Print the step and return the result of `holds` once it is true; Streamlit moves elements while it looks."""
    started, last = time.monotonic(), ""
    print(f"waiting for {what} …", end=" ", flush=True)
    while time.monotonic() < started + PATIENCE_S:
        if server.poll() is not None:
            raise SystemExit(
                f"\nthe app ended with exit code {server.returncode}; its output is above"
            )
        try:
            if found := holds():
                print(f"{time.monotonic() - started:.0f} s")
                return found
        except (WebDriverException, IndexError) as error:
            last = f": {type(error).__name__}: {error}"
        time.sleep(0.2)
    raise SystemExit(f"\nnot there after {PATIENCE_S:.0f} s{last}")


@contextmanager
def running_app(folder: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The app over an empty folder, on a free port, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        str(ROOT / "examples" / "streamlit_app.py"),
    ]
    command += ["--server.headless=true", f"--server.port={port}"]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "CACHECRAFT_STORE": folder})
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


@contextmanager
def running_browser() -> Iterator[webdriver.Chrome]:
    """A headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit(
        "type: apt-get install chromium chromium-driver"
    )
    for flag in FLAGS:
        options.add_argument(flag)
    browser = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        yield browser
    finally:
        browser.quit()


def main() -> None:
    """Ask twice about the sample handbook, then take both pictures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app(folder) as (server, address),
        running_browser() as browser,
    ):

        def all_of(selector: str) -> list[Any]:
            return browser.find_elements(By.CSS_SELECTOR, selector)

        def at_rest(bars: int) -> bool:
            """True once the app's script has ended: before, Streamlit may show an answer in two places."""
            return (
                bool(all_of('[data-test-script-state="notRunning"]'))
                and len(all_of(".cc-bar")) == bars
            )

        wait_for("the server", lambda: browser.get(address) or True, server)
        wait_for("the model", lambda: all_of(".st-key-sample button")[0].click() or True, server)
        wait_for("the handbook's index", lambda: all_of('[class*="st-key-try"] button'), server)
        for number, question in enumerate(QUESTIONS, start=1):
            box = '[data-testid="stChatInputTextArea"]'
            wait_for("the question's box", lambda box=box: all_of(box), server)[0].send_keys(
                question, Keys.ENTER
            )
            wait_for(
                f"answer {number}, timed with and without reuse",
                lambda number=number: at_rest(number),
                server,
            )
        address = browser.current_url
        for scheme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.get(address)
            wait_for(f"the {scheme} page", lambda: at_rest(len(QUESTIONS)), server)
            time.sleep(3)
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
            # half the size, and no difference to be seen
            few = picture.quantize(128, dither=Image.Dither.NONE)
            few.save(ROOT / "docs" / "images" / f"streamlit-{scheme}.png", optimize=True)


if __name__ == "__main__":
    main()
