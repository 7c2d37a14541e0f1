"""Take docs/images/streamlit-light.png, -dark.png and -phone.png from the app in a real browser: `make screenshots`.

With `--all FOLDER` it also takes pictures of every other state of the page, in a window and on a phone: loading, the
welcome, an upload, an answer, the settings. Needs Chromium and its driver (apt-get install chromium chromium-driver).
Takes a minute on a quiet machine.
"""

from __future__ import annotations

import argparse
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
IMAGES = ROOT / "docs" / "images"
WINDOW = {"width": 1280, "height": 1050, "deviceScaleFactor": 1, "mobile": False}
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
UPLOAD = """# Ferry to Arden

## Departures

The ferry to Arden leaves every forty minutes from pier 3, the last time at 22:20.

## Bicycles

A bicycle costs two crowns. There is room for twelve of them on each ferry, below the stairs.
"""
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


class Camera:
    """Takes pictures of the page; those of `docs/images`, and all others into a folder, if there is one."""

    def __init__(self, browser: webdriver.Chrome, folder: Path | None) -> None:
        self._browser = browser
        self._folder = folder

    def screen(self, screen: dict[str, Any]) -> None:
        """Show the page on a screen of this size."""
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def scheme(self, scheme: str) -> None:
        """Show the page in the light or the dark theme, once it is loaded again."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def take(self, file: Path) -> None:
        """Take one picture."""
        time.sleep(3)  # until fades have ended
        picture = Image.open(io.BytesIO(self._browser.get_screenshot_as_png())).convert("RGB")
        # half the size, and no difference to be seen
        picture.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)

    def take_both(self, state: str) -> None:
        """Take a picture of a state of the page in a window and one on a phone, if all states are wanted."""
        if self._folder is None:
            return
        for name, screen in (("phone", PHONE), ("window", WINDOW)):
            self.screen(screen)
            self.take(self._folder / f"{state}-{name}.png")


def main() -> None:
    """Ask twice about the sample handbook, then take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="also take pictures of all other states"
    )
    folder_of_all = parser.parse_args().all
    if folder_of_all is not None:
        folder_of_all.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app(folder) as (server, address),
        running_browser() as browser,
    ):
        camera = Camera(browser, folder_of_all)

        def all_of(selector: str) -> list[Any]:
            return browser.find_elements(By.CSS_SELECTOR, selector)

        def at_rest(bars: int) -> bool:
            """True once the app's script has ended: before, Streamlit may show an answer in two places."""
            return (
                bool(all_of('[data-test-script-state="notRunning"]'))
                and len(all_of(".cc-bar")) == bars
            )

        def checked(answers: int) -> bool:
            """True once the verdict of the audit stands below each answer."""
            return at_rest(answers) and len(all_of(".cc-verdict")) == answers

        camera.screen(WINDOW)
        wait_for("the server", lambda: browser.get(address) or True, server)
        loading = '[data-testid="stSpinner"], .st-key-sample button'
        wait_for("the page", lambda: all_of(loading), server)
        camera.take_both("loading")
        wait_for("the model", lambda: all_of(".st-key-sample button"), server)
        camera.take_both("welcome")
        if folder_of_all is not None:
            page = Path(folder) / "ferry.md"
            page.write_text(UPLOAD, encoding="utf-8")
            all_of('input[type="file"]')[0].send_keys(str(page))
            wait_for("the upload", lambda: all_of('[class*="st-key-try"] button'), server)
            camera.take_both("upload")
            wait_for(
                "the box",
                lambda: all_of('[class*="st-key-documents"] summary')[0].click() or True,
                server,
            )
        wait_for("the button", lambda: all_of(".st-key-sample button")[0].click() or True, server)
        wait_for(
            "the handbook's index",
            lambda: at_rest(0) and not all_of(".st-key-sample button"),
            server,
        )
        for number, question in enumerate(QUESTIONS, start=1):
            box = '[data-testid="stChatInputTextArea"]'
            wait_for("the question's box", lambda box=box: all_of(box), server)[0].send_keys(
                question, Keys.ENTER
            )
            wait_for(
                f"answer {number}, timed with and without reuse, and its audit",
                lambda number=number: checked(number),
                server,
            )
        camera.take_both("answers")
        if folder_of_all is not None:
            camera.screen(WINDOW)
            wait_for(
                "the settings",
                lambda: all_of('[data-testid="stSidebar"] summary')[0].click() or True,
                server,
            )
            camera.take(folder_of_all / "settings-window.png")
        address = browser.current_url
        for name, scheme, screen in (
            ("light", "light", WINDOW),
            ("dark", "dark", WINDOW),
            ("phone", "light", PHONE),
        ):
            camera.scheme(scheme)
            camera.screen(screen)
            browser.get(address)
            wait_for(f"the {name} page", lambda: checked(len(QUESTIONS)), server)
            camera.take(IMAGES / f"streamlit-{name}.png")


if __name__ == "__main__":
    main()
