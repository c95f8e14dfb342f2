"""NCCL's C functions through ctypes: those called here, with their types, and errors as exceptions.

NCCL's ABI is stable within a major version: the numbers below are those of nccl.h 2.x.

Owns: finding the library, the signatures, the meaning of result codes.  Does not know: tensors, the order of ranks.
"""

import ctypes
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch

from engine.types.errors import CallboardError

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
IN_PROGRESS = 7  # ncclInProgress: not an error
DATA_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
SUM = 0


class NcclError(CallboardError):
    """A call of NCCL has failed; the message has its name and NCCL's own text."""


class UniqueId(ctypes.Structure):
    """The id that rank 0 makes and every rank needs to join the group; passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_COMM = _STREAM = ctypes.c_void_p
SIGNATURES = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_COMM), _INT, UniqueId, _INT),
    "ncclCommAbort": (_COMM,),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _COMM, _STREAM),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _COMM, _STREAM),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _COMM, _STREAM),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _COMM, _STREAM),
}


class NcclLibrary:
    """The loaded library.  path: of libnccl.so.2.  Raises NcclError if it, or one of its functions, is missing."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = _INT, arguments
            for name in ("ncclGetErrorString", "ncclGetLastError"):
                getattr(self._library, name).restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NcclError(f"NCCL cannot be loaded from {path}: {error}") from None
        self._library.ncclGetErrorString.argtypes = (_INT,)
        self._library.ncclGetLastError.argtypes = (_COMM,)
        self.path = path

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of ``SIGNATURES``.  Raises NcclError unless it returns success."""
        result: int = getattr(self._library, name)(*arguments)
        if result not in (0, IN_PROGRESS):
            what: bytes = self._library.ncclGetErrorString(result)
            why: bytes | None = self._library.ncclGetLastError(None)
            details = why.decode().strip() if why else "no details"
            raise NcclError(f"{name} failed: {what.decode()} ({details}; NCCL_DEBUG=INFO prints more)")

    def version(self) -> str:
        """Return the library's version, for example 2.28.3."""
        number = _INT()
        self.call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def find_library() -> str:
    """Return the path of the NCCL that torch was installed with, or the name of the system's, which may not exist."""
    for distribution in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found = [Path(str(file.locate())) for file in files(distribution) or () if file.name == LIBRARY]
        except PackageNotFoundError:
            continue
        if found:
            return str(found[0])
    return LIBRARY
