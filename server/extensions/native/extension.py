"""SGLang's API as a part of the server."""

from server.extensions.native.endpoint import Native
from server.run.extension import Extension


class NativeExtension(Extension):
    """POST /generate."""

    endpoints = (Native,)


EXTENSION = NativeExtension()
