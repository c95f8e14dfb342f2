"""Makes README's pictures of the page: a still one and one that moves, of the demo model under its own load.

    pip install pillow playwright        # and a Chromium on the PATH
    python -m tests.server.readme_pictures

Takes two minutes, and writes docs/page.webp and docs/page_live.webp.
"""

import base64
import io
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tests.ports import free_port
from tests.server.browser_tab import Tab, launched, playwright
from tests.server.http_client import ask

ROOT = Path(__file__).parents[2]
WARM_UP_S = 45
FILM_S = 9
LEAST_FRAME_S = 0.12
SIZE = {"width": 1440, "height": 1530}
FILM_SIZE = {"width": 1300, "height": 1330}
FILM_SCALE = 0.62
SETTINGS = ("kv.num_pages=200", "scheduler.max_running=8")


def keep_busy(page: "playwright.Page", seconds: float) -> None:
    """Make load for so long."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        make = page.get_by_role("button", name="Make load")
        if make.count():
            make.click()
        page.wait_for_timeout(250)


def film(page: "playwright.Page") -> tuple[list[Image.Image], list[int]]:
    """Frames, and how many milliseconds each is shown."""
    shots: list[tuple[float, str]] = []
    session = page.context.new_cdp_session(page)

    def take(shot: dict[str, Any]) -> None:
        taken_at = shot["metadata"]["timestamp"]
        if not shots or taken_at >= shots[-1][0] + LEAST_FRAME_S:
            shots.append((taken_at, shot["data"]))
        session.send("Page.screencastFrameAck", {"sessionId": shot["sessionId"]})

    session.on("Page.screencastFrame", take)
    session.send("Page.startScreencast", {"format": "png"})
    keep_busy(page, FILM_S)
    session.send("Page.stopScreencast")
    frames = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for _, data in shots]
    size = round(FILM_SIZE["width"] * FILM_SCALE), round(FILM_SIZE["height"] * FILM_SCALE)
    shown_ms = [round(1000 * (after - before)) for (before, _), (after, _) in itertools.pairwise(shots)]
    return [frame.resize(size, Image.Resampling.LANCZOS) for frame in frames[:-1]], shown_ms


def main() -> None:
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "examples/demo.toml", "--port", str(port)]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with subprocess.Popen([*command, *settings], cwd=ROOT) as server, launched() as browser:
        try:
            while not is_ready(port):
                time.sleep(0.2)
            url = f"http://127.0.0.1:{port}"
            with Tab(browser, url, "#engine", viewport=SIZE, color_scheme="dark", reduced_motion="reduce") as page:
                keep_busy(page, WARM_UP_S)
                while page.locator(".is-decoding").count() < 7 or not page.locator(".is-waiting").count():
                    keep_busy(page, 0.1)
                still = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            still.save(ROOT / "docs" / "page.webp", quality=82, method=6)
            with Tab(browser, url, "#engine", viewport=FILM_SIZE, color_scheme="dark") as page:
                keep_busy(page, 6)
                frames, shown_ms = film(page)
            first, *others = frames
            path = ROOT / "docs" / "page_live.webp"
            first.save(path, save_all=True, append_images=others, duration=shown_ms, loop=0, quality=45, method=4)
        finally:
            server.terminate()
    for path in (ROOT / "docs").glob("*.webp"):
        print(f"\n{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


def is_ready(port: int) -> bool:
    try:
        return ask(port, "GET", "/ready").status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
