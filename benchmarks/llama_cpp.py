"""llama.cpp's server on a checkpoint's own weights, for comparisons: a GGUF file, and a process that serves it.

The server is a ``llama-server``, or the one in the wheel ``xllamacpp``, which another interpreter may have: this file,
run by that interpreter, serves with it and imports nothing else.

Owns: the file, the process, what it is asked.  Does not know: what is compared.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 120


def find(binary: str, python: str) -> list[str]:
    """The command that serves with llama.cpp; empty if there is none.

    binary: a ``llama-server``, "" for the one on the PATH.  python: an interpreter that may have ``xllamacpp``."""
    if found := shutil.which(binary or "llama-server"):
        return [found]
    looked = subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=False)
    return [python, str(Path(__file__).resolve())] if looked.returncode == 0 else []


def can_write(directory: Path) -> bool:
    """Whether ``write_gguf`` knows the checkpoint's architecture."""
    config = json.loads((directory / "config.json").read_text())
    return config["architectures"] == ["Qwen3ForCausalLM"] and bool(config["tie_word_embeddings"])


def write_gguf(directory: Path, path: Path, kind: str) -> None:
    """A Qwen3 checkpoint with a tied embedding as llama.cpp's own converter writes it.

    kind: of matrices, such as Q8_0; those with rows that blocks do not fit are F16, and the embedding, which is the LM
    head too, has at least 8 bits, as ``llama-quantize`` has it."""
    import gguf
    from gguf.quants import quantize
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    writer = gguf.GGUFWriter(path, "qwen3", use_temp_file=False)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, directory, config["vocab_size"])
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                array = stored.get_tensor(name).float().numpy()
                wanted = "Q8_0" if kind == "Q4_0" and "embed_tokens" in name else kind
                kind_of = gguf.GGMLQuantizationType[wanted if array.ndim == 2 else "F32"]
                if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of][0]:
                    kind_of = gguf.GGMLQuantizationType.F16
                short = names.get_name(name, try_suffixes=(".weight",))
                writer.add_tensor(short, quantize(array, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, directory: Path, vocab_size: int) -> None:
    stored = json.loads((directory / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in stored["added_tokens"]}
    tokens = {index: text for text, index in stored["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"[UNUSED{index}]") for index in range(vocab_size)])
    writer.add_token_types([3 if index in special else 1 if index in tokens else 5 for index in range(vocab_size)])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


class LlamaServer:
    """So many slots of so many tokens each; ready when this returns.

    Raises RuntimeError if it ends before."""

    def __init__(self, command: list[str], path: Path, slots: int, slot_tokens: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        told = ["-m", str(path), "-c", str(slots * slot_tokens), "-np", str(slots)]
        told += ["-t", str(threads), "-tb", str(threads)]
        told += ["--host", "127.0.0.1", "--port", str(port), "--threads-http", "2", "--cache-ram", "0"]
        told += ["--no-kv-unified"]
        self._process = subprocess.Popen(
            [*command, *told], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.pid = self._process.pid
        self._wait()

    def cpu_s(self) -> float:
        """CPU time of the server's process until now."""
        return time.clock_gettime((~self.pid << 3) | 2)  # what clock_getcpuclockid(3) gives

    def complete(self, prompts: list[list[int]], num_new: int, **more: object) -> list[dict[str, Any]]:
        """Greedy, exactly so many tokens after each prompt, of which nothing is kept."""
        asked = {
            "prompt": prompts,
            "n_predict": num_new,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._post("/completion", asked | more)
        return answer if isinstance(answer, list) else [answer]

    def tokens(self, text: str) -> list[int]:
        """Of a text, by the file's tokenizer."""
        return list(self._post("/tokenize", {"content": text})["tokens"])

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _post(self, route: str, body: dict[str, object]) -> Any:
        request = Request(self._url + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.load(answer)

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urlopen(f"{self._url}/health") as answer:
                    if answer.status == 200:
                        return
            except (URLError, ConnectionError):
                time.sleep(0.05)
        self.close()
        raise RuntimeError(f"llama.cpp's server did not come up: {self._process.args}")


def serve(told: list[str]) -> None:
    """What ``llama-server`` does with the same arguments, for as long as the process lives."""
    import xllamacpp

    values = dict(zip(told[::2], told[1::2], strict=False))
    params = xllamacpp.CommonParams()
    params.model.path = values["-m"]
    params.n_ctx, params.n_parallel = int(values["-c"]), int(values["-np"])
    params.kv_unified, params.cache_ram_mib = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(values["-t"])
    params.hostnames, params.port, params.n_threads_http = [values["--host"]], int(values["--port"]), 2
    server = xllamacpp.Server(params)  # kept: it ends with its last reference
    while server.listening_address:
        time.sleep(3600)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(sys.argv[1:])
