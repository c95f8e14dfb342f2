"""Makes the documentation's pictures of the page: a still one and one that moves, of the demo model under its own load,
and one of the playground with a picture in the next message.

    pip install pillow playwright        # and a Chromium on the PATH
    python -m tests.server.readme_pictures [playground]

Takes two minutes, and writes docs/page.webp, docs/page_live.webp and docs/page_picture.webp; with ``playground`` the
last one alone.
"""

import base64
import io
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.extensions.images.pictures import seeing
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
PLAYGROUND_SIZE = {"width": 1100, "height": 760}
DROP = """(picture) => {
  const bytes = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
  const file = new File([bytes], "clock.png", { type: "image/png" });
  const dropped = new DataTransfer();
  dropped.items.add(file);
  document.querySelector("#prompt").form.dispatchEvent(
    new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: dropped }));
}"""
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


def clock() -> bytes:
    """A picture of a station's clock."""
    image, file = Image.new("RGB", (240, 180), (72, 104, 140)), io.BytesIO()
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 150, 240, 180), fill=(90, 84, 78))
    pen.ellipse((60, 15, 180, 135), fill=(250, 250, 246), outline=(30, 30, 30), width=6)
    for end in ((120, 38), (150, 90)):
        pen.line(((120, 75), end), fill=(30, 30, 30), width=6)
    pen.ellipse((114, 69, 126, 81), fill=(190, 40, 40))
    image.save(file, "PNG")
    return file.getvalue()


def picture_playground(browser: "playwright.Browser") -> None:
    """Write the playground with a picture that was dropped, of a server whose model sees."""
    options = {"viewport": PLAYGROUND_SIZE, "color_scheme": "dark", "reduced_motion": "reduce"}
    with seeing() as live, Tab(browser, f"http://127.0.0.1:{live.port}", **options) as page:
        page.fill("#prompt", "What time is it at this station?")
        page.evaluate(DROP, base64.b64encode(clock()).decode())
        page.wait_for_selector("img.thumbnail")
        still = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    still.save(ROOT / "docs" / "page_picture.webp", quality=82, method=6)


def main() -> None:
    with launched() as browser:
        picture_playground(browser)
    if "playground" not in sys.argv[1:]:
        picture_engine()


def picture_engine() -> None:
    """Write the pictures of the demo model under load."""
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
