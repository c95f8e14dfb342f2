"""Owns the exported folder: writes the model, measures what was written, writes the card."""

import copy
import json
import random
from dataclasses import asdict
from pathlib import Path

import torch
from baseline import Baseline, measure_baseline
from card import CardFacts, render
from checkpoint import Progress
from corpus import Corpus, SourceFile
from exam import examination, marks, passed
from forms import read_facts
from measure import HeldOut, measure_held_out, take_samples
from network import count_parameters
from talks import Talks
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
from vocabulary import save_tokenizer_files

SIZE_LIMIT = 8_000_000
PYTHON = Path(__file__).resolve().parent / "data" / "python.json"


def write_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write weights in bf16, configuration and tokenizer."""
    out_dir.mkdir(parents=True, exist_ok=True)
    exported = copy.deepcopy(model).to("cpu", torch.bfloat16)
    exported.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    exported.save_pretrained(out_dir)
    save_tokenizer_files(tokenizer, out_dir, model.config.max_position_embeddings)
    # `transformers` 5 nests these two; readers of the older layout look for them at the top.
    path = out_dir / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def folder_size(folder: Path) -> int:
    """Bytes of the files directly in `folder`; there are no sub-folders to ship."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def record(work_dir: Path, held_out: HeldOut, baseline: Baseline) -> None:
    """Keep the measurements in a form that another program can read."""
    values = {
        "held_out": asdict(held_out),
        "nats_per_token": held_out.nats_per_token,
        "bits_per_byte": held_out.bits_per_byte,
        "baseline": asdict(baseline),
    }
    (work_dir / "measurements.json").write_text(json.dumps(values, indent=2) + "\n")


def baseline_of(corpus: Corpus, work_dir: Path) -> Baseline:
    """The yardstick; it takes minutes and never changes, so `work_dir` keeps it."""
    kept = work_dir / "baseline.json"
    if kept.exists():
        values = json.loads(kept.read_text())
        return Baseline({int(order): bits for order, bits in values["bits_by_order"].items()}, values["xz_bits"])
    baseline = measure_baseline([file.text for file in corpus.train], [file.text for file in corpus.held_out])
    kept.write_text(json.dumps(asdict(baseline)) + "\n")
    return baseline


def export_python(
    model: Qwen3ForCausalLM, held_out: list[SourceFile], now: Progress, work_dir: Path, out_dir: Path
) -> None:
    """Write the model of Python alone, with what the card will say of it."""
    tokenizer = Tokenizer.from_file(str(work_dir / "tokenizer.json"))
    write_model(model, tokenizer, out_dir)
    nats = measure_held_out(model.eval(), tokenizer, held_out).nats_per_token
    said = {"steps": now.step, "tokens": now.tokens, "minutes": round(now.seconds / 60, 1), "hardware": now.hardware}
    path = out_dir / "data" / "python.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said | {"nats_per_token": round(nats, 3)}, indent=2) + "\n")
    print(f"held-out: {nats:.4f} nats per token; wrote {out_dir}")


def export(
    model: Qwen3ForCausalLM,
    corpus: Corpus,
    counts: dict[str, int],
    now: Progress,
    work_dir: Path,
    out_dir: Path,
    seed: int,
) -> None:
    """Write everything; the figures come from the bf16 weights as they were written."""
    device = next(model.parameters()).device
    tokenizer = Tokenizer.from_file(str(work_dir / "tokenizer.json"))
    write_model(model, tokenizer, out_dir)
    shipped = Qwen3ForCausalLM.from_pretrained(out_dir, dtype=torch.float32).to(device).eval()
    held_out = measure_held_out(shipped, tokenizer, corpus.held_out)
    print(f"held-out: {held_out.nats_per_token:.4f} nats per token, {held_out.bits_per_byte:.4f} bits per byte")
    print("fitting the byte n-gram on the same training files ...")
    baseline = baseline_of(corpus, work_dir)
    order = baseline.best_order
    print(f"byte {order}-gram: {baseline.bits_by_order[order]:.4f}, xz: {baseline.xz_bits:.4f}")
    record(work_dir, held_out, baseline)
    probes = examination(Talks(read_facts(), random.Random(1)))
    graded = marks(probes, passed(shipped, tokenizer, probes))
    print(graded)
    samples = take_samples(shipped, PreTrainedTokenizerFast.from_pretrained(out_dir), seed)
    facts = CardFacts(
        parameters=count_parameters(shipped),
        config=shipped.config.to_dict(),
        weight_bytes=(out_dir / "model.safetensors").stat().st_size,
        counts=counts,
        progress=now,
        held_out=held_out,
        baseline=baseline,
        samples=samples,
        marks=graded,
        python=json.loads(PYTHON.read_text()),
    )
    (out_dir / "README.md").write_text(render(facts))
    size = folder_size(out_dir)
    print(f"wrote {out_dir}: {size:,} bytes in all")
    if size > SIZE_LIMIT:
        raise SystemExit(f"{out_dir} exceeds {SIZE_LIMIT:,} bytes; choose a smaller shape")
