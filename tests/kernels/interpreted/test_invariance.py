"""The proof at start with what a GPU has: Triton's attention, products, norms, rotation, activations and sampling."""

import pytest
import torch

from engine.execution.attention import RankAttention
from engine.kernels.fixed_products import fixed_product
from engine.kernels.fused import FusedKernels
from engine.layers.packing import Linears
from engine.models.loader import load_model
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.triton import Fixed
from engine.plugins.proof import invariance as kit
from engine.sampling.sampler import Sampler
from engine.settings import own_kernels
from engine.startup.invariance import prove_invariance
from engine.types.errors import ConfigError
from tests.models.checkpoints import build, save

CPU = torch.device("cpu")
CUTS = ((9, 1, 1, 8), (3, 1, 1), (1, 12, 1))


class Attention(RankAttention):
    def __init__(self, spec, invariant):
        self._built = lambda pool: TritonAttention(spec, pool, invariant=invariant)

    def build(self, pool):
        return self._built(pool)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv(own_kernels.VARIABLE, "triton")
    monkeypatch.setattr(kit, "CUTS", CUTS)
    monkeypatch.setattr(kit, "LENGTHS", tuple(map(sum, CUTS)))
    products = Linears(Fixed(4, fixed_product), Fixed(4, fixed_product))
    spec = read_model(save(build("qwen3-tied"), tmp_path))
    decoder = load_model(spec, LocalComm(), CPU, torch.float32, "safetensors", 1, False, products)
    decoder.by_rows()
    assert isinstance(decoder.kernels, FusedKernels)
    return decoder


def prove(model, invariant, kv_dtype=""):
    sampler = Sampler(9, model.vocab_size, 32, CPU)
    assert sampler.kernels is not None, "the sampler's kernels are to be proved, too"
    prove_invariance(
        model,
        Attention(model.attention_spec, invariant),
        LocalComm(),
        sampler,
        device=CPU,
        page_size=4,
        layout="layer_first",
        kv_dtype=kv_dtype,
        max_tokens=20,
        max_rows=9,
    )


@pytest.mark.parametrize("kv_dtype", ["", "fp8_e4m3"])
def test_every_part_holds(model, kv_dtype):
    prove(model, invariant=True, kv_dtype=kv_dtype)


def test_whoever_samples_reads_float32(tmp_path, monkeypatch):
    monkeypatch.setenv(own_kernels.VARIABLE, "triton")
    spec = read_model(save(build("qwen3-tied"), tmp_path))
    products = Linears(Fixed(2, fixed_product), Fixed(2, fixed_product))
    decoder = load_model(spec, LocalComm(), CPU, torch.bfloat16, "safetensors", 1, False, products)
    x_ND = torch.randn(2, spec.shape.hidden_size, dtype=torch.bfloat16)
    assert decoder.logits(x_ND).dtype == torch.bfloat16
    decoder.by_rows()
    assert decoder.logits(x_ND).dtype == torch.float32


def test_attention_by_decode_kernels_is_named(model, monkeypatch):
    monkeypatch.setattr("engine.startup.invariance._parts", lambda *_: [])
    monkeypatch.setattr(kit, "CUTS", CUTS := ((40, *[1] * 3),))  # of several tiles, of several shares
    monkeypatch.setattr(kit, "LENGTHS", tuple(map(sum, CUTS)))
    with pytest.raises(ConfigError, match=r"invariant does not hold .*: attention: layer 0"):
        prove(model, invariant=False)
