"""POST /debug/recording: the scheduler's messages of the last minutes, as a file for ``callboard replay``.

Owns: what may be asked.  Does not know: what is recorded, how a file is written.
The file goes where the configuration says, under a name that no client chooses.  A body is not read.
"""

from pathlib import Path

import msgspec
from aiohttp import web

from engine.actors.operations import Operate
from engine.features.recording.file import file_name
from engine.types.errors import RequestError
from server.backend import Operations
from server.http.exchange import refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply


class RecordingAnswer(msgspec.Struct, frozen=True):
    """The path of the file."""

    file: str


class RecordingRoute:
    """Handles the route.  folder: of recordings; '' if nothing is recorded."""

    def __init__(self, operations: Operations | None, folder: str) -> None:
        self._operations = operations
        self._folder = folder

    @operation(
        "POST",
        "/debug/recording",
        "operator",
        "Write the scheduler's last messages to a file.",
        answer=RecordingAnswer,
    )
    async def post(self, request: web.Request) -> web.Response:
        """Have the engine write a file, and answer when it is there.  Raises RequestError: 403, 404, 429, 507."""
        refuse_foreign_page(request)
        if not self._folder or self._operations is None:
            reason = "nothing is recorded here; an operator can set storage.folder, and storage.recording_mb above 0"
            raise RequestError(reason, status=404, code="recording_off")
        name = file_name("asked")
        await self._operations.operate(Operate(what="feature", feature="recording", text=name))
        return json_reply(RecordingAnswer(str(Path(self._folder, name))))
