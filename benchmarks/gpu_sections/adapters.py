"""Adapters of the demo model through the whole engine, on the device and on the CPU."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.config import Config, build_config
from engine.control.system import System
from engine.features.lora.files import AdapterRules, adaptable_modules, read_adapter, tensor_name
from engine.messages import RequestOptions
from engine.types.params import SamplingParams
from gpu_sections.rows import Row
from gpu_sections.stepping import unmeasured

RANK = 8
NUM_ADAPTERS = 2


def adapters(device: torch.device, num_out: int = 48, graphs: Mapping[str, Any] | None = None) -> list[Row]:
    """Float32, greedy: requests with two adapters and with none, alone and together, get the tokens of the CPU.

    With none they are replayed by graphs in between, where the device has some."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        _write(folder)
        said = [asyncio.run(_said(kind, folder, num_out, graphs or {})) for kind in ("cpu", device.type)]
    return [
        {"case": f"demo model, {case}", "ok": ours == reference}
        for case, reference, ours in zip(("without, one, without", "all together"), *said, strict=True)
    ]


def _tables(kind: str, folder: Path, graphs: Mapping[str, Any]) -> Config:
    return build_config(
        Config(),
        {
            "device": {"kind": kind},
            "model": {"dtype": "float32", "max_model_len": 128},
            "kv": {"num_pages": 64},
            "scheduler": {"prefill_chunk": 8},
            "graphs": graphs,
            "plugins": unmeasured(torch.device(kind)),
            "lora": {"folder": str(folder), "max_adapters": NUM_ADAPTERS, "max_rank": RANK},
        },
    )


def _write(folder: Path) -> None:
    """Write the adapters' files as PEFT saves them, with random numbers."""
    generator = torch.Generator().manual_seed(1)
    modules = adaptable_modules(System(build_config(Config(), {})).spec.shape)
    for number in range(NUM_ADAPTERS):
        write_adapter(folder / f"adapter{number}", modules, RANK, generator)


def write_adapter(path: Path, modules: Mapping[str, tuple[int, int]], rank: int, generator: torch.Generator) -> None:
    """Write one adapter of all modules, which are outputs and inputs by name."""
    path.mkdir()
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        tensors[tensor_name(name, "A")] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[tensor_name(name, "B")] = torch.randn(outputs, rank, generator=generator) / 20
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


async def _said(kind: str, folder: Path, num_out: int, graphs: Mapping[str, Any]) -> list[list[list[int]]]:
    """The tokens of each request: one after another, then all at once."""
    system = System(_tables(kind, folder, graphs))
    await system.start()
    try:
        rules = AdapterRules(str(folder), RANK, adaptable_modules(system.spec.shape))
        first, second = (read_adapter(folder / f"adapter{number}", rules) for number in range(NUM_ADAPTERS))
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)

        async def one(index: int, adapter: Any) -> list[int]:
            prompt = f"def function_{index}(value, other):\n    return value"
            options = RequestOptions(parts=adapter.parts if adapter else {})
            delta = await system.ingress.open(prompt, params, options).collect()
            tokens: list[int] = np.frombuffer(delta.token_ids, np.int32).tolist()
            return tokens

        alone = [await one(index, adapter) for index, adapter in enumerate((None, first, None))]
        together = await asyncio.gather(*(one(index, (None, first, second)[index % 3]) for index in range(6)))
        return [alone, list(together)]
    finally:
        await system.stop()
