"""Weights that a trainer passes to a server on the same machine: in memory, by a Unix socket, whole or as a delta.

Owns: a trainer's half.  Does not know: the server's model, requests.

Usage::

    state = send_weights("/run/callboard.sock", dict(model.named_parameters()), version="17")
    state = send_delta("/run/callboard.sock", before, after, base=state["digest"], version="18")
"""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.features.weight_updates.deltas import difference
from engine.features.weight_updates.memory import TensorBytes, parts_of, write_tensors
from engine.types.errors import WeightsError

ANSWER_BYTES = 64 << 10


def send_weights(socket_path: str | Path, tensors: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Have a server compute with these tensors in place of those of their names; return its answer.

    socket_path: ``server.weights_socket``.  tensors: of torch or numpy, by their names in the checkpoint.
    fields: of /update_weights, such as version.  Raises WeightsError if the server refuses, and has changed nothing."""
    return _send(socket_path, parts_of(tensors), {}, fields)


def send_delta(
    socket_path: str | Path, old: Mapping[str, Any], new: Mapping[str, Any], *, base: str, **fields: Any
) -> dict[str, Any]:
    """Do so with what differs between two sets of tensors.

    base: ``digest`` of the server's answer to the old ones; the server refuses a delta for others."""
    return _send(socket_path, difference(parts_of(old), parts_of(new)), {"base": base}, fields)


def _send(
    socket_path: str | Path, parts: Mapping[str, TensorBytes], metadata: Mapping[str, str], fields: Mapping[str, Any]
) -> dict[str, Any]:
    memory = write_tensors(parts, metadata)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(socket_path))
            socket.send_fds(connection, [json.dumps(fields).encode() + b"\n"], [memory])
            with connection.makefile("rb") as reply:
                answer: dict[str, Any] = json.loads(reply.readline(ANSWER_BYTES) or b'{"error": "the server has gone"}')
    except OSError as error:
        raise WeightsError(f"{socket_path}: {error.strerror or error}") from None
    finally:
        os.close(memory)
    if refusal := answer.get("error"):
        raise WeightsError(refusal)
    return answer
