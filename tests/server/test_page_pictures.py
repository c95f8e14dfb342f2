"""The page looks as it did: screenshots at three widths, in both themes, idle and busy, compared roughly.

A picture is kept as the mean colours of a coarse grid, so that fonts and letters may differ and layouts may not.
``python -m tests.server.test_page_pictures`` writes the grids anew after a change that was wanted.
"""

import base64
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.server.browser_tab import Tab, busy_server, launched, needs_browser, playwright
from tests.server.live_server import LiveServer

GRIDS = Path(__file__).with_name("page_pictures.json")
SIZES = {390: 1900, 820: 1500, 1440: 1500}
STATES = ("idle", "busy")
CASES = [f"{state}-{scheme}-{width}" for state, scheme, width in product(STATES, ("light", "dark"), SIZES)]
COLUMNS, ROWS = 12, 20
MOST_DIFFERENCE = 4.0  # of 255, in the mean
DRAW_ANEW = "scrollTo(0, 0); document.dispatchEvent(new Event('visibilitychange'))"
SHRINK = """async ([picture, columns, rows]) => {
  const bytes = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const pen = new OffscreenCanvas(columns, rows).getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, columns, rows);
  return [...pen.getImageData(0, 0, columns, rows).data];
}"""


class Looks:
    """A tab on each server, and an empty one that shrinks pictures."""

    def __init__(self, tabs: dict[str, "playwright.Page"], shrinker: "playwright.Page") -> None:
        self._tabs = tabs
        self._shrinker = shrinker

    def grid(self, case: str) -> npt.NDArray[np.int64]:
        """Mean colours of ``ROWS`` x ``COLUMNS`` fields, in red, green and blue."""
        state, scheme, width = case.split("-")
        page = self._tabs[state]
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": int(width), "height": SIZES[int(width)]})
        with page.expect_response("**/stats"):
            page.evaluate(DRAW_ANEW)
        page.wait_for_timeout(50)
        picture = base64.b64encode(page.screenshot()).decode()
        values = self._shrinker.evaluate(SHRINK, [picture, COLUMNS, ROWS])
        return np.array(values).reshape(ROWS, COLUMNS, 4)[:, :, :3]


def difference(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    return float(np.abs(one - other).mean())


def looks() -> Iterator[Looks]:
    with launched() as browser, LiveServer() as idle, busy_server() as busy:
        servers = {"idle": idle, "busy": busy}
        tabs = {state: Tab(browser, live.url, "#engine") for state, live in servers.items()}
        shrinker = browser.new_page()
        yield Looks({state: tab.page for state, tab in tabs.items()}, shrinker)
        for tab in tabs.values():
            tab.__exit__(None)


looking = pytest.fixture(looks, scope="module", name="looks")


@needs_browser
@pytest.mark.parametrize("case", CASES)
def test_the_page_looks_as_it_did(looks: Looks, case: str) -> None:
    kept = {name: np.array(grid) for name, grid in json.loads(GRIDS.read_text()).items()}
    seen = looks.grid(case)
    assert difference(seen, kept[case]) <= MOST_DIFFERENCE, "python -m tests.server.test_page_pictures, if it is wanted"
    state, scheme, width = case.split("-")
    (other,) = set(STATES) - {state}
    assert difference(seen, kept[f"{other}-{scheme}-{width}"]) > MOST_DIFFERENCE


if __name__ == "__main__":
    for one in looks():
        lines = [f'  "{case}": {json.dumps(one.grid(case).tolist(), separators=(",", ":"))}' for case in CASES]
        GRIDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
