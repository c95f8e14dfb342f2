"""Attention backends of other distributions: tried before they serve, and named in every error that they raise.

A wrong kernel corrupts every stream without any error.  So one that is not part of callboard first computes a few tiny
steps in the shape that it will serve, and the results are compared with the definition of attention.  That finds faults
that are everywhere (a layout, a page size, a mask, a wrong slot, a write to the pool); the conformance kit finds the
rest.

Owns: the trial and its time limit, the wording.  Does not know: which plugins there are, actors.
"""

import logging
import time

import torch
from torch import Tensor

from engine.host.timeouts import named_while_slow, returns_within
from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GraphAttentionBuilder,
    is_capturable,
)
from engine.layers.kv_pool import KVPool, Layout
from engine.plugins.proof.attention import NUM_LAYERS, check_steps
from engine.plugins.proof.attention_cases import trial_cases
from engine.plugins.proof.findings import ConformanceError, Findings
from engine.plugins.selection import AttentionChoice
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 300.0  # kernels that are compiled at their first call take minutes; a deadlock never ends


class NamedAttention:
    """A backend whose errors name its plugin; it can be captured as the backend can."""

    def __init__(self, label: str, backend: AttentionBackend) -> None:
        self._label = label
        self._backend = backend
        self._attend = backend.attend
        self.capturable = is_capturable(backend)
        if isinstance(backend, GraphAttentionBuilder):
            self.for_graph = backend.for_graph

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan a step; errors name the plugin."""
        try:
            self._backend.plan_step(batch)
        except BaseException as error:  # including sys.exit, which would end the server without a message
            raise self._named(error, "plan_step") from error

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Attend in one layer; errors name the plugin."""
        try:
            return self._attend(layer, q_TNH)
        except BaseException as error:
            raise self._named(error, f"attend, layer {layer}") from error

    def _named(self, error: BaseException, where: str) -> PluginError:
        # The engine prints deliberate errors without a traceback; the plugin's author needs this one.
        log.error("plugin %s raised in %s", self._label, where, exc_info=error)
        return PluginError(f"plugin {self._label} raised in {where}: {type(error).__name__}: {error}")


def build_foreign(choice: AttentionChoice, spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    """Return the backend of a plugin that is not built in.  Raises PluginError that names the plugin."""
    label = choice.info.label
    try:
        backend = choice.factory(spec, pool)
    except PluginError as error:
        raise PluginError(f"plugin {label}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin {label} raised {error!r} when its backend was built") from error
    return NamedAttention(label, backend)


def try_foreign(
    choice: AttentionChoice,
    spec: AttentionSpec,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout = "layer_first",
    kv_dtype: str = "",
) -> None:
    """Let a backend compute a few steps in a small pool.  Raises PluginError if a result is wrong, or none comes."""
    label = choice.info.label
    name = str(dtype).removeprefix("torch.")
    small = spec.shortened(NUM_LAYERS)
    findings = Findings(f"plugin {label}")

    def compute() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            for case in trial_cases(name, page_size, spec.head_size, spec.window, choice.phases, layout, kv_dtype):
                with findings.case(case.name):
                    check_steps(case, choice.factory, small, device)
        except BaseException as error:  # whatever it is, it is reported with the plugin's name
            findings.failures["the trial as a whole"] = f"raised {error!r}"

    log.info("plugin %s: a trial of a few tokens begins, and may take %g s", label, TRIAL_TIMEOUT_S)
    began = time.perf_counter()
    with named_while_slow(f"plugin {label}: its trial"):
        has_ended = returns_within(TRIAL_TIMEOUT_S, compute, f"trial of {choice.info.name}")
    if not has_ended:
        raise PluginError(
            f"plugin {label} was not done after {TRIAL_TIMEOUT_S:g} s with a trial of a few tokens; choose another "
            "attention backend"
        )
    try:
        findings.conclude()
    except ConformanceError as error:
        case, reason = next(iter(error.failures.items()))
        raise PluginError(
            f"plugin {label} gives wrong results or none on a trial: {case}: {reason}; choose another attention "
            "backend, and see callboard.plugins.testing for all that it must do"
        ) from error
    log.info("plugin %s: right on a trial of %d ms", label, 1000 * (time.perf_counter() - began))
