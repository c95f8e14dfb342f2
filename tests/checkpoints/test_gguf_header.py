"""The header of a GGUF file is what the gguf package reads, and a damaged one is refused with one line."""

import struct
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints.gguf_header import KINDS, GGUFHeader
from engine.types.errors import WeightsError

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "Zoë")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "▁the", "你"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.0, 1e9])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 4, 6])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.zeros((5, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c.bias", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_is_what_the_package_reads(path: Path) -> None:
    ours, theirs = GGUFHeader(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.value(key) == field.contents(), key
    assert ours.value("no.such.key") is None
    for our, their in zip(ours.tensors, theirs.tensors, strict=True):
        shape = tuple(int(one) for one in reversed(their.shape))
        assert (our.name, our.kind, our.shape) == (their.name, their.tensor_type.name, shape)
        assert (our.offset, our.num_bytes) == (their.data_offset, their.n_bytes)


def test_the_sizes_of_all_types_are_those_of_the_package() -> None:
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {number: theirs[number] for number in KINDS} == KINDS


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    last = GGUFHeader(path).tensors[-1]
    for length in range(0, last.offset + last.num_bytes, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"tiny\.gguf: ") as refused:
            GGUFHeader(path)
        assert "\n" not in str(refused.value)


def _text(one: bytes) -> bytes:
    return struct.pack("<Q", len(one)) + one


def _entry(name: bytes, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def _file(*tensors: bytes, version: int = 3, facts: tuple[bytes, ...] = ()) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(facts)) + b"".join(facts) + b"".join(tensors)
    return start + bytes(-len(start) % 32 + 256)


NUMBER = struct.pack("<II", 4, 1)
ALIGNMENT = _text(b"general.alignment")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no GGUF file at all", "it begins with b'no G', expected b'GGUF'"),
        (_file(version=1), "version 1, expected 2 or 3"),
        (_file(version=3 << 24), "version 50331648, expected 2 or 3, little endian"),
        (_file(facts=(_text(b"a") + NUMBER, _text(b"a") + NUMBER)), "key 'a' appears twice"),
        (_file(facts=(_text(b"a") + struct.pack("<I", 77),)), "a value of type 77 at byte"),
        (_file(facts=(_text(b"a") + struct.pack("<IIQ", 9, 9, 1),)), "a value of type 9 .* may not be in a list"),
        (_file(facts=(_text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 60),)), "it is truncated"),
        (_file(facts=(_text(b"a") + struct.pack("<IIQ", 9, 10, 1 << 61),)), "it is truncated"),
        (_file(facts=(struct.pack("<Q", (1 << 64) - 1),)), "it is truncated"),
        (_file(facts=(ALIGNMENT + struct.pack("<II", 4, 0),)), "general.alignment is 0, expected a multiple of 8"),
        (_file(facts=(ALIGNMENT + struct.pack("<I", 8) + _text(b"x"),)), "general.alignment is b'x'"),
        (_file(_entry(b"a", 4), _entry(b"a", 4)), "two tensors have the same name"),
        (_file(_entry(b"a", 1, 1, 1, 1, 1)), "tensor 'a' has 5 dimensions, expected 4 at most"),
        (_file(_entry(b"a", 4, kind=5)), "tensor 'a' has type 5, which is not known"),
        (_file(_entry(b"a", 48, kind=8)), "tensor 'a' in Q8_0 has rows of 48, expected a multiple of 32"),
        (_file(_entry(b"a", 1 << 63, 1 << 63)), "tensor 'a' ends at byte .* it is truncated"),
        (_file(_entry(b"a", 4, offset=4)), "tensor 'a' is at offset 4, expected a multiple of 32"),
        (_file(_entry(b"a", 4, offset=1 << 40)), "it is truncated"),
        (_file(_entry(b"\xff", 4)), "'utf-8' codec can't decode"),
    ],
)
def test_hostile_headers_are_refused_with_what_is_wrong(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"hostile\.gguf: not a GGUF file that can be read: .*{said}"):
        GGUFHeader(path)


def test_a_text_that_is_no_text_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_file(facts=(_text(b"a") + struct.pack("<I", 8) + _text(b"\xff"),)))
    with pytest.raises(WeightsError, match="a cannot be read: 'utf-8' codec"):
        GGUFHeader(path).value("a")
