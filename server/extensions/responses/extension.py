"""The Responses API as a part of the server."""

from server.extensions.responses.endpoint import Responses
from server.run.extension import Extension


class ResponsesExtension(Extension):
    """POST /v1/responses."""

    endpoints = (Responses,)


EXTENSION = ResponsesExtension()
