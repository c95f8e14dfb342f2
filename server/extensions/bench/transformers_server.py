"""A server of transformers' ``generate``: a script for an interpreter that has it, which imports nothing of callboard.

Requests that wait together, and want equally many tokens, become one batch, padded on the left.
Owns: the batches, a stream for each request.  Does not know: what is compared.
"""

import json
import os
import queue
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GATHER_S = 0.005  # for which a batch waits for another request of the same moment


@dataclass
class BatchedRequest:
    """A request: its text, its number of tokens, and the pieces of its answer, with None behind the last one."""

    prompt: str
    num_new: int
    pieces: "queue.Queue[str | None]" = field(init=False)
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.pieces = queue.Queue(self.num_new + 1)


class BatchStreams:
    """The streamer of a batch: ``generate`` calls it with the prompts, and then with the tokens of each step."""

    def __init__(self, batch: list[BatchedRequest], tokenizer: Any) -> None:
        self._batch, self._tokenizer, self._begun = batch, tokenizer, False

    def put(self, tokens_B: Any) -> None:
        if self._begun:
            for asked, token in zip(self._batch, tokens_B.tolist(), strict=True):
                asked.pieces.put(self._tokenizer.decode([token]))
        self._begun = True

    def end(self) -> None:
        for asked in self._batch:
            asked.pieces.put(None)


class GenerateBatches:
    """The model, and the requests that wait for it.  most: at once."""

    def __init__(self, model: str, most: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path, told = Path(model), {}
        if path.suffix == ".gguf":
            path, told = path.parent, {"gguf_file": path.name}
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **told)
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **told).eval()
        self._most, self.waiting = most, queue.Queue[BatchedRequest](most)

    def run(self) -> None:
        """Answer requests for as long as the process lives."""
        held: BatchedRequest | None = None
        while True:
            batch, held = [held or self.waiting.get()], None
            while len(batch) < self._most and held is None:
                try:
                    asked = self.waiting.get(timeout=GATHER_S)
                except queue.Empty:
                    break
                if asked.num_new == batch[0].num_new:
                    batch.append(asked)
                else:
                    held = asked
            self._answer(batch)

    def _answer(self, batch: list[BatchedRequest]) -> None:
        inputs = self._tokenizer([asked.prompt for asked in batch], return_tensors="pt", padding=True)
        for asked, mask_T in zip(batch, inputs["attention_mask"], strict=True):
            asked.prompt_tokens = int(mask_T.sum())
        num_new = batch[0].num_new
        streams = BatchStreams(batch, self._tokenizer)
        length = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        self._model.generate(**inputs, **length, do_sample=False, streamer=streams)


def handler(batches: GenerateBatches) -> type[BaseHTTPRequestHandler]:
    """Return what reads a request and streams its answer, in the thread of its connection."""

    class CompletionHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin("application/json")
            self.wfile.write(json.dumps({"data": [{"id": "transformers"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = BatchedRequest(body["prompt"], body["max_tokens"])
            batches.waiting.put(asked)
            self._begin("text/event-stream")
            while (piece := asked.pieces.get()) is not None:
                self._event(choices=[{"index": 0, "text": piece}])
            used = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": asked.num_new}
            self._event(choices=[{"index": 0, "text": "", "finish_reason": "length"}], usage=used)
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.end_headers()

        def _event(self, **fields: object) -> None:
            self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")

        def log_message(self, *args: object) -> None:
            """Print nothing: a full pipe would stop the server."""

    return CompletionHandler


def serve(model: str, most: int, threads: int, port: int) -> None:
    """Serve ``/v1/completions`` with so many requests of a batch at most, for as long as the process lives."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # read where torch is imported
    batches = GenerateBatches(model, most)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(batches))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    batches.run()


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
