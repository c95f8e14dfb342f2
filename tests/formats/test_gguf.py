"""A GGUF file computes, and encodes, what the checkpoint that it was made from does."""

import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from callboard import LLM, SamplingParams
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.gguf import read_table
from engine.checkpoints.gguf_families import NAMES
from engine.checkpoints.gguf_header import GGUFHeader
from engine.config import load_config
from engine.formats.gguf import _mapped
from engine.formats.opening import open_reader
from engine.kernels.panels import products
from engine.plugins.families import read_model
from engine.text.files import TokenizerFiles
from engine.types.errors import WeightsError
from tests.formats.gguf_files import KEYS
from tests.formats.test_quantized import PROMPT, assert_equal, logits_of
from tests.models.checkpoints import LLAMA3, SIZES, build
from tests.own_cache import use_own_cache
from tests.text.specimens import byte_level, codec

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
from gguf.quants import dequantize, quantize  # noqa: E402

SHORT = {name: short for short, name in NAMES.items()}
CPU = {"device": {"kind": "cpu"}}
TEXTS = ["def add(a, b):\n    return a + b", "  two  spaces, héllo – 你好 \n", "a </s>b<s>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache" / "callboard" / "gguf"


# Type -> (place of its scales of 16 bits in a block, the largest that gives weights of usual size).
BLOCKS = {
    "Q2_K": ((80, 82), 2e-2),
    "Q3_K": ((108,), 2e-3),
    "Q4_K": ((0, 2), 2e-4),
    "Q5_K": ((0, 2), 1e-4),
    "Q6_K": ((208,), 4e-5),
    "IQ4_XS": ((0,), 4e-5),
}


def stored_blocks(array: np.ndarray, kind: "gguf.GGMLQuantizationType") -> np.ndarray:
    """The blocks of an array; where the package only reads a type, blocks of random bits with scales that can be."""
    if kind.name not in BLOCKS:
        return quantize(array, kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (*array.shape[:-1], array.shape[-1] // size, num_bytes), np.uint8)
    places, largest = BLOCKS[kind.name]
    for place in places:
        scales = random.uniform(largest / 2, largest, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def write(
    path: Path, model: PreTrainedModel, kind: str = "F32", tokenizer: bool = False, each: int = 0, **changes: object
) -> PreTrainedModel:
    """Write a model's GGUF file as llama.cpp's converter does; the model gets the weights that were stored.

    kind: of matrices.  each: tensors of a part, 0 for one file.
    changes: metadata, below the architecture's name; None leaves a key out; arrays are tensors."""
    family = model.config.model_type
    writer = gguf.GGUFWriter(path, "llama" if family == "mistral" else family, split_max_tensors=each)
    family = writer.arch
    facts: dict[str, object] = {key: getattr(model.config, name) for key, name in KEYS.items()}
    facts |= {"attention.layer_norm_rms_epsilon": model.config.rms_norm_eps, "rope.freq_base": 10000.0}
    if getattr(model.config, "head_dim", None):
        facts["attention.key_length"] = model.config.head_dim
    for key, value in (facts | changes).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is not None:
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](f"{family}.{key}", value)
    if tokenizer:
        _add_tokenizer(writer)
    writer.add_eos_token_id(2)
    floats = model.state_dict()
    for name, tensor in floats.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        *places, last, end = name.removeprefix("model.layers.").split(".")
        layered = name.startswith("model.layers.")
        short = SHORT[".".join([*places[1:], last])] if layered else SHORT[name.removesuffix(f".{end}")]
        array = tensor.float().numpy()
        if family == "llama" and last in ("q_proj", "k_proj"):
            heads = model.config.num_attention_heads if last == "q_proj" else model.config.num_key_value_heads
            rows = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = np.ascontiguousarray(rows.reshape(array.shape))
        data, stored = array, gguf.GGMLQuantizationType.F32
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            stored = gguf.GGMLQuantizationType[kind]
            data = stored_blocks(array, stored)
            rounded = torch.from_numpy(dequantize(data, stored).astype(np.float32))
            if family == "llama" and last in ("q_proj", "k_proj"):
                rounded = rounded.reshape(heads, -1, 2, array.shape[1]).transpose(1, 2).reshape(array.shape)
            tensor.copy_(rounded)
        writer.add_tensor(f"{f'blk.{places[0]}.' if layered else ''}{short}.{end}", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: "gguf.GGUFWriter") -> None:
    stored = json.loads(byte_level().to_str())
    tokens = {**stored["model"]["vocab"], **{one["content"]: one["id"] for one in stored["added_tokens"]}}
    special = {one["content"] for one in stored["added_tokens"]}
    names = sorted(tokens, key=tokens.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([3 if one in special else 1 for one in names])
    merges = stored["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_logits_are_those_of_the_numbers_in_the_file(kind: str, tmp_path: Path) -> None:
    reference = write(tmp_path / "tiny.gguf", build("llama"), kind)
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_with_scales_of_scales_are_read_whole_and_in_parts(kind: str, tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    torch.manual_seed(1)
    reference = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).eval()
    write(tmp_path / "tiny.gguf", reference, kind)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert_equal(directory, reference)
    reader = open_reader(read_model(directory))
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        whole = reference.get_parameter(f"model.layers.0.{name}.weight")
        for dim in (0, 1):
            part = reader.part(f"model.layers.0.{name}.weight", dim, 64, 128)
            assert torch.equal(part, whole.narrow(dim, 64, 128))
    reader.close()


@pytest.mark.parametrize("variant", ["llama-tied", "llama-head-dim", "qwen2", "qwen3", "mistral-no-window"])
def test_every_family_is_read(variant: str, tmp_path: Path) -> None:
    reference = write(tmp_path / "tiny.gguf", build(variant))
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


def test_stretched_frequencies_are_read(tmp_path: Path) -> None:
    reference = build("llama-linear-rope")
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write(tmp_path / "tiny.gguf", reference, **scaling)
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


@pytest.mark.parametrize("factor", ["yarn_attn_factor", "yarn_ext_factor"])
def test_factors_of_yarn_that_are_not_computed_are_refused(tmp_path: Path, factor: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(
        path, build("llama"), **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, f"rope.scaling.{factor}": 0.5}
    )
    with pytest.raises(WeightsError, match=rf"rope\.scaling\.{factor} is 0\.5, expected 1 or none"):
        resolve_checkpoint(str(path), "")


def llama3_divisors() -> np.ndarray:
    """Return the tensor that llama.cpp's converter writes for the frequencies of Llama 3.1."""
    frequencies = LLAMA3["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
    turns = LLAMA3["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / (kept + (1 - kept) / LLAMA3["factor"])).astype(np.float32)


def test_frequencies_of_llama_3_are_those_of_their_tensor(tmp_path: Path) -> None:
    reference = build("llama3-rope")
    write(tmp_path / "tiny.gguf", reference, **{"rope_freqs.weight": llama3_divisors()})
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_freqs.weight": llama3_divisors()[:5]}, "short_factor is .*, expected a list of 8 numbers"),
        ({"rope_freqs.weight": -llama3_divisors()}, "short_factor is -1.0"),
        ({"rope_freqs.weight": llama3_divisors() * np.nan}, "short_factor is "),
        ({"rope_freqs.weight": llama3_divisors().astype(np.float16)}, "has type F16, expected F32"),
        (
            {"rope_freqs.weight": llama3_divisors(), "rope.scaling.type": "yarn"},
            "scaling.type is 'yarn', expected none with 'rope_freqs.weight'",
        ),
    ],
)
def test_frequencies_that_cannot_be_are_refused(changes: dict, said: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), **changes)
    with pytest.raises(WeightsError, match=said):
        read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))


def test_a_file_serves_with_its_own_tokenizer_and_template(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, build("qwen2"), tokenizer=True)
    ours = codec(byte_level(), tmp_path / "original")
    with LLM(str(path), progress=False, config={"kv": {"num_pages": 64}}) as llm:
        read = llm._system.codec
        for text in TEXTS:
            assert read.encode(text).tolist() == ours.encode(text).tolist()
        assert len(llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    (directory,) = cache.iterdir()
    assert "{{ m.role }}" in (directory / "chat_template.jinja").read_text()
    before = directory.stat().st_mtime_ns
    assert resolve_checkpoint(str(path), "") == directory
    assert directory.stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_parts_are_read_as_one_file(kind: str, tmp_path: Path, cache: Path) -> None:
    reference = write(tmp_path / "tiny.gguf", build("llama"), kind, tokenizer=True, each=5)
    paths = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(paths) > 3
    assert paths[0].name == f"tiny-00001-of-{len(paths):05}.gguf"
    directory = resolve_checkpoint(str(paths[0]), "")
    assert {tensor.part for _, tensor in read_table(directory).values()} == set(range(len(paths)))
    assert {one.file for one, _ in read_table(directory).values()} == set(paths)
    assert_equal(directory, reference)
    assert TokenizerFiles(directory).template is not None
    assert resolve_checkpoint(str(paths[2]), "") == directory, "any part names the model"
    assert directory.name.startswith("tiny-")
    # In a cache of downloads the names are links to files of other names.
    (tmp_path / "hub").mkdir()
    for number, path in enumerate(paths):
        (tmp_path / "hub" / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    assert_equal(resolve_checkpoint(str(tmp_path / "hub" / paths[0].name), ""), reference)


def test_a_served_file_has_its_name_without_the_ending(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("qwen2"), tokenizer=True)
    write(tmp_path / "cut.gguf", build("qwen2"), tokenizer=True, each=9)
    first = min(tmp_path.glob("cut-*.gguf"))
    for path, name, served in ((tmp_path / "tiny.gguf", "", "tiny"), (first, "", "cut"), (first, "mine", "mine")):
        config = {"kv": {"num_pages": 64}, "model": {"name": name}}
        with LLM(str(path), progress=False, config=config) as llm:
            assert llm._system.model_name == served


def test_a_file_beside_the_configuration_is_found_and_a_changed_one_read_again(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"))
    (tmp_path / "callboard.toml").write_text('[model]\npath = "tiny.gguf"\n')
    found = load_config(tmp_path / "callboard.toml").model.path
    assert found == str(tmp_path / "tiny.gguf")
    first = resolve_checkpoint(found, "")
    write(tmp_path / "tiny.gguf", build("qwen3"))
    assert resolve_checkpoint(found, "") != first
    assert read_model(resolve_checkpoint(found, "")).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', expected one of none, linear, yarn"),
        ({"attention.sliding_window": 64}, "sliding_window is 64, expected none"),
        ({"expert_count": 8}, r"block_sparse_moe.gate.weight. of shape .8, 64. is missing"),
        ({"attention.head_count": 3}, "num_attention_heads"),
        ({"embedding_length": 1 << 30}, "hidden_size"),
        ({"feed_forward_length": 100}, "config.json expects"),
    ],
)
def test_metadata_that_cannot_be_is_refused(changes: dict, said: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), **changes)
    with pytest.raises(WeightsError, match=said):
        logits_of(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))


def test_truncated_and_foreign_files_are_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, build("llama"))
    whole = path.read_bytes()
    endless = whole[:8] + (1 << 62).to_bytes(8, "little") * 2 + whole[24:]
    for number, damaged in enumerate((b"", b"GGUF", b"no" * 500, whole[:100], whole[:3000], whole[:-2000], endless)):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        with pytest.raises(WeightsError, match=rf"{number}\.gguf: ") as refused:
            resolve_checkpoint(str(path), "")
        assert "\n" not in str(refused.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_blocks_whose_scale_is_no_number_are_damaged_and_nothing_is_printed(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), "Q8_0")
    stored = gguf.GGUFReader(tmp_path / "tiny.gguf", "r+")
    (tensor,) = [one for one in stored.tensors if one.name == "blk.1.ffn_up.weight"]
    tensor.data[0, :6] = (0, 0x7C, 0, 1, 2, 3)  # an infinite scale, and 0 among the integers
    stored.data.flush()
    with pytest.raises(WeightsError, match=r"model.layers.1.mlp.up_proj.weight' contains NaN or infinity"):
        logits_of(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))


