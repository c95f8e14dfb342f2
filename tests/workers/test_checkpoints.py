"""Checkpoints that cannot be used: code 3, the file and the tensor named, soon, and without the memory to hold them."""

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints.shards import INDEX_FILE, SINGLE_FILE
from tests.figures import Figure
from tests.models.checkpoints import build, save
from tests.workers.forge import Ended, Forge
from tests.workers.server import run_cli

pytestmark = pytest.mark.slow

NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("checkpoint"))


def serve(forge: Forge, directory: Path) -> Ended:
    return forge.run("serve", "--port", "0", "--set", f"model.path={directory}", "--set", "model.tokenizer=none")


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """The tensors of a file, changed."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def edit(change: Callable[[dict[str, dict]], object], header_bytes: int | None = None) -> Callable[[Path], object]:
    """The header of a file, changed; header_bytes: what its length field claims then."""

    def damage(path: Path) -> None:
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        claimed = len(text) if header_bytes is None else header_bytes
        path.write_bytes(struct.pack("<Q", claimed) + text + raw[8 + size :])

    return damage


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def index(weight_map: dict[str, str]) -> Callable[[Path], object]:
    """An index instead of the file; beside it, it would not count."""

    def damage(path: Path) -> None:
        path.unlink()
        (path.parent / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))

    return damage


# What is done to model.safetensors, and what must be said: the file by name, and the tensor where there is one.
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty": (lambda path: path.write_bytes(b""), ["0 bytes, too short"]),
    "cut in the header": (lambda path: os.truncate(path, 100), ["header of"]),
    "cut in the data": (lambda path: os.truncate(path, path.stat().st_size - 5), ["tensor '", "ends at byte"]),
    "header of 2**63 bytes": (edit(lambda header: None, 1 << 63), ["header of 9223372036854775808 bytes"]),
    "header longer than the file": (edit(lambda header: None, 1 << 40), ["header of 1099511627776 bytes"]),
    "header is no JSON": (lambda path: path.write_bytes(struct.pack("<Q", 3) + b"{a}"), ["not valid JSON"]),
    "overlapping offsets": (
        edit(lambda header: header[NORM].update(data_offsets=header[QUERY]["data_offsets"], shape=[4096])),
        ["tensor '", "overlaps"],
    ),
    "negative offsets": (edit(lambda header: header[NORM].update(data_offsets=[-4, 252])), [f"tensor '{NORM}'"]),
    "offsets past the end": (
        edit(lambda header: header[NORM].update(data_offsets=[1 << 62, (1 << 62) + 256])),
        [f"tensor '{NORM}'"],
    ),
    "offsets of no shape": (edit(lambda header: header[NORM].update(shape=[65])), [f"tensor '{NORM}'", "[65]"]),
    "shape of 2**60 elements": (edit(lambda header: header[NORM].update(shape=[1 << 60])), [f"tensor '{NORM}'"]),
    "unknown dtype": (edit(lambda header: header[NORM].update(dtype="F31")), [f"tensor '{NORM}'", "F31"]),
    "wrong dtype": (rewrite(lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int32)})), [NORM, "I32"]),
    "wrong shape": (rewrite(lambda tensors: tensors.update({NORM: torch.ones(63)})), [NORM, "[63]"]),
    "a missing tensor": (rewrite(lambda tensors: tensors.pop(QUERY)), [QUERY, "is missing"]),
    "one tensor too many": (rewrite(lambda tensors: tensors.update(extra=torch.ones(2))), ["'extra'", "no place"]),
    "an empty tensor": (rewrite(lambda tensors: tensors.update({NORM: torch.ones(0)})), [NORM, "[0]"]),
    "NaN": (rewrite(lambda tensors: tensors[NORM].fill_(torch.nan)), [NORM, "NaN"]),
    "one infinity": (rewrite(lambda tensors: tensors[QUERY][3].fill_(torch.inf)), [QUERY, "infinity"]),
    "a directory": (to_directory, ["Is a directory|no weights"]),
    "no file": (lambda path: path.unlink(), ["no weights"]),
    "an index to ../": (index({NORM: "../model.safetensors"}), [NORM, "'../model.safetensors'"]),
    "an index to /etc/passwd": (index({NORM: "/etc/passwd"}), [NORM, "'/etc/passwd'"]),
    "an index to a missing shard": (index({NORM: "other.safetensors"}), ["other.safetensors", "a shard is missing"]),
    "an index that is none": (index([]), [INDEX_FILE]),  # type: ignore[arg-type]
}


@pytest.mark.reliability("P9", "weights: cut, overlapping, misshapen, NaN, header of 2**63, an index to ../, ...")
@pytest.mark.parametrize("case", BROKEN)
def test_it_is_code_three_and_one_line_that_names_file_and_tensor(
    forge: Forge, checkpoint: Path, tmp_path: Path, case: str, figure: Figure
) -> None:
    for entry in checkpoint.iterdir():
        (tmp_path / entry.name).write_bytes(entry.read_bytes())
    damage, said = BROKEN[case]
    damage(tmp_path / SINGLE_FILE)
    ended = serve(forge, tmp_path)
    line = ended.stderr.strip().splitlines()[-1]
    assert ended.code == 3, ended.stderr
    assert line.startswith(f"callboard: {tmp_path}"), ended.stderr
    assert all(any(one in line for one in part.split("|")) for part in said), line
    assert "Traceback" not in ended.stderr
    figure("after the modules are there", ended.took_s, "s", at_most=3, patience=5)


@pytest.mark.reliability("P9", "a large file that is cut at its end, or has a NaN in its last tensor")
@pytest.mark.parametrize("case", ["cut", "NaN"])
def test_memory_stays_below_twice_the_file(
    forge: Forge, checkpoint: Path, tmp_path: Path, case: str, figure: Figure
) -> None:
    """The largest tensor is most of it: 128 MB of embeddings."""
    described = json.loads((checkpoint / "config.json").read_text())
    rows = 1 << 19
    (tmp_path / "config.json").write_text(json.dumps({**described, "vocab_size": rows, "max_position_embeddings": 64}))
    tensors = load_file(checkpoint / SINGLE_FILE)
    for name, tensor in tensors.items():
        if tensor.shape[0] == described["vocab_size"]:
            tensors[name] = torch.full((rows, tensor.shape[1]), 0.01)
    tensors[NORM] = torch.full((64,), torch.nan if case == "NaN" else 1.0)
    path = tmp_path / SINGLE_FILE
    save_file(tensors, path)
    size = path.stat().st_size
    if case == "cut":
        os.truncate(path, size - 5)
    nothing = serve(forge, tmp_path / "nothing")
    ended = serve(forge, tmp_path)
    assert (nothing.code, ended.code) == (3, 3), ended.stderr
    assert path.name in ended.stderr
    figure("resident memory over the file's size", (ended.peak_bytes - nothing.peak_bytes) / size, at_most=2)


@pytest.mark.reliability("P9", "a checkpoint cut short, from the command line")
@pytest.mark.parametrize("executor", ["inline", "process"])
def test_the_whole_command(checkpoint: Path, tmp_path: Path, executor: str, figure: Figure) -> None:
    for entry in checkpoint.iterdir():
        (tmp_path / entry.name).write_bytes(entry.read_bytes())
    os.truncate(tmp_path / SINGLE_FILE, 1000)
    overrides = [f"model.path={tmp_path}", "model.tokenizer=none", f"placement.executor={executor}"]
    began = time.monotonic()
    ended = run_cli("serve", "--port", "0", *(part for one in overrides for part in ("--set", one)), timeout_s=60)
    figure("from the command to its end", time.monotonic() - began, "s", at_most=3, patience=15)
    assert ended.returncode == 3
    assert f"{SINGLE_FILE}: header of" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr
