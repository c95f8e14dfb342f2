"""The checks of ``callboard doctor``: everything that has to be there before a model is served.

Owns: the checks, what to do about each that fails, what a person sees of it.  Does not know: arguments.
No model is loaded, and nothing is written but the folder that a start makes of a GGUF file; torch is imported only
here, when asked.
"""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from engine.checkpoints.checkpoint import ModelSpec, is_hub_id, resolve_checkpoint
from engine.checkpoints.gguf import stored_tensors
from engine.config import Config
from engine.control.recurrent import check_recurrent, states_per_row, with_rows_for_states
from engine.host.device_defaults import with_device_defaults
from engine.host.memory import available_bytes
from engine.plugins.families import read_model
from engine.plugins.kinds import GRAMMAR, named
from engine.settings.own_kernels import missing_for_flashinfer, missing_for_triton
from engine.text.codec import Formats, load_codec
from engine.types.errors import CallboardError, ConfigError
from server.http.connection import require_c_parser
from server.http.listener import bind
from server.run.extension import find_extensions
from server.run.finding import Finding, Verdict

OLDEST_PYTHON = (3, 11)
REQUIRED = ("aiohttp", "msgspec", "numpy", "pluggy", "prometheus-client", "safetensors", "tokenizers", "uvloop")
ATTENTION_PACKAGES = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn", "triton": "triton"}
GIB = 1 << 30
COLOURS: dict[Verdict, str] = {"good": "green", "note": "yellow", "bad": "red"}
FEW_FILES = 4096


def examine(config: Config) -> list[Finding]:
    """Returns the findings of every check, in the order in which a start would meet them."""
    findings: list[Finding] = []
    checks = (_python, _packages, _http, _torch, _plugins, _machine, _limits, _port, _storage, _model)
    for check in (*checks, _extensions, _options):
        findings += check(config)
    return findings


def show(parsed: argparse.Namespace, config: Config) -> None:
    """Print what was found as it comes; exit with the code of a configuration that is refused if anything is bad."""
    console, all_good = Console(highlight=False, markup=False), True
    for one in examine_gpu(config) if parsed.gpu else examine(config):
        all_good &= one.verdict != "bad"
        console.print(f"{one.verdict:>4}  ", style=COLOURS[one.verdict], end="")
        console.print(f"{one.what}: {one.found}", soft_wrap=True)
        if one.advice:
            console.print(f"        {one.advice}", style="dim", soft_wrap=True)
    if not all_good:
        sys.exit(ConfigError.exit_code)


def examine_gpu(config: Config) -> Iterator[Finding]:
    """The findings of a self-test of this machine's GPUs, within about two minutes, as they come."""
    yield from _torch(config)
    try:
        from engine.startup.gpu_checks import self_test
        from engine.startup.inventory import take_inventory
    except (ImportError, OSError):
        return  # said already
    if not take_inventory().gpus:
        yield Finding("GPU self-test", "bad", "torch sees no GPU here", "run it on the machine that has one")
        return
    for one in self_test("cuda"):
        yield Finding(one.name, "good" if one.right else "bad", one.found, "" if one.right else _GPU_ADVICE)


def _python(config: Config) -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("Python", "bad", found, f"install Python {oldest} or later")
    else:
        yield Finding("Python", "good", found)


def _packages(config: Config) -> Iterator[Finding]:
    versions: list[str] = []
    for name in REQUIRED:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Finding(name, "bad", "not installed", f"pip install {name}, or install callboard again")
    yield Finding("packages", "good", ", ".join(versions))


def _http(config: Config) -> Iterator[Finding]:
    try:
        require_c_parser()
    except ConfigError as error:
        yield Finding("HTTP parser", "bad", "Python", str(error))
    else:
        yield Finding("HTTP parser", "good", "aiohttp's C parser")


