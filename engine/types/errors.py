"""Errors for users and operators, and the tree of all errors that are raised on purpose.  Any other error is a bug.

CallboardError
├── ConfigError             the configuration cannot be used            exit code 2
│   └── ListenError         the port is not available                    exit code 98
├── WeightsError            the checkpoint cannot be used               exit code 3
├── PluginError             a plugin is unknown, ambiguous or unfit     exit code 2
├── GraphError              the model cannot be captured or compiled    exit code 4
│   ├── AnotherRankFailed   the capture failed on another rank of the group
│   └── PlansDiffer         the ranks would capture different sizes
├── RequestError            one request is refused or fails; carries an HTTP status and an OpenAI-style code
│   ├── FieldError          one of its fields is wrong
│   └── KeyRevoked          the key of the client that it runs for is no longer valid
├── RecordingError          a file is not a recording that can be replayed     exit code 2
├── EngineDied              an actor crashed; every open request ends with this
├── StepTooLarge            a device has no room for a step; a smaller one is tried
├── StateError              a scheduler's state cannot be written to a recording
├── GrammarFailure          a grammar cannot continue; its request ends
├── WorkerLost              a worker has died or hangs; it is restarted
├── PictureError        a picture cannot be read, or is beyond a limit; its request is refused
├── WrongMark               a replica marks its stream's progress wrongly; another replica continues the stream
├── LinkError, WireError    a socket between processes cannot be used, or received bytes that are not a message
└── NcclError               NCCL has failed; the rank is lost

The errors from StepTooLarge on stay inside the engine.  An error that is not listed is defined next to its raiser.
Owns: these classes.  Does not know: the code that raises them.
"""


class CallboardError(Exception):
    """Base of all deliberate errors; the message is fit for a user to read."""

    exit_code = 1


class ConfigError(CallboardError):
    """A setting is unknown, mistyped, out of range, or contradicts another one."""

    exit_code = 2


class WeightsError(CallboardError):
    """A checkpoint is missing, truncated, misshapen or of an unknown architecture."""

    exit_code = 3


class PluginError(CallboardError):
    """A plugin is unknown, claimed twice, misspelt, or cannot run here."""

    exit_code = 2


class GraphError(CallboardError):
    """The model could not be captured as graphs or compiled; the message says what to lower or turn off."""

    exit_code = 4


class RequestError(CallboardError):
    """One request is refused or failed; other requests are not affected.

    status: HTTP status (4xx for the client's mistakes, 5xx for the server's).
    code: machine-readable reason, e.g. ``context_length_exceeded``.
    param: the request field at fault, if there is one.
    retry_after_s: when set, the client may try again after this many seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class FieldError(RequestError):
    """A field of a request is wrong: the message names it and says why."""

    def __init__(self, field: str, reason: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {reason}", code=code, param=field)


class StepTooLarge(CallboardError):
    """A device had no room for a step of ``num_tokens`` new tokens; a smaller one may fit."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class EngineDied(CallboardError):
    """An actor crashed; the message names the actor and the cause."""
