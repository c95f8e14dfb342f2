"""Random tiny models, each of which decodes in one call of C what its Python decodes layer by layer.

Owns: the models, what is compared.  Does not know: how the kernels were compiled.
"""

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch

from engine.kernels.attention import compiled_attention
from engine.kernels.cpu import cpu_kernels
from engine.kernels.panels import PanelKind, products
from engine.layers.packing import LinearKernel, Linears
from engine.models import loader
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.panels import Panels
from engine.plugins.linear.torch import Plain
from engine.plugins.testing.steps import Driver
from engine.sampling.captured import SamplingVariant
from tests.execution.compiled_rows import MAX_LEN, MAX_ROWS, Rows
from tests.sanitized.sanitizers import mallocs

STEPS = 4
SCALE = 0.3  # of weights, so that an error is seen in the logits
HYBRIDS = ("qwen3_5_text", "lfm2")
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen3_5_text": "Qwen3_5", "lfm2": "Lfm2"}


def configuration(dice: Random) -> dict[str, object]:
    """A model of a family that C decodes, with sizes by chance."""
    family = dice.choice(("llama", "qwen2", "qwen3", "mistral", *HYBRIDS))
    num_kv, num_layers = dice.randint(1, 3), dice.randint(1, 3)
    num_heads, head_size = num_kv * dice.randint(1, 4), 2 * dice.choice((1, 4, 5, 8, 12, 16, 32))
    config = {
        "model_type": family,
        "architectures": [NAMES.get(family, family.title()) + "ForCausalLM"],
        "vocab_size": dice.choice((2, 17, 64, 259, 1000)),
        "hidden_size": num_heads * head_size if family == "qwen2" else dice.choice((1, 8, 24, 64, 65, 96)),
        "intermediate_size": dice.choice((1, 16, 33, 96, 130)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": dice.random() < 0.3,
        "attention_bias": dice.random() < 0.5,
        "mlp_bias": dice.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family == "mistral":
        config["sliding_window"] = dice.choice((None, 2, 13, 40))
    if family in ("qwen2", "qwen3") and dice.random() < 0.5:
        config |= {"use_sliding_window": True, "sliding_window": dice.randint(2, 50), "max_window_layers": 1}
    if family in HYBRIDS:
        config |= recurrent(dice, family, num_layers)
    return config


def recurrent(dice: Random, family: str, num_layers: int) -> dict[str, object]:
    """The settings of layers with states, and which layers these are; one layer at least has attention."""
    attends, other = "full_attention", "conv" if family == "lfm2" else "linear_attention"
    kinds = [attends, *(dice.choice((attends, other, other)) for _ in range(num_layers))]
    dice.shuffle(kinds)
    config: dict[str, object] = {"layer_types": kinds, "num_hidden_layers": num_layers + 1, "attention_bias": False}
    if family == "lfm2":
        return config | {"conv_L_cache": dice.randint(2, 5), "conv_bias": dice.random() < 0.5, "norm_eps": 1e-6}
    num_keys = dice.randint(1, 3)
    return config | {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_keys * dice.randint(1, 3),
        "linear_key_head_dim": dice.choice((1, 3, 16, 20)),
        "linear_value_head_dim": dice.choice((1, 5, 16, 70)),
        "linear_conv_kernel_dim": dice.randint(2, 5),
        "partial_rotary_factor": dice.choice((0.25, 0.5, 1.0)),
    }


def _model(folder: Path, seed: int, linear: LinearKernel, dtype: torch.dtype = torch.float32) -> Driver:
    given = (read_model(folder), LocalComm(), torch.device("cpu"), dtype, "dummy", seed)
    kernels = cpu_kernels() if dtype == torch.float32 else None
    return Driver(load_model(*given, progress=False, linears=Linears(linear, linear), kernels=kernels))


def decode(dice: Random) -> None:
    """Steps of a model in one call of C each, with the bits of layer by layer; near float64 where little is rounded."""
    functions = products()
    if functions is None:
        return
    config, seed, kind = configuration(dice), dice.randrange(1 << 30), dice.choice((None, None, *PanelKind))
    order = tuple(dice.sample(range(MAX_ROWS), dice.randint(1, MAX_ROWS)))
    vocab = int(config["vocab_size"])
    prompts = {str(n): dice.choices(range(vocab), k=dice.randint(1, MAX_LEN - STEPS - 1)) for n in range(len(order))}
    # Scores of wide models would be so far apart that softmax multiplies the noise of float32.
    scale = min(SCALE, 3 / int(config["hidden_size"]) ** 0.5)
    with TemporaryDirectory() as folder, patch.object(loader, "DUMMY_SCALE", scale):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        driver = _model(Path(folder), seed, Panels(functions, kind, 4.0))
        wide = _model(Path(folder), seed, Plain(8), torch.float64)
    driver.attention = compiled_attention(driver.model.attention_spec, driver.pool) or driver.attention
    for one in (driver, wide):
        one.step(prompts, rows="none")
    rows = Rows(driver, order)
    for _ in range(STEPS):
        new = {name: [dice.randrange(vocab)] for name in driver.sequences}
        expected_BV, exact_BV = rows.step(new), torch.cat([*wide.step(new).values()])
        _check_step(dice, rows, expected_BV)
        if kind in (None, PanelKind.FLOATS):
            torch.testing.assert_close(expected_BV, exact_BV, rtol=1e-3, atol=1e-3)


def _check_step(dice: Random, rows: Rows, expected_BV: torch.Tensor) -> None:
    rows_N, lengths_N = rows.told()
    rows.rows.tokens_RM[rows_N, lengths_N] = 0
    if dice.random() < 0.3:
        _check_refusals(dice, rows, rows_N, lengths_N)
        rows.told()  # a step that ends amid its layers has moved states on, and its rows are computed again
    with torch.inference_mode():
        logits_BV = rows.whole.launch(rows_N, lengths_N, SamplingVariant.LOGITS).logits_NV.clone()
        assert torch.equal(logits_BV, expected_BV)
        assert rows.have_states_of_driver()
        rows.told()
        token_ids_N = rows.whole.launch(rows_N, lengths_N, SamplingVariant.GREEDY).token_ids_N
    assert torch.equal(token_ids_N, expected_BV.argmax(-1))
    assert torch.equal(rows.rows.tokens_RM[rows_N, lengths_N].long(), token_ids_N)


def _check_refusals(dice: Random, rows: Rows, rows_N: np.ndarray, lengths_N: np.ndarray) -> None:
    """A call of malloc that fails, or a row that cannot be: an error, and nothing is written of the next token."""
    before = rows.rows.tokens_RM.clone()
    wrong_N, at = lengths_N.copy(), dice.randrange(len(lengths_N))
    wrong_N[at] = dice.choice((-(1 << 31), -1, 0, MAX_LEN + 1, (1 << 31) - 1))
    wrong_rows_N = rows_N.copy()
    wrong_rows_N[at] = dice.choice((-(1 << 63), -1, MAX_ROWS, (1 << 63) - 1))
    with torch.inference_mode():
        for given in ((rows_N, wrong_N), (wrong_rows_N, lengths_N)):
            try:
                rows.whole.launch(*given, SamplingVariant.GREEDY)
            except IndexError:
                continue
            raise AssertionError(f"rows {given[0]} with lengths {given[1]} were decoded")
        for count in range(2 + 4 * len(rows.driver.model.layers)):  # a block, each product, the head
            try:
                with mallocs(count):
                    rows.whole.launch(rows_N, lengths_N, SamplingVariant.GREEDY)
            except MemoryError:
                continue
            raise AssertionError(f"{count} calls of malloc were enough")
    assert torch.equal(rows.rows.tokens_RM, before)