def text(one: bytes) -> bytes:
    return struct.pack("<Q", len(one)) + one


def file_of(kind: int, architecture: bytes, tensor: bytes = b"") -> bytes:
    """A file with an architecture of that type of value, the sizes of a model, and one tensor's entry."""
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    facts = [text(f"llama.{name}".encode()) + struct.pack("<II", 4, 64) for name in sizes]
    facts.append(text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    facts.append(text(b"general.architecture") + struct.pack("<I", kind) + architecture)
    start = b"GGUF" + struct.pack("<IQQ", 3, bool(tensor), len(facts)) + b"".join(facts) + tensor
    return start + bytes(-len(start) % 32 + 4096)


LIST = struct.pack("<IQ", 9, 1)  # of one list
LLAMA = text(b"llama")


def entry(name: bytes, *sizes: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (file_of(9, LIST * 5000 + struct.pack("<IQI", 4, 1, 1)), "a value of type 9 at byte .* may not be in a list"),
        (file_of(9, struct.pack("<IQI", 4, 1, 1)), r"general.architecture is \[1\], expected one of apertus, c"),
        (file_of(8, text(b"\xff")), "general.architecture cannot be read: 'utf-8' codec"),
        (file_of(8, LLAMA, entry(b"token_embd.weight")), "there is no matrix 'token_embd.weight'"),
        (file_of(8, LLAMA, entry(b"token_embd.weight", 1 << 32, 1 << 32)), "it is truncated"),
        (file_of(8, LLAMA, entry(b"token_embd.weight", 1 << 40, 64)), "it is truncated"),
        (file_of(8, LLAMA, entry(b"../../escaped.weight", 4)), "'../../escaped.weight' is not known"),
    ],
)
def test_hostile_files_end_in_one_line(file: bytes, said: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "hostile.gguf").write_bytes(file)
    with pytest.raises(WeightsError, match=rf"hostile\.gguf: .*{said}") as refused:
        resolve_checkpoint(str(tmp_path / "hostile.gguf"), "")
    assert "\n" not in str(refused.value)
    assert not cache.exists()


