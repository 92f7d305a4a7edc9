"""A real browser on a page that a command serves on loopback."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from commands import Commands, free_port, wait_until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 300
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="no chromium (Debian's package has it) or no playwright (the extra dev has it)",
)


@contextmanager
def page_of(commands: Commands, *arguments: str, width: int = 1280, height: int = 720) -> Iterator[Any]:
    """Serve `python ARGUMENTS --host HOST --port PORT` during the block, and yield a page at its root."""
    from playwright import sync_api

    port = free_port()
    server = commands.start(*arguments, "--host", "127.0.0.1", "--port", str(port))

    def answers() -> bool:
        """Return True if the server returns a page. Another process may have used the port shortly before."""
        try:
            with urlopen(f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as answer:
                return bool(answer.read())
        except (OSError, HTTPException):
            return False

    try:
        wait_until(answers, server, timeout_s=TIMEOUT_S)
        with sync_api.sync_playwright() as driver:
            # In a container, Chromium's sandbox does not work for root. The pages are local, so none is needed.
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            try:
                url = f"http://127.0.0.1:{port}"
                page = browser.new_page(viewport={"width": width, "height": height}, base_url=url)
                page.set_default_timeout(TIMEOUT_S * 1000)
                sync_api.expect.set_options(timeout=TIMEOUT_S * 1000)
                yield page
            finally:
                browser.close()
    finally:
        commands.kill(server)
        assert server.stdout and server.stderr
        server.stdout.close()
        server.stderr.close()
        wait_until(lambda: not commands.living(server), timeout_s=60)


def expect(what: Any) -> Any:
    """Return playwright's assertions about a page or a locator."""
    from playwright import sync_api

    return sync_api.expect(what)


def keep(page: Any, name: str) -> None:
    """Save a screenshot for the documentation if DASHBOARD_SCREENSHOTS is set."""
    if os.environ.get("DASHBOARD_SCREENSHOTS"):
        from PIL import Image

        path = IMAGES / f"{name}.png"
        page.wait_for_timeout(2000)  # until the charts have stopped moving
        page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size
        assert path.stat().st_size < 150_000
