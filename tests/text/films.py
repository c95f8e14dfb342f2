"""MP4 files for tests, written with PyAV."""

import struct
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np


@cache
def written(
    count: int = 6, width: int = 32, height: int = 24, rate: int = 5, codec: str = "libx264", movflags: str = ""
) -> bytes:
    """Return a file whose frames have one colour each, with a line that moves."""
    import av

    file = BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": movflags} if movflags else {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(count):
            colours = np.full((height, width, 3), (40 * number % 256, 9, 200), dtype=np.uint8)
            colours[number % height] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(colours, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def turned(data: bytes) -> bytes:
    """Return a file whose frames are shown a quarter turn clockwise, as a telephone's is."""
    one, none = 1 << 16, 0
    lying = struct.pack(">9i", one, none, none, none, one, none, none, none, 1 << 30)
    upright = struct.pack(">9i", none, one, none, -one, none, none, none, none, 1 << 30)
    at = data.index(b"tkhd")
    assert lying in data[at : at + 92]
    return data[:at] + data[at : at + 92].replace(lying, upright) + data[at + 92 :]
