"""The description of an engine: what follows from its configuration and its checkpoint, without the weights.

Owns: the checks that need no weights, and their order.  Does not know: actors, links, where executors run.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.checkpoints.checkpoint import DEMO, DEMO_NAME, ModelSpec, resolve_checkpoint
from engine.checkpoints.gguf import SUFFIX, stored_tensors
from engine.checkpoints.gguf_parts import model_name
from engine.config import Config
from engine.control.recurrent import check_recurrent, with_rows_for_states
from engine.host.device_defaults import runs_on_cpu, with_device_defaults
from engine.host.stages import Stages
from engine.plugins.blueprint import Blueprint, without_secrets
from engine.plugins.deciders import built_proposer
from engine.plugins.families import read_model
from engine.plugins.features import Facts, ModelFit, fitted
from engine.plugins.kinds import KINDS, chosen_plugins
from engine.plugins.linears import check_linear_fits, linear_context
from engine.plugins.manager import Plugins
from engine.plugins.parsers import plugin_codec
from engine.plugins.selection import check_named, expected_context
from engine.plugins.weight_type import with_weight_type
from engine.scheduling.proposer import DraftModel
from engine.scheduling.rows import PlannerLimits
from engine.text.codec import TextCodec, warn_of_unknown_tokens
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

SCORED_LOGITS = 1 << 24  # logits of prompt tokens in a step, 64 MB in float32
MIN_SCORED_CHUNK = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The description of one engine.

    directory, model: the checkpoint, and what it holds.  model_name: its name for clients.
    num_parameters: as stored; 0 for dummy weights.
    max_len: the most tokens of prompt and output.
    facts: what features have found of the model."""

    config: Config
    directory: Path
    model: ModelSpec
    model_name: str
    num_parameters: int
    max_len: int
    codec: TextCodec
    plugins: Plugins
    blueprint: Blueprint
    facts: Facts

    @property
    def row_len(self) -> int:
        """Positions of a row, as ``load_runner`` gets them."""
        return _row_len(self.model, self.max_len)

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling parameters that the checkpoint recommends."""
        given: dict[str, float | int | None] = msgspec.to_builtins(self.model.sampling)
        return {name: value for name, value in given.items() if value is not None}


def engine_spec(
    config: Config, stages: Stages, *, several_machines: bool = False, present: EngineSpec | None = None
) -> EngineSpec:
    """Check everything that can be checked without loading weights, and return the engine of a configuration.

    several_machines: ranks run on more than one.
    present: of the running engine that is to change, whose text and name stay.  Raises CallboardError."""
    stages.begin("checkpoint")
    rows_are_chosen = not config.scheduler.max_running
    config = with_device_defaults(config, several_machines=several_machines)
    directory = resolve_checkpoint(config.model.path, config.model.revision)
    model = read_model(directory, config.plugins, config.model)
    # Headers only, and now: a damaged file must not cost the time of importing torch.
    stored = stored_tensors(directory) if config.model.load_format == "safetensors" else {}
    max_len = _max_len(config, model)
    _log_factors(model, max_len)
    stages.begin("tokenizer")
    codec = plugin_codec(config, directory, model.use) if present is None else present.codec
    name = _model_name(config) if present is None else present.model_name
    log.info("%s: %s", name, model.use)
    warn_of_unknown_tokens(codec, model.vocab_size)
    stages.begin("plugins")
    config, model = with_weight_type(config, model)
    plugins = _checked_plugins(config, model)
    if model.state_bytes:
        check_recurrent(config)
        if rows_are_chosen:
            before = present.config.scheduler.max_running if present is not None else 0
            weight_bytes = sum(one.num_bytes for one in stored.values())
            config = with_rows_for_states(config, model.state_bytes, weight_bytes, before)
    fit = fitted(
        ModelFit(
            config=config,
            spec=model,
            max_len=max_len,
            vocabulary=codec.vocabulary,
            names=plugins.names,
            proposer=built_proposer(plugins, model.vocab_size, max_len),
        )
    )
    blueprint = _blueprint(fit, plugins)
    stages.begin("")
    blueprint.policy(plugins)  # a plugin that cannot be built is refused here, and built where it works
    return EngineSpec(
        config=config,
        directory=directory,
        model=fit.spec,
        model_name=name,
        num_parameters=sum(math.prod(tensor.shape) for tensor in stored.values()),
        max_len=max_len,
        codec=codec,
        plugins=plugins,
        blueprint=blueprint,
        facts=fit.facts,
    )


def _model_name(config: Config) -> str:
    """Return the configured name, else the one of the directory or of the GGUF file, without its ending."""
    path = Path(config.model.path)
    own = model_name(path) if path.suffix == SUFFIX else path.name
    return config.model.name or (DEMO_NAME if config.model.path == DEMO else own)


def _log_factors(model: ModelSpec, max_len: int) -> None:
    """Log which factors of longrope all tokens have, if there are two sets of them."""
    rotary = next((one for one in model.shape.rotaries if one.short_factors), None)
    if rotary is None:
        return
    kind, why = ("short", "at most") if rotary.is_short else ("long", "more than")
    log.info(
        "longrope: all tokens have the %s factors, as the context of %d tokens is %s the original one of %d%s",
        kind,
        max_len,
        why,
        rotary.original_max_len,
        "" if rotary.is_short else f"; model.max_model_len={rotary.original_max_len} gives the short ones",
    )


def _row_len(model: ModelSpec, max_len: int) -> int:
    # A request for numbers samples one unused token, so its row needs one extra position.
    return max_len + (model.use.kind != "generate")


def _checked_plugins(config: Config, model: ModelSpec) -> Plugins:
    plugins = Plugins(chosen_plugins(config), config.plugins.options)
    check_named(plugins, expected_context(config, model.shape))
    device = "cpu" if runs_on_cpu(config.device.kind) else ""
    check_linear_fits(plugins, linear_context(config, model.dtype, device=device, stored_formats=model.stored_formats))
    if plugins.absent:
        log.warning("requests with a grammar are refused: %s", plugins.absent)
    return plugins


def _blueprint(fit: ModelFit, plugins: Plugins) -> Blueprint:
    config, model, max_len = fit.config, fit.spec, fit.max_len
    names = {kind: name for kind, name in plugins.names.items() if KINDS[kind].decides}
    draft = fit.proposer if isinstance(fit.proposer, DraftModel) else None
    scheduler, kv = config.scheduler, config.kv
    limits = PlannerLimits(
        max_running=scheduler.max_running,
        max_step_tokens=scheduler.max_step_tokens,
        prefill_chunk=scheduler.prefill_chunk,
        page_size=kv.page_size,
        num_pages=0,  # known when there is a pool
        max_len=_row_len(model, max_len),
        eos_token_ids=model.eos_token_ids,
        num_host_pages=getattr(kv, "num_host_pages", 0),  # of an optional folder
        itl_target_s=scheduler.itl_target_ms / 1000,
        num_ranks=config.device.tensor_parallel,
        state_bytes=model.state_bytes,
        lookahead=int(draft is not None and draft.reads_states),
        scored_chunk=max(MIN_SCORED_CHUNK, SCORED_LOGITS // model.vocab_size),
    )
    return Blueprint(
        limits=limits,
        overlap_depth=scheduler.overlap_depth,
        vocab_size=model.vocab_size,
        max_len=max_len,
        names=names,
        config=without_secrets(config, names),
        draft=draft,
        found=tuple(fit.facts),
    )


def _max_len(config: Config, spec: ModelSpec) -> int:
    if config.model.max_model_len > spec.max_len:
        raise ConfigError(
            f"model.max_model_len={config.model.max_model_len}: the model was trained for {spec.max_len} tokens; "
            "lower it or use 0"
        )
    max_len, kv = config.model.max_model_len or spec.max_len, config.kv
    if 0 < kv.num_pages * kv.page_size < max_len:
        log.warning(
            "kv.num_pages=%d: the pool holds %d tokens, and a longer request is refused, though the model takes %d; "
            "raise it to %d, or lower model.max_model_len",
            kv.num_pages,
            kv.num_pages * kv.page_size,
            max_len,
            -(-max_len // kv.page_size),
        )
    return max_len
