"""The conformance kit for encoders of pictures: one call checks an encoder, and lists every case that fails.

    from engine.plugins.encoder.kit import check_encoder
    check_encoder(lambda: MyEncoder(directory, config))

Owns: random pictures.  Does not know: families, what rows mean.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import product

import numpy as np

from engine.plugins.encoder.encoder import Encoder, Tower
from engine.plugins.proof.findings import Findings
from engine.text.picture_files import ORIENTATION

SIZES = ((64, 64), (37, 91), (230, 40))
TO_THE_RIGHT = 6  # an orientation, as EXIF numbers them
DETAILS = ("auto", "low", "high")


def check_encoder(make: Callable[[], Encoder], dtype: str = "float32") -> None:
    """Lay out and encode a few pictures on the CPU.  Raises ConformanceError with all that fails.

    make: builds the encoder of a checkpoint, as the plugin's hook does.  dtype: of its rows."""
    findings = Findings("encoder")
    with findings.case("it is an encoder"):
        assert isinstance(make(), Encoder), f"{make()!r} lacks a part of Encoder"
    with findings.case("a layout has its token at each place"):
        _lays_out(make())
    with findings.case("two encoders of one checkpoint have the same settings"):
        assert make().settings == make().settings, "they differ"
    with findings.case("rows are those of the layout"):
        _encodes(make(), make().tower("cpu", dtype), [_picture(*size) for size in SIZES], dtype)
    with findings.case("a picture whose camera was turned has the rows of the upright one"):
        _turns(make(), make().tower("cpu", dtype))
    findings.conclude()


def _picture(width: int, height: int, orientation: int = 1, *, upright: bool = False) -> bytes:
    """Return a file.  upright: with its pixels turned as the orientation says, which it has no more."""
    from PIL import Image, ImageOps  # an optional package

    file, exif = BytesIO(), Image.Exif()
    exif[ORIENTATION] = orientation
    colours = np.random.default_rng((width, height)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(colours).save(file, "PNG", exif=exif)
    if upright:
        picture, file = ImageOps.exif_transpose(Image.open(file)), BytesIO()
        picture.save(file, "PNG")
    return file.getvalue()


def _refuses(read: Callable[[bytes], object]) -> None:
    from engine.types.errors import RequestError

    try:
        read(b"no picture")
    except RequestError:
        return
    raise AssertionError("it raises no RequestError")


def _lays_out(encoder: Encoder) -> None:
    for size, detail in product(SIZES, DETAILS):
        layout = encoder.layout(*size, detail)
        assert layout.num_rows > 0, f"a picture of {size} pixels has no place"
        count = layout.text.count(encoder.token)
        assert count == layout.num_rows, f"the text has the token {count} times, for {layout.num_rows} rows"
        if encoder.axes is not None:
            assert np.prod(layout.grid) == layout.num_rows, f"the grid {layout.grid} has not {layout.num_rows} places"


def _turns(encoder: Encoder, tower: Tower) -> None:
    width, height = SIZES[1]
    way = encoder.layout(height, width, "auto").way
    rows, upright = (tower.encode(_picture(width, height, TO_THE_RIGHT, upright=one), way) for one in (False, True))
    assert rows.shape == upright.shape, f"rows of shape {tuple(rows.shape)}, not {tuple(upright.shape)}"
    assert bool((rows == upright).all()), "it has others"


def _encodes(encoder: Encoder, tower: Tower, files: Sequence[bytes], dtype: str) -> None:
    assert tower.nbytes > 0, "it says that it takes no memory"
    layouts = [encoder.layout(*size, detail) for size, detail in product(SIZES, DETAILS)]
    given = [(data, one.way) for data, one in zip((data for data in files for _ in DETAILS), layouts, strict=True)]
    first = [tower.encode(*one) for one in given]
    again = [tower.encode(*one) for one in reversed(given)][::-1]
    for layout, rows_LND, same_LND in zip(layouts, first, again, strict=True):
        expected = (1 + encoder.num_deep, layout.num_rows)
        assert tuple(rows_LND.shape[:2]) == expected, f"rows of shape {tuple(rows_LND.shape)}, not {expected}"
        assert str(rows_LND.dtype) == f"torch.{dtype}", f"rows are {rows_LND.dtype}, not {dtype}"
        assert bool((rows_LND == same_LND).all()), "other bits after other pictures"
    assert not bool((first[0][0, 0] == first[-1][0, 0]).all()), "two pictures have the same first row"
    _refuses(lambda data: tower.encode(data, ""))
