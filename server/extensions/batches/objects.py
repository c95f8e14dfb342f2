"""Bodies of /v1/batches, and the lines of a batch's files.

Owns: field names and JSON types.  Does not know: where the values come from.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from server.openai.requests import Short

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches.  output_expires_after: of what a batch writes it is the server's to say."""

    input_file_id: Short
    endpoint: Short
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: None = None


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """The fault of a line of the input.  line: counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class LineErrors(msgspec.Struct, frozen=True):
    """The first of them."""

    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """The numbers of lines, and of those that have been answered."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch.  Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class InputLine(msgspec.Struct, frozen=True):
    """A line of the input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Short
    body: msgspec.Raw


class InputBody(msgspec.Struct, frozen=True):
    """The fields of a line's body that are read before it runs."""

    stream: Any = None


class LineResponse(msgspec.Struct, frozen=True):
    """The answer to a line, as HTTP would have brought it."""

    status_code: int
    request_id: str
    body: Any


class LineFailure(msgspec.Struct, frozen=True):
    """The reason that a line was not run."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output file, or of the error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineFailure | None = None
