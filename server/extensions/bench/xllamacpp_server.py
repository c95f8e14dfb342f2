"""The server of the wheel ``xllamacpp``: a script for an interpreter that has it, which imports nothing else.

Owns: how its arguments become those of the wheel.  Does not know: what is compared.
"""

import os
import sys
import time
from itertools import pairwise


def serve(told: list[str]) -> None:
    """Serve as ``llama-server`` does with the same arguments, for as long as the process lives."""
    import xllamacpp  # type: ignore[import-not-found]

    values = dict(pairwise(told))  # a switch has another name as its value
    params = xllamacpp.CommonParams()
    params.model.path = values["-m"]
    params.n_ctx, params.n_parallel = int(values["-c"]), int(values["-np"])
    params.kv_unified, params.cache_ram_mib = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(values["-t"])
    params.hostnames, params.port = [values["--host"]], int(values["--port"])
    params.n_threads_http = int(values["--threads-http"])  # each of which holds a stream
    server = xllamacpp.Server(params)  # kept: it ends with its last reference
    while server.listening_address:
        time.sleep(3600)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(sys.argv[1:])
