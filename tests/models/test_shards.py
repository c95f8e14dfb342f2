"""Damaged safetensors files are refused with the file and the tensor named, before a weight is read."""

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoints.shards import INDEX_FILE, SINGLE_FILE, read_header, read_shards
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import onednn_linears
from engine.plugins.testing.steps import Driver
from engine.types.errors import WeightsError
from tests.models.checkpoints import build, save
from tests.models.conftest import Cases, load


def write(path: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> None:
    """A safetensors file with whatever header; header_bytes: what its length field claims."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_header_of_a_good_file(tmp_path: Path):
    path = tmp_path / SINGLE_FILE
    save_file(
        {"a": torch.zeros(2, 3), "b": torch.zeros(0), "c": torch.zeros((), dtype=torch.bfloat16)},
        path,
        {"format": "pt"},
    )
    tensors = read_header(path)
    assert {name: (one.dtype, one.shape, one.num_bytes) for name, one in tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F32", (0,), 0),
        "c": ("BF16", (), 2),
    }


BROKEN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, too short"),
    "seven bytes": (lambda path: path.write_bytes(b"\0" * 7), "7 bytes, too short"),
    "header past the end": (lambda path: write(path, {}, header_bytes=3), "header of 3 bytes in a file of 10"),
    "header of 2**63": (lambda path: write(path, {}, header_bytes=1 << 63), "header of 9223372036854775808 bytes"),
    "not JSON": (lambda path: write(path, b"{nonsense"), "header is not valid JSON"),
    "not UTF-8": (lambda path: write(path, b"\xff\xff"), "header is not valid JSON"),
    "too deep": (lambda path: write(path, b"[" * 99_999), "header is not valid JSON"),
    "a list": (lambda path: write(path, []), "header is list, expected a JSON object"),
    "named twice": (lambda path: write(path, b'{"a": 1, "a": 2}'), "'a' appears twice"),
    "entry is no object": (lambda path: write(path, {"a": 1}), "tensor 'a': header entry is not an object"),
    "unknown dtype": (lambda path: write(path, {"a": entry(0, 8, dtype="F31")}, b"\0" * 8), "tensor 'a': dtype 'F31'"),
    "dtype is a list": (
        lambda path: write(path, {"a": {**entry(0, 8), "dtype": []}}, b"\0" * 8),
        "tensor 'a': dtype []",
    ),
    "negative size": (lambda path: write(path, {"a": entry(0, 8, [-2])}, b"\0" * 8), "tensor 'a': shape [-2]"),
    "shape is text": (
        lambda path: write(path, {"a": {**entry(0, 8), "shape": "2"}}, b"\0" * 8),
        "tensor 'a': shape '2'",
    ),
    "no offsets": (lambda path: write(path, {"a": {"dtype": "F32", "shape": [2]}}), "tensor 'a': data_offsets None"),
    "offsets reversed": (
        lambda path: write(path, {"a": entry(8, 0, [2])}, b"\0" * 8),
        "tensor 'a': data_offsets [8, 0]",
    ),
    "size is not shape": (
        lambda path: write(path, {"a": entry(0, 8, [3])}, b"\0" * 8),
        "'a': holds 8 bytes, but F32 of shape [3]",
    ),
    "overlap": (
        lambda path: write(path, {"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12),
        "tensor 'b' at offset 4 overlaps",
    ),
    "gap": (
        lambda path: write(path, {"a": entry(0, 8), "b": entry(12, 16)}, b"\0" * 16),
        "tensor 'b' at offset 12 leaves a gap",
    ),
    "truncated": (lambda path: write(path, {"a": entry(0, 8)}, b"\0" * 7), "tensor 'a' ends at byte 8 of 7"),
    "left over": (lambda path: write(path, {"a": entry(0, 8)}, b"\0" * 9), "1 bytes after the last tensor"),
    "a directory": (lambda path: path.mkdir(), "Is a directory"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_file_is_named(tmp_path: Path, case: str):
    damage, reason = BROKEN_FILES[case]
    path = tmp_path / SINGLE_FILE
    damage(path)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_directory_without_weights(tmp_path: Path):
    with pytest.raises(WeightsError, match="no weights; expected"):
        read_shards(tmp_path)


BROKEN_INDEXES: list[tuple[Any, str]] = [
    ({}, "weight_map is missing or empty"),
    ({"weight_map": []}, "expected an object"),
    ({"weight_map": {"a": "../secret.safetensors"}}, r"tensor 'a' is in '\.\./secret\.safetensors'"),
    ({"weight_map": {"a": "/etc/passwd"}}, "tensor 'a' is in '/etc/passwd'"),
    ({"weight_map": {"a": "one.bin"}}, r"tensor 'a' is in 'one\.bin'"),
    ({"weight_map": {"a": 7}}, "tensor 'a' is in 7"),
    ({"weight_map": {"a": "absent.safetensors"}}, r"absent\.safetensors: no such file, .* a shard is missing"),
    ({"weight_map": {"b": "one.safetensors"}}, r"one\.safetensors: tensor 'b' is missing, but"),
]


@pytest.mark.parametrize(("index", "reason"), BROKEN_INDEXES, ids=[reason[-30:] for _, reason in BROKEN_INDEXES])
def test_broken_index(tmp_path: Path, index: Any, reason: str):
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    with pytest.raises(WeightsError, match=reason):
        read_shards(tmp_path)


@pytest.fixture
def copied(cases: Cases, tmp_path: Path) -> Path:
    """A good single-file checkpoint to damage."""
    return save(build("llama"), tmp_path / "checkpoint")


def change(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite the weights with tensors replaced, added, or removed (None)."""
    from safetensors.torch import load_file

    tensors = {**load_file(directory / SINGLE_FILE), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, directory / SINGLE_FILE)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({NORM: None}, rf"tensor '{NORM}' of shape \[64\] is missing"),
        ({QUERY: torch.zeros(64, 63)}, rf"tensor '{QUERY}' has shape \[64, 63\], config.json expects \[64, 64\]"),
        ({QUERY: torch.zeros(64 * 64)}, rf"tensor '{QUERY}' has shape \[4096\]"),
        (
            {NORM: torch.ones(64, dtype=torch.int32)},
            rf"tensor '{NORM}' has dtype I32, expected one of F64, F32, BF16, F16",
        ),
        ({NORM: torch.full((64,), torch.nan)}, rf"tensor '{NORM}' contains NaN"),
        ({QUERY: torch.full((64, 64), torch.inf)}, rf"tensor '{QUERY}' contains NaN or infinity"),
        (
            {"model.layers.0.extra.weight": torch.zeros(2)},
            r"tensor 'model.layers.0.extra.weight' has no place in Llama",
        ),
        (
            {"model.layers.3.mlp.up_proj.weight": torch.zeros(2)},
            r"tensor 'model.layers.3.mlp.up_proj.weight' has no place",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config(copied: Path, changes: dict[str, torch.Tensor | None], reason: str):
    change(copied, changes)
    with pytest.raises(WeightsError, match=reason):
        load(read_model(copied))


def test_known_leftovers_of_old_exports_are_ignored(copied: Path):
    change(copied, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(read_model(copied))


def test_truncated_shard_of_many(tmp_path: Path):
    directory = save(build("llama"), tmp_path / "checkpoint", sharded=True)
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 3
    shards[2].write_bytes(shards[2].read_bytes()[:-5])
    with pytest.raises(WeightsError, match=rf"{shards[2].name}: tensor '.*' ends at byte"):
        load(read_model(directory))
    shards[2].unlink()
    with pytest.raises(WeightsError, match=rf"{shards[2].name}: no such file"):
        load(read_model(directory))


def test_progress_goes_to_stderr_in_bytes(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    from engine.models.loader import load_model
    from engine.plugins.comm.local import LocalComm

    load_model(
        read_model(copied),
        LocalComm(),
        torch.device("cpu"),
        torch.float32,
        "safetensors",
        0,
        linears=onednn_linears(torch.float32),
        progress=True,
    )
    seen = capsys.readouterr()
    assert "loading weights: 100%" in seen.err
    assert seen.out == ""


def test_dummy_weights_need_only_the_config(copied: Path, tmp_path: Path):
    from engine.models.loader import load_model
    from engine.plugins.comm.local import LocalComm

    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(copied / "config.json", bare)
    models = [
        load_model(
            read_model(bare),
            LocalComm(),
            torch.device("cpu"),
            torch.float32,
            "dummy",
            seed,
            linears=onednn_linears(torch.float32),
            progress=False,
        )
        for seed in (1, 1, 2)
    ]
    first, same, other = (Driver(model).step({"a": [1, 2, 3]})["a"] for model in models)
    assert torch.equal(first, same)  # bits of the same calls of oneDNN and torch, made twice
    assert not torch.equal(first, other)
