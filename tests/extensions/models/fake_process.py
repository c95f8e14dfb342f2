"""A model's process without an engine.  The path of its model says what it does: die, fail, stay or serve."""

import json
import os
import sys
import time
from typing import Any

import msgspec

from engine.workers.child import begin, end, wait_for_end


class ModelTicket(msgspec.Struct, array_like=True, tag=True):
    """As the real process gets it."""

    config: bytes
    listener: int
    report: int
    parent: int
    logs: Any


def main() -> None:
    ticket = begin(ModelTicket)
    path = json.loads(ticket.config)["model"]["path"]
    if path == "die":
        end(3)
    card = {"name": path, "max_model_len": 8, "vocab_size": 9, "created": 0}
    told = {"failure": f"{path}: no weights"} if path == "fail" else {"card": card}
    os.write(ticket.report, json.dumps(told).encode() + b"\n")
    if path == "fail":
        end(3)
    wait_for_end(sys.stdin.fileno())
    if path == "stay":
        time.sleep(600)
    end(0)


if __name__ == "__main__":
    main()
