"""The number of files that a default request runs through, from its socket to the device and back."""

import threading
from pathlib import Path
from types import FrameType
from typing import Any

from engine.config import Config, build_config
from tests.server.http_client import ask
from tests.server.live_system import MODEL, LiveSystem

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo_model"
MOST_FILES = 64
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Write a function that adds."}],
    "max_tokens": 8,
    "ignore_eos": True,
    "stream": True,
}


class CalledFiles:
    """A profiler that notes the files of ``engine`` and ``server`` whose functions are called while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._called: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            self._called.add(frame.f_code.co_filename)

    def ours(self) -> list[str]:
        folders = (ROOT / "engine", ROOT / "server")
        paths = [Path(name) for name in self._called]
        return sorted(str(path.relative_to(ROOT)) for path in paths if set(folders) & set(path.parents))


def test_a_default_request_passes_at_most_so_many_files() -> None:
    files = CalledFiles()
    # With several threads, a file more tries what each number of them costs.
    settings = {"model": {"path": str(DEMO), "name": MODEL}, "kv": {"num_pages": 256}, "device": {"threads": 1}}
    config = build_config(Config(), settings)
    threading.setprofile(files)  # for the threads that are started from here on
    try:
        with LiveSystem(config) as live:
            assert ask(live.port, "POST", "/v1/chat/completions", CHAT).status == 200
            files.on = True
            reply = ask(live.port, "POST", "/v1/chat/completions", CHAT)
            files.on = False
    finally:
        threading.setprofile(None)
    assert reply.status == 200
    assert b"data: [DONE]" in reply.body
    called = files.ours()
    assert {"server/http/sse.py", "engine/scheduling/planner.py", "engine/models/decoder.py"} <= set(called)
    assert len(called) <= MOST_FILES, f"{len(called)} files:\n" + "\n".join(called)
