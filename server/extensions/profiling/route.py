"""POST /start_profile and /stop_profile: traces of what the executors do, for a search for lost time.

Owns: what may be asked.  Does not know: what records, when a file is there.
Files go where the configuration says and nowhere else.  A body need not come; only its ``num_steps`` is read.
"""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from engine.types.notices import Profile
from server.backend import EngineMonitor
from server.extensions.profiling.settings import ProfilingSettings
from server.http.body import BodyReader
from server.http.exchange import refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply

# A file of so many steps has hundreds of megabytes already, and recording keeps them in memory.
MAX_STEPS = 1000


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a profile.  num_steps: after so many the files are written without being asked for."""

    num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None


class ProfileAnswer(msgspec.Struct, frozen=True):
    """The folder where a file for each rank will be.  num_steps: that are recorded at most; 0 if no more are."""

    folder: str
    num_steps: int


class ProfileRoutes:
    """Handles both."""

    def __init__(self, monitor: EngineMonitor, server: ServerSection) -> None:
        self._monitor = monitor
        self._folder = ProfilingSettings.read(server).profile_folder
        self._reader = BodyReader(ProfileBody, lambda body: body.num_steps or MAX_STEPS, server)

    @operation("POST", "/start_profile", "operator", "Record steps for a profiler.", answer=ProfileAnswer)
    async def start(self, request: web.Request) -> web.Response:
        """Record from the next step on; what is being recorded is written first.  Raises RequestError: 400 to 415."""
        refuse_foreign_page(request)
        return self._ask(await self._reader.read(request) if request.can_read_body else MAX_STEPS)

    @operation("POST", "/stop_profile", "operator", "Write what is recorded.", answer=ProfileAnswer)
    async def stop(self, request: web.Request) -> web.Response:
        """Write what has been recorded, if anything is.  The body is not read.  Raises RequestError: 403, 404."""
        refuse_foreign_page(request)
        return self._ask(0)

    def _ask(self, num_steps: int) -> web.Response:
        if not self._folder:
            reason = "no profiles are made here; an operator can set ProfilingSettings.read(server).profile_folder"
            raise RequestError(reason, status=404, code="profiles_off")
        self._monitor.profile(Profile(num_steps=num_steps, folder=self._folder))
        return json_reply(ProfileAnswer(self._folder, num_steps))