def _torch(config: Config) -> Iterator[Finding]:
    try:
        from engine.startup.inventory import take_inventory
    except (ImportError, OSError) as error:
        yield Finding("torch", "bad", str(error), "pip install torch; https://pytorch.org says which build fits")
        return
    inventory = take_inventory()
    build = f"CUDA {inventory.cuda}" if inventory.cuda else "CPU only"
    yield Finding("torch", "good", f"{inventory.torch} ({build}), {inventory.threads} threads")
    for number, gpu in enumerate(inventory.gpus):
        memory = f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        short = gpu.free < gpu.total / 4
        advice = "another process holds most of its memory: nvidia-smi names it" if short else ""
        found = f"{gpu.name}, compute {gpu.capability}, {memory}"
        yield Finding(f"GPU {number}", "note" if short else "good", found, advice)
    if inventory.gpus and (advice := missing_for_triton()):
        found = "Triton cannot compile: without its kernels this GPU is 10 to 30 times slower"
        yield Finding("kernels", "note", found, advice)
    if inventory.gpus and (advice := missing_for_flashinfer()):
        yield Finding("kernels", "note", "FlashInfer cannot run; slower attention serves", advice)
    if not inventory.gpus and config.device.kind != "cpu":
        yield _no_gpu(config, inventory.cuda)


_GPU_ADVICE = "graphs.mode, plugins.attention and plugins.comm choose what runs; benchmarks/gpu_check.py looks closer"


def _no_gpu(config: Config, cuda: str | None) -> Finding:
    if shutil.which("nvidia-smi") is None:
        found, advice = "no GPU driver on this machine", "the model will run on the CPU"
    elif cuda is None:
        found, advice = "there is a GPU driver, but torch is built for CPU only", "install torch's CUDA build"
    else:
        found, advice = "torch cannot reach the GPU", "compare the driver (nvidia-smi) with torch's CUDA version"
    if config.device.kind == "cuda":
        return Finding("GPU", "bad", found, f"device.kind = 'cuda' needs one; {advice}")
    return Finding("GPU", "note", found, advice)


def _plugins(config: Config) -> Iterator[Finding]:
    from engine.plugins.listing import list_plugins
    from engine.startup.preview import preview_context

    try:
        rows = list_plugins(config, preview_context(config))
    except CallboardError as error:
        yield Finding("plugins", "bad", str(error), "`callboard plugins` lists what can be chosen")
        return
    for row in rows:
        if row.chosen and row.hindrances:
            reasons = "; ".join(row.hindrances)
            what, advice = f"plugin {row.info.name}", "choose another one: `callboard plugins`"
            if row.info.kind == GRAMMAR and named(config.plugins, GRAMMAR) == "auto":
                advice = f"requests with a grammar will be refused: pip install {row.info.short}"
                yield Finding(what, "note", reasons, advice)
            else:
                yield Finding(what, "bad", reasons, advice)
    usable = [row.info.name for row in rows if row.info.kind == "attention" and not row.hindrances]
    yield Finding("attention", "good" if usable else "bad", ", ".join(usable) or "no backend can run here")
    absent = [package for module, package in ATTENTION_PACKAGES.items() if find_spec(module) is None]
    if absent and shutil.which("nvidia-smi"):
        advice = (
            "on a GPU they are faster: pip install 'callboard[cuda]'; flash-attn is built against the torch that is "
            "there: pip install --no-build-isolation 'callboard[flash-attn]'"
        )
        yield Finding("attention packages", "note", f"not installed: {', '.join(absent)}", advice)


def _machine(config: Config) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", "good" if cores > 1 else "note", str(cores), "" if cores > 1 else _ONE_CORE)
    yield Finding("memory", "good", f"{available_bytes() / 1e9:.2f} GB available to this process and its container")


_ONE_CORE = "the model and the HTTP frontend will take turns on it"


def _limits(config: Config) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.server.max_connections + 256
    if soft < needed:
        advice = (
            f"raise it (ulimit -n {max(needed, FEW_FILES)}; LimitNOFILE= in systemd) or lower server.max_connections"
        )
        yield Finding("open files", "bad" if hard < needed else "note", f"{soft} at most, {needed} wanted", advice)
    else:
        yield Finding("open files", "good", f"{soft} at most")


def _port(config: Config) -> Iterator[Finding]:
    where = f"{config.server.host}:{config.server.port}"
    try:
        bind(config.server.host, config.server.port).close()
    except CallboardError as error:
        yield Finding("port", "bad", where, str(error))
    else:
        yield Finding("port", "good", f"{where} is free")


