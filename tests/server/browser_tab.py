"""The web page in a real browser: how one is found and started, a tab that notes what goes wrong, a server to look at.

Needs a Chromium on this machine; Playwright from PyPI drives it.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np
import pytest

from engine.scheduling.board import CACHED, FIRST_ROW, FREE, SHARED, BoardRow, Pool
from server.local_token import make_token
from tests.server.http_client import RawClient, http_bytes
from tests.server.live_server import MODEL, LiveServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable")
T = TypeVar("T")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)
missing = pytest.mark.skipif(EXECUTABLE is None, reason=f"none of {', '.join(BROWSERS)} is on the PATH")


def needs_browser(test: T) -> T:
    """Marks a test that looks at the page in a browser: slow, and skipped where there is none."""
    return pytest.mark.slow(missing(test))


TOLD = b'{"model": "%s", "prompt": "!hang %s", "ignore_eos": true}'
WORDS = (
    b"What is a page?", b"def fibonacci(n):", b"When does the night train leave?", b"class Platform:",
    b"What is a radix tree?", b"Which platform is mine?", b"It began to rain",
)  # fmt: skip


@contextmanager
def launched() -> Iterator["playwright.Browser"]:
    """A browser without a window."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Tab:
    """A page and everything that went wrong on it."""

    def __init__(
        self, browser: "playwright.Browser", url: str, view: str = "", *, key: str | None = None, **options: object
    ) -> None:
        """key: for the page; None for this user's token, which a keyless server takes."""
        self.context = browser.new_context(**options)
        token = make_token() if key is None else key
        self.context.set_default_timeout(10_000)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        if token:
            self.context.add_init_script(f"sessionStorage.setItem('callboard-key', '{token}')")
        self.page.goto(f"{url}/{view}")

    def __enter__(self) -> "playwright.Page":
        return self.page

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert len(self.hosts) == 1, self.hosts
            # The one error a browser logs by itself is a status that the page asked for and understood.
            unexpected = [error for error in self.errors if "the server responded with a status" not in error]
            assert not unexpected


@contextmanager
def busy_server() -> Iterator[LiveServer]:
    """A server that stands still in the middle of its work: seven requests, a pool, a cache, some past."""
    with ExitStack() as stack:
        live = stack.enter_context(LiveServer())
        for number, words in enumerate(WORDS):
            client = stack.enter_context(RawClient(live.port))
            client.send(http_bytes("POST", "/v1/completions", TOLD % (MODEL.encode(), words)))
            assert live.wait_until(lambda: live.ingress.num_open == number + 1, 5)  # noqa: B023
        live.call(lambda: work(live))
        yield live


def work(live: LiveServer) -> None:
    """As if the seven were under way."""
    monitor = live.monitor
    states = ("decoding", "decoding", "decoding", "decoding", "prefill", "waiting", "retracted")
    monitor.rows = tuple(
        BoardRow(number, state, 96, 64, 80, 3, 40 - 5 * number, 0.01, 0.5 if state == "decoding" else None, 72.4)
        for number, state in enumerate(states, start=1)
    )
    runs = [(4, SHARED, 0), *((6 + row, FIRST_ROW + row, -1) for row in range(5)), (12, CACHED, 1), (34, FREE, -1)]
    monitor.pool = Pool(sum(count for count, _, _ in runs), 1, tuple(runs), 9, ((9, 60), (9, 61)))
    for number in range(60):
        monitor.run(seconds=0.004 + 0.002 * (number % 5), decodes=4, prefill_tokens=300 if number % 16 == 8 else 0)
    for first in (100, 200, 300):
        monitor.cache([*range(64), *(int(token) for token in np.arange(first, first + 48))])
