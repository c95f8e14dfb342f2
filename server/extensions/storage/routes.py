"""/v1/files: what clients upload to be worked on, and what the server wrote for them.

Owns: the routes of files, and what is said where nothing is stored.  Does not know: what is in a file.
"""

import uuid

from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.extensions.storage.files import Deleted, FileObject, Files
from server.extensions.storage.pages import Asked, ListPage
from server.extensions.storage.store import PART, Store
from server.extensions.storage.uploads import received, too_large
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply

FILES = "/v1/files"
ONE = FILES + "/{id}"
MAX_FILE_BYTES = 200 << 20
BATCH = ("batch",)
VISION = (*BATCH, "vision", "user_data")  # where the model sees
MAX_LISTED = 10_000
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 2_592_000
UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": VISION},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}
FORM_BYTES = 64 << 10  # that a multipart body may have beside its file


async def refuse_storage(request: web.Request) -> web.StreamResponse:
    """Answer for every file and batch where none is kept.  Raises RequestError: 404."""
    raise RequestError(
        "this server keeps no files and no batches; its operator turns them on with storage.folder, for one model",
        status=404,
        code="storage_off",
    )


def owner_of(request: web.Request) -> str:
    """Returns the owner of what a request stores: its key, or '' where there are no keys."""
    key = request[EXCHANGE].key
    return "" if key is None else key.owner


class FileRoutes:
    """Handles all of them.  purposes: those that a file may be stored for."""

    def __init__(self, store: Store, server: ServerSection, purposes: tuple[str, ...]) -> None:
        self._store = store
        self._purposes = purposes
        self._files = Files(store)
        self._server = server

    @operation("POST", FILES, "client", "Store a file.", answer=FileObject, form=UPLOAD, off=refuse_storage)
    async def create(self, request: web.Request) -> web.Response:
        """Store a file.  Raises RequestError: 400, 403, 408, 413, 415 or 507."""
        refuse_foreign_page(request)  # a form of another site's page could be sent without asking first
        owner, most = owner_of(request), MAX_FILE_BYTES
        announced = request.content_length or 0
        if announced > most + FORM_BYTES:
            raise too_large(most)
        await self._files.check_room(owner, max(announced - FORM_BYTES, 0))
        file_id = f"file-{uuid.uuid4().hex}"
        part = self._store.content(file_id + PART)
        async with received(request, part, self._server, most) as upload:
            if upload.num_bytes is None:
                raise FieldError("file", "required, but not given")
            purpose = upload.fields.get("purpose")
            if purpose not in self._purposes:
                given = "required, but not given" if purpose is None else "not served"
                taken = ", ".join(f"'{one}'" for one in self._purposes)
                raise FieldError("purpose", f"{given}; files are taken for {taken}", code="unsupported_purpose")
            created_at = int(self._store.clock())
            file = FileObject(
                id=file_id,
                bytes=upload.num_bytes,
                created_at=created_at,
                expires_at=self._files.expiry(created_at, _expiry(upload.fields)),
                filename=upload.filename,
                purpose=purpose,
            )
            await self._files.add(owner, file, part)
        return json_reply(file)

    @operation("GET", FILES, "client", "The client's files.", answer=ListPage, off=refuse_storage)
    async def all(self, request: web.Request) -> web.Response:
        """List the client's files.  Raises RequestError: 400."""
        asked = Asked.by(request.query, default=MAX_LISTED, most=MAX_LISTED)
        return json_reply(await self._files.listed(owner_of(request), asked, request.query.get("purpose")))

    @operation("GET", ONE, "client", "What is known of a file.", answer=FileObject, off=refuse_storage)
    async def get(self, request: web.Request) -> web.Response:
        """Return one.  Raises RequestError: 404."""
        return json_reply(await self._files.get(owner_of(request), request.match_info["id"]))

    @operation("GET", ONE + "/content", "client", "What is in a file.", answer=bytes, off=refuse_storage)
    async def content(self, request: web.Request) -> web.StreamResponse:
        """Give what is in one.  Raises RequestError: 404."""
        file = await self._files.get(owner_of(request), request.match_info["id"])
        return web.FileResponse(self._store.content(file.id), headers={"Content-Type": "application/octet-stream"})

    @operation("DELETE", ONE, "client", "Let go of a file.", answer=Deleted, off=refuse_storage)
    async def delete(self, request: web.Request) -> web.Response:
        """Let go of one.  Raises RequestError: 404, 409."""
        file_id = request.match_info["id"]
        await self._files.delete(owner_of(request), file_id)
        return json_reply(Deleted(file_id, "file"))


def _expiry(fields: dict[str, str]) -> int | None:
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]", "created_at")
    if anchor != "created_at":
        raise FieldError("expires_after", "its anchor must be 'created_at'")
    if seconds is None:
        return None
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if not is_number or not LEAST_EXPIRY_S <= int(seconds) <= MOST_EXPIRY_S:
        raise FieldError("expires_after", f"its seconds must be a number from {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}")
    return int(seconds)