def _storage(config: Config) -> Iterator[Finding]:
    folder = Path(config.storage.folder).absolute()
    if not config.storage.folder:
        return
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Finding("storage", "good", f"{folder}: {shutil.disk_usage(there).free / 1e9:.1f} GB free")
    else:
        advice = "let this user write there, or name another storage.folder"
        yield Finding("storage", "bad", f"{there} cannot be written to", advice)


def _model(config: Config) -> Iterator[Finding]:
    path = config.model.path
    if is_hub_id(path):
        found, advice = f"{path} is no directory here", "it will be looked for on the hub and downloaded"
        yield Finding("model", "note", found, advice)
        return
    try:
        directory = resolve_checkpoint(path, config.model.revision)
        spec = read_model(directory, config.plugins, config.model)
    except CallboardError as error:
        yield Finding("model", "bad", path, str(error))
        return
    given = path if Path(path).expanduser().is_file() else directory  # of a GGUF, not the folder with its tables
    yield Finding("model", "good", f"{given}: {spec.architecture}, up to {spec.max_len} tokens")
    yield _weights(spec, config)
    if spec.state_bytes:
        yield _states(spec, config)
    yield from _tokenizer(spec, config)


def _states(spec: ModelSpec, config: Config) -> Finding:
    fitted = with_device_defaults(config)
    if not config.scheduler.max_running:
        weight_bytes = sum(one.num_bytes for one in stored_tensors(spec.directory).values())
        fitted = with_rows_for_states(fitted, spec.state_bytes, weight_bytes)
    most = fitted.scheduler.max_running
    times = states_per_row(config)
    as_much = "as much" if times == 2 else f"{times - 1} times as much"
    found = f"{spec.state_bytes / 1e6:.2f} MB for each of {most} running requests and {as_much} for snapshots"
    found += f", {times * most * spec.state_bytes / 1e9:.2f} GB; more snapshots come with the pages of the pool"
    try:
        check_recurrent(config)
    except CallboardError as error:
        return Finding("recurrent states", "bad", found, str(error))
    return Finding("recurrent states", "good", found)


def _weights(spec: ModelSpec, config: Config) -> Finding:
    if config.model.load_format == "safetensors":
        try:
            stored_tensors(spec.directory)
        except CallboardError as error:
            return Finding("weights", "bad", "they cannot be read", str(error))
    return _room_for(spec, config)


def _tokenizer(spec: ModelSpec, config: Config) -> Iterator[Finding]:
    templates: list[str] = []

    def note(template: str) -> Formats:
        templates.append(template)
        return Formats()

    try:
        load_codec(config.model, spec.directory, note, spec.use)
    except CallboardError as error:
        advice = f"{error}; set model.tokenizer, or 'none' for ids only"
        yield Finding("tokenizer", "bad", "it cannot be read", advice)
        return
    if not any(templates) and spec.use.kind == "generate":
        yield Finding("chat template", "note", "none", "/v1/chat/completions will refuse; completions work")


def _room_for(spec: ModelSpec, config: Config) -> Finding:
    try:
        from engine.startup.preview import preview_weights

        needed, available = preview_weights(config, spec)
    except CallboardError as error:
        return Finding("weights", "bad", "they cannot be loaded here", str(error))
    except ImportError as error:
        return Finding("weights", "note", "not estimated", str(error))
    found = f"{needed / 1e9:.2f} GB at most while they load, of {available / 1e9:.2f} GB"
    if config.model.load_format == "dummy":
        return Finding(
            "weights", "note", f"{found}, drawn at random", "for benchmarks only: model.load_format = 'dummy'"
        )
    return Finding("weights", "good", found)


def _extensions(config: Config) -> Iterator[Finding]:
    for one in find_extensions():
        yield from one.findings(config)


def _options(config: Config) -> Iterator[Finding]:
    if not config.server.needs_key:
        advice = "all that can reach the port may use the model; set server.api_key or server.key_file"
        yield Finding("API key", "note", "none", advice)
