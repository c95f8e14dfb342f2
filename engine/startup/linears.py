"""The kernels behind a rank's linear layers: the one that was named, or the fastest that fits, and the reason.

Owns: the choice.  Does not know: which kernels there are, how they are measured.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.quantization import Quantization
from engine.config import Config
from engine.execution.device import instruction_sets
from engine.layers.packing import HeadKernel, LinearKernel, Linears
from engine.models.model import Model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.kinds import LINEAR
from engine.plugins.linears import check_linear_fits, fitting_linears, keeping, linear_context, linear_refusal
from engine.plugins.manager import PluginInfo, Plugins
from engine.startup.linear_race import LinearRace
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CLEARLY = 0.7  # of the time of the preferred kernel: on a busy machine a kernel is so much faster by chance
# Kernels by short name -> seconds of each; empty if it is not worth measuring.
Measure = Callable[[Mapping[str, LinearKernel]], Mapping[str, float]]


def choose_linears(config: Config, spec: ModelSpec, plugins: Plugins, plan: Model, device: torch.device) -> Linears:
    """Choose the kernels.  plan: this rank's model on the meta device.  Call it with the model's number of threads.

    Raises PluginError."""
    context = rank_context(config, spec, device, plan.dtype)
    if spec.quantization is not None:
        kept = _keeps(spec, plugins, context)
        apart = [one for one in spec.shape.experts if not one.four_bits and not one.float8]
        widened = device.type == "cuda" and bool(apart) and (kept or context.quantization == "fp8")
        rest = "; experts are read as the floats that they stand for" if widened else ""
        log.info("weights: %s%s", handling(spec.quantization, context.quantization, kept), rest)
        if widens(spec.quantization, context):
            log.warning(
                "weights: %s is widened to %s, which takes twice the memory and up to twice the time of a decode step; "
                "model.quantization=fp8 keeps it on GPUs from compute capability 8.9 on",
                spec.quantization,
                context.dtype,
            )
    race = LinearRace(device, plan.dtype)
    layers, head = plan.linear_shapes()
    if context.quantization == "none":
        kernel = choose_linear(plugins, context, lambda kernels: race.seconds(kernels, [*layers, head]))
        return Linears(kernel, kernel, kernel if context.invariant else None)
    kernel = choose_linear(plugins, context, lambda kernels: race.seconds(kernels, layers))
    # 'auto' for the head: a kernel that was named for rounded weights need not know others.
    context, unnamed = replace(context, quantization="none"), Plugins({"linear": "auto"}, options=plugins.options)
    finer = kernel.head if isinstance(kernel, HeadKernel) and plan.task_head is None else None
    if finer is not None and not context.invariant:
        return Linears(kernel, finer)
    exact = choose_linear(unnamed, context, lambda kernels: race.seconds(kernels, [head]))
    return Linears(kernel, exact if finer is None else finer, exact if context.invariant else None)


def _keeps(spec: ModelSpec, plugins: Plugins, context: LinearContext) -> bool:
    """Return whether weights are multiplied as they are stored, by the experts' kernel or one for integers."""
    if any(one.four_bits for one in spec.shape.experts):
        return True
    fitting = [info.short for info in fitting_linears(plugins.known, context)]
    auto = plugins.names.get(LINEAR) is None
    return auto and bool(context.stored_formats and keeping(plugins.known, fitting, context))


def handling(stored: Quantization, wanted: str, kept: bool = False) -> str:
    """Return how weights that a checkpoint stores rounded are multiplied.  wanted: model.quantization."""
    if kept:
        return f"stored as {stored} with {stored.scales}, kept so"
    floats = f"stored as {stored} with {stored.scales}, read as the floats that they stand for"
    if wanted == "none":
        return f"{floats}; model.quantization keeps them small"
    return f"{floats} and rounded to {wanted}"


def widens(stored: Quantization, context: LinearContext) -> bool:
    """Return whether a GPU multiplies by floats that are larger than those of the file, and need not."""
    return context.device == "cuda" and stored.is_float8 and context.quantization == "none"


def rank_context(config: Config, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> LinearContext:
    """Return the context that linear plugins get on this machine."""
    stored = spec.quantization
    return linear_context(
        config,
        # Weights that were rounded with a scale fit no float of 16 bits.
        spec.dtype if stored is None else "float32",
        scale_block=stored.block if stored is not None and stored.is_float8 else None,
        stored_formats=spec.stored_formats,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        instruction_sets=instruction_sets(),
    )


def choose_linear(plugins: Plugins, context: LinearContext, measure: Measure) -> LinearKernel:
    """Build the kernel that was named, or the fastest built-in.  measure: called if several fit.

    Raises PluginError, naming the plugin and what could run instead, or what could be configured."""
    named = plugins.names.get(LINEAR)
    if named is not None:
        check_linear_fits(plugins, context)
        log.info("plugin: %s for %s (chosen by name)", named, _what(context))
        return plugins.build(named, context, LinearKernel)
    with plugins.choosing:
        fitting = fitting_linears(plugins.known, context)
        if not fitting:
            raise PluginError(linear_refusal(plugins.known, context))
        kernels = _those_that_can(plugins, fitting, context)
    names = keeping(plugins.known, kernels, context)
    kept = "it keeps the elements that the checkpoint stores" if names else ""
    kernels = {name: kernels[name] for name in names or kernels}
    name, reason = next(iter(kernels)), "the only one that fits"
    if context.invariant:  # another kernel has other bits, and a race may end otherwise at the next start
        reason = "invariant numerics: not by a race"
    elif len(kernels) > 1 and (seconds := measure(kernels)):
        fastest = min(seconds, key=seconds.__getitem__)
        name = fastest if seconds[fastest] < CLEARLY * seconds[name] else name
        reason = ", ".join(f"{one} {1e3 * seconds[one]:.2f} ms" for one in kernels)
    elif len(kernels) > 1:
        reason = f"a small model; {', '.join(list(kernels)[1:])} would fit as well"
    elif kept:
        reason = kept
    log.info("plugin: %s.%s for %s (%s)", LINEAR, name, _what(context), reason)
    return kernels[name]


def _those_that_can(
    plugins: Plugins, infos: Iterable[PluginInfo], context: LinearContext
) -> Mapping[str, LinearKernel]:
    """Return the kernels by short name, except those that refuse this device.

    Raises the last error if all refuse, and the error of one that has options in the configuration."""
    kernels: dict[str, LinearKernel] = {}
    refused = None
    for info in infos:
        try:
            kernels[info.short] = _load(plugins, info, context)
        except PluginError as error:
            if plugins.options.get(info.name):
                raise
            log.info("plugin: %s is out: %s", info.name, error)
            refused = error
    if not kernels:
        assert refused is not None, "no kernel was tried"
        raise refused
    return kernels


def _load(plugins: Plugins, info: PluginInfo, context: LinearContext) -> LinearKernel:
    plugins.load(info.name)
    return plugins.build(info.name, context, LinearKernel)


def _what(context: LinearContext) -> str:
    return f"{context.dtype} weights" if context.quantization == "none" else f"weights in {context.quantization}"
