"""Decoders whose class in transformers calls attention through transformers' attention interface.

It is used if no other family knows the architecture, and for all architectures if ``plugins.models`` names it.  The
class is analysed by running it without weights, which needs transformers and torch: in a separate process, unless this
one has torch already.  The result is kept in the user's cache.

Owns: the call of this analysis, and its cache.  Does not know: transformers, torch.
"""

import hashlib
import logging
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.through_transformers import Facts, shape_of
from engine.host.cache_folder import cache_folder, replace_file
from engine.host.interpreters import import_path, module_command
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.types.errors import WeightsError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["transformers"]}

FACTS = "engine.models.through_transformers.facts"
FORM = 1  # part of the cache key: increment it when the facts change
TIMEOUT_S = 300.0

log = logging.getLogger(__name__)


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape of the model in transformers.  Raises WeightsError if it is not supported."""
    config = context.fields.table
    installed = version("transformers")
    log.info("%s: %s is served through transformers %s", context.fields.origin, context.architecture, installed)
    request = msgspec.json.encode([context.architecture, config], order="deterministic")
    path = _place(hashlib.sha256(f"{FORM} {installed} ".encode() + request).hexdigest())
    facts = _kept(path)
    if facts is None:
        try:
            facts = _find(context.architecture, config, request)
        except WeightsError as error:
            raise WeightsError(f"{context.fields.origin}: {error}") from error
        _keep(path, facts)
    return shape_of(facts, context.architecture, config)


def _place(digest: str) -> Path | None:
    folder = cache_folder("transformers")
    return folder / f"{digest[:32]}.json" if folder else None


def _kept(path: Path | None) -> Facts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Facts) if path else None
    except (OSError, msgspec.DecodeError):
        return None


def _keep(path: Path | None, facts: Facts) -> None:
    try:
        if path:
            replace_file(path, msgspec.json.encode(facts))
    except OSError as error:
        log.info("%s: not kept for the next start (%s)", path, error.strerror or error)


def _find(architecture: str, config: dict[str, Any], request: bytes) -> Facts:
    if "torch" in sys.modules:
        facts: Facts = import_module(FACTS).find_facts(architecture, config)
        return facts
    try:
        environment = {**os.environ, **import_path()}
        done = subprocess.run(
            module_command(FACTS), input=request, capture_output=True, timeout=TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise WeightsError(f"{architecture}: transformers has not built it within {TIMEOUT_S:.0f} s") from None
    answer: dict[str, Any] = msgspec.json.decode(done.stdout) if done.returncode == 0 else {}
    if done.returncode or "error" in answer:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
        raise WeightsError(answer.get("error") or f"{architecture}: building it in transformers failed: {last}")
    return msgspec.convert(answer, Facts)