def test_what_llama_cpp_reads_and_we_do_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        WeightsError, match=r"general.architecture is 'bert', expected one of .*llama, llama4, minimax-m2, mistral"
    ):
        resolve_checkpoint(str(path), "")


def test_neither_gguf_nor_transformers_is_needed_to_read_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write(tmp_path / "tiny.gguf", build("llama"), "Q4_0", tokenizer=True)
    for name in ("gguf", "gguf.quants", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert TokenizerFiles(directory).template is not None
    monkeypatch.undo()
    assert_equal(directory, reference)


def test_a_type_that_only_the_package_decodes_is_named_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    reference = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    write(tmp_path / "tiny.gguf", reference, "TQ2_0")
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=r"of type TQ2_0 cannot be read: .* pip install 'callboard\[gguf\]'"):
        logits_of(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))


def test_the_header_is_read_once_and_not_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), tokenizer=True)
    read: list[Path] = []

    class Counted(GGUFHeader):
        def __init__(self, path: Path) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr("engine.checkpoints.gguf_parts.GGUFHeader", Counted)
    for _ in range(2):
        directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
        logits_of(directory)
        TokenizerFiles(directory)
    assert len(read) == 1


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ("none", True),
        pytest.param(
            "int8",
            False,
            marks=pytest.mark.skipif(products() is None, reason="no C compiler, or no AVX2, for weights in int8"),
        ),
    ],
)
def test_a_start_says_that_it_computes_with_more_bits_than_the_file_has(
    quantization: str, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), "Q4_0")
    config = {"kv": {"num_pages": 64}, "model": {"tokenizer": "none", "quantization": quantization}}
    with caplog.at_level("INFO"), LLM(str(tmp_path / "tiny.gguf"), progress=False, config=config | CPU):
        pass
    lines = [one.getMessage() for one in caplog.records]
    assert any("weights: stored as Q4_0" in one and "model.quantization = 'int8'" in one for one in lines) == said
    (table,) = [one for one in lines if one.startswith("start: ")]
    for stage in (
        "imports",
        "checkpoint",
        "plugins",
        "torch",
        "device",
        "kernels",
        "weights",
        "KV pool",
        "decode steps",
    ):
        assert f"{stage} " in table


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"))
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    shutil.move(tmp_path / "tiny.gguf", tmp_path / "other")
    with pytest.raises(WeightsError, match="no weights; expected"):
        logits_of(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="the flag is Linux's")
def test_a_file_larger_than_all_memory_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    memory = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    with path.open("wb") as file:
        file.truncate(4 * memory)
    assert not _mapped(path)[:: memory // 8].any()
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="cannot be mapped"):
        _mapped(path)
