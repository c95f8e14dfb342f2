"""GET / and /page/...: the web page, which is a handful of files that need nothing else.

Owns: which files there are, and what a browser may do with them.  Does not know: what the page shows; it asks the API
like any other client, with the key that its user gives it.  So the files themselves are open: they hold nothing.
"""

import hashlib
from pathlib import Path

from aiohttp import hdrs, web

from server.http.operation import operation

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    # Its own files and its own API, nothing else: no inline code, no other host, in no other page's frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    hdrs.CACHE_CONTROL: "no-cache",
}


class Site:
    """The files, read once: a name from a request is looked up here and never becomes a path."""

    def __init__(self) -> None:
        self._files = {file.name: (file.read_bytes(), TYPES[file.suffix]) for file in sorted(FOLDER.iterdir())}
        self._tags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, (data, _) in self._files.items()}

    @operation("GET", "/", "open")
    async def index(self, request: web.Request) -> web.Response:
        return self._give(request, "index.html")

    @operation("GET", "/page/{name}", "open")
    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._give(request, name)

    def _give(self, request: web.Request, name: str) -> web.Response:
        headers = {**HEADERS, hdrs.ETAG: self._tags[name]}
        if request.headers.get(hdrs.IF_NONE_MATCH) == self._tags[name]:
            return web.Response(status=304, headers=headers)
        data, content_type = self._files[name]
        return web.Response(body=data, content_type=content_type, charset="utf-8", headers=headers)
