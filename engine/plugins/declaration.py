"""The declaration of a plugin: the API it was written for and its needs, read without running the plugin.

A module declares a literal ``CALLBOARD_PLUGIN = {"api": 1, ...}``, which is read from its source.  So a plugin that
was not chosen can be listed with its needs even if it, or its package, cannot be imported here.
An entry point has no field for this, and a separate file is easily missing from a wheel; the source is always there,
except in compiled modules, whose declaration is read once they are chosen and imported.

Owns: Declaration, the supported API versions, the search for a declaration.  Does not know: the list of plugins.
"""

import ast
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from engine.plugins.hookspecs import API_VERSION, OLDEST_API_VERSION, AttentionContext, LinearContext
from engine.types.errors import PluginError

CONSTANT = "CALLBOARD_PLUGIN"
# CPython 3.11 counts the depth of a tree once for all threads, and ranks that are threads load at the same time.
PARSING = threading.Lock()


class Multiples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every multiple of ``multiple_of`` up to ``at_most``."""

    multiple_of: int
    at_most: int

    def __contains__(self, size: int) -> bool:
        return 0 < size <= self.at_most and size % self.multiple_of == 0

    def __str__(self) -> str:
        return f"multiples of {self.multiple_of} up to {self.at_most}"


Sizes = tuple[int, ...] | Multiples
Phase = Literal["prefill", "decode"]
KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8_e4m3"]
InstructionSet = Literal["avx2", "avx512", "amx", "neon"]
Feature = Literal["soft_cap", "sinks", "layer_windows", "latents", "chunks"]
FEATURES: Mapping[str, str] = {
    "soft_cap": "soft-capped scores",
    "sinks": "attention sinks",
    "layer_windows": "a window on some layers only",
    "latents": "values that are a part of their keys (latent attention)",
    "chunks": "windows that are chunks (chunked attention)",
}


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of an attention backend for one phase, which 'auto' measures in addition to the defaults."""

    phase: Phase
    options: dict[str, str | int | float | bool]


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The declaration of a plugin.  An omitted or empty field is no limit, except ``api``.

    api: the version of the plugin API it was written for.
    packages: required packages, by the names that are imported; 'a | b' for either.  devices: 'cpu', 'cuda'.
    dtypes: 'float32', 'bfloat16', 'float16'.
    architectures: for model families: the names in config.json that the plugin reads, each with its model_type, 'a | b'
    for either.
    The next are for attention backends.  head_sizes, page_sizes: lists or {"multiple_of": ..., "at_most": ...}.
    heads_per_kv_head: ratios of query heads to KV heads.  It and head_sizes do not apply to latents.
    latent_sizes: (latent, rotated part) that it takes.
    window: whether it computes sliding windows.  supports: other features of ``AttentionSpec``: 'soft_cap', 'sinks',
    'layer_windows' (``full_layers``), 'latents', 'chunks'.  phases: those that it serves, 'prefill' and 'decode'.
    kv_layouts: of 'layer_first' and 'page_first'; in the second, a page's first slot is page * pool.page_stride.
    kv_dtypes: types of pages other than dtype that it reads, see ``engine/layers/page_format.py``.
    rounded_queries: those of them that it reads only with queries rounded to the same type; 'auto' excludes it there.
    padding: whether decode rows of length 0, which pad a captured batch, are allowed.
    variants: options that 'auto' measures besides the defaults, [{"phase": ..., "options": {...}}, ...].
    graph_breaks: operations that it registers with torch and that must not be captured, as 'library::operation'.
    The next are for linear kernels.  quantizations: the kept forms of weights, 'none' for the exactness of the dtype.
    checkpoint_dtypes: those from which 'none' is exact.  instruction_sets: the CPU must have one of them.
    scale_blocks: (outputs, inputs) that share a scale, 0 for all; the elements of such float8 checkpoints are kept.
    stored_formats: formats of blocks whose integers are kept; the kernel is for such checkpoints alone.
    traceable: whether a compiler can trace their products.
    invariant: of an attention backend or linear kernel: whether, if its context requires it, a token's result has
    the same bits whatever else is in the step, and however its sequence was cut into steps.
    """

    api: int
    packages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    architectures: dict[str, str] = {}
    dtypes: tuple[str, ...] = ()
    head_sizes: Sizes = ()
    page_sizes: Sizes = ()
    heads_per_kv_head: Sizes = ()
    latent_sizes: tuple[tuple[int, int], ...] = ()
    window: bool = True
    supports: tuple[Feature, ...] = ()
    phases: tuple[Phase, ...] = ("prefill", "decode")
    kv_layouts: tuple[str, ...] = ("layer_first",)
    kv_dtypes: tuple[KVDtype, ...] = ()
    rounded_queries: tuple[KVDtype, ...] = ()
    padding: bool = False
    variants: tuple[Variant, ...] = ()
    graph_breaks: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ("none",)
    checkpoint_dtypes: tuple[str, ...] = ()
    instruction_sets: tuple[InstructionSet, ...] = ()
    scale_blocks: tuple[tuple[int, int], ...] = ()
    stored_formats: tuple[str, ...] = ()
    traceable: bool = False
    invariant: bool = False

    def keeps_elements(self, context: LinearContext) -> bool:
        """Return whether the linear kernel multiplies by the elements that the checkpoint stores, float8 or blocks."""
        stored = context.scale_block in self.scale_blocks or self._keeps_blocks(context)
        return context.quantization in self.quantizations and stored

    def _keeps_blocks(self, context: LinearContext) -> bool:
        return not set(self.stored_formats).isdisjoint(context.stored_formats)

    def missing_packages(self) -> list[str]:
        """Return the packages that are not installed, without importing any."""
        return [either for either in self.packages if not any(_installed(name) for name in either.split("|"))]

    def misfits(self, context: AttentionContext | LinearContext) -> list[str]:
        """Return why the plugin cannot run here, or [].  Empty and 0 fields of the context are not checked."""
        reasons = [f"package {name} is not installed" for name in self.missing_packages()]
        reasons += _outside(("device", context.device, self.devices), ("dtype", context.dtype, self.dtypes))
        if context.invariant and not self.invariant:
            reasons.append("model.numerics is invariant, its results depend on what else is in a step")
        if isinstance(context, LinearContext):
            return reasons + self._linear_misfits(context)
        return reasons + self._attention_misfits(context)

    def _linear_misfits(self, context: LinearContext) -> list[str]:
        exact = context.quantization == "none"
        reasons = _outside(
            ("quantization", context.quantization, self.quantizations),
            ("checkpoint of dtype", context.checkpoint_dtype if exact else "", self.checkpoint_dtypes),
        )
        have = context.instruction_sets
        if self.instruction_sets and have is not None and not set(have) & set(self.instruction_sets):
            found = f"a CPU with {' and '.join(have)}" if have else "a CPU with none of these"
            reasons.append(f"{found}, it takes one with {' or '.join(self.instruction_sets)}")
        if self.stored_formats and not self._keeps_blocks(context):
            reasons.append(f"the checkpoint has no matrices in blocks, it is for {', '.join(self.stored_formats)}")
        if context.traced and not self.traceable:
            reasons.append("graphs.mode is compiled, its products cannot be traced")
        return reasons

    def _attention_misfits(self, context: AttentionContext) -> list[str]:
        ratio = context.num_heads // context.num_kv_heads if context.num_kv_heads else 0
        reasons = _outside(
            ("page size", context.page_size, self.page_sizes), ("KV layout", context.kv_layout, self.kv_layouts)
        )
        if context.kv_dtype and context.kv_dtype not in self.kv_dtypes:
            taken = ", ".join((context.dtype or "the model's own", *self.kv_dtypes))
            reasons.append(f"kv.dtype {context.kv_dtype}, it takes {taken}")
        if "latents" not in context.needs:
            reasons += _outside(
                ("head size", context.head_size, self.head_sizes),
                ("ratio of query heads to KV heads", ratio, self.heads_per_kv_head),
            )
        elif self.latent_sizes and context.head_size and context.head_size not in map(sum, self.latent_sizes):
            taken = " or ".join(f"{latent} + {rotated}" for latent, rotated in self.latent_sizes)
            reasons.append(f"latents of {context.head_size} numbers, it takes {taken}")
        if context.window and not self.window:
            reasons.append(f"a sliding window of {context.window} tokens, it does none")
        if lacking := [FEATURES[need] for need in context.needs if need not in self.supports]:
            reasons.append(f"the model needs {' and '.join(lacking)}, which it does not do")
        if missing := [phase for phase in context.phases if phase not in self.phases]:
            reasons.append(f"it does not serve {' and '.join(missing)}")
        return reasons

    def needs(self) -> str:
        """Return the plugin's needs as text for people; '' for none."""
        parts = [", ".join(self.packages), " or ".join(self.devices), " or ".join(self.dtypes)]
        sizes = {"head": self.head_sizes, "page": self.page_sizes, "query/KV heads": self.heads_per_kv_head}
        parts += [f"{what} {_spell(allowed)}" for what, allowed in sizes.items() if allowed]
        parts += [] if self.window else ["no window"]
        parts += [", ".join(self.architectures)]
        parts.append(" or ".join(self.instruction_sets))
        parts += [] if len(self.phases) > 1 else [f"{self.phases[0]} only"]
        return "; ".join(part for part in parts if part)


def read_declaration(module: str) -> Declaration | None:
    """Return the declaration in a module's source; None if the module has none, or no source.

    Raises PluginError, which names the module, if it does not exist, is not valid Python, or declares nonsense.
    """
    source = _source(module)
    return None if source is None else _declared_in(module, source)


@lru_cache(maxsize=256)  # every start of an engine reads some fifty, which are the same in all starts of a process
def _declared_in(module: str, source: str) -> Declaration | None:
    try:
        with PARSING:
            body = ast.parse(source).body
    except SyntaxError as error:
        raise PluginError(f"{module} is not valid Python: {error.msg}, line {error.lineno}") from None
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == CONSTANT:
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == CONSTANT:
                pass
            case _:
                continue
        try:
            table = ast.literal_eval(value)
        except (ValueError, TypeError, RecursionError):
            raise PluginError(
                f"{module}, line {statement.lineno}: {CONSTANT} is read without running the module, so it must be "
                'a literal, like {"api": 1}'
            ) from None
        return convert_declaration(module, table)
    return None


def convert_declaration(module: str, table: object) -> Declaration:
    """Return the declaration for a value of ``CALLBOARD_PLUGIN``.  Raises PluginError with the module and the key."""
    try:
        return msgspec.convert(table, Declaration)
    except msgspec.ValidationError as error:
        known = ", ".join(Declaration.__struct_fields__)
        raise PluginError(f"{CONSTANT} in {module}: {error}; keys: {known}") from None


def check_api(declaration: Declaration | None, *, plugin: str, module: str, distribution: str) -> Declaration:
    """Return the declaration if this callboard supports plugins of that API version.

    plugin: its name and origin, for the error.  Raises PluginError that names what to add or to upgrade.
    """
    if declaration is None:
        raise PluginError(
            f"plugin {plugin} does not say which plugin API it was written for; its author must add to {module}: "
            f'{CONSTANT} = {{"api": {API_VERSION}}}'
        )
    supported = f"this callboard supports {_range(OLDEST_API_VERSION, API_VERSION)}"
    if declaration.api > API_VERSION:
        raise PluginError(f"plugin {plugin} was written for plugin API {declaration.api}; {supported}: upgrade it")
    if declaration.api < OLDEST_API_VERSION:
        raise PluginError(
            f"plugin {plugin} was written for plugin API {declaration.api}; {supported}: upgrade {distribution}"
        )
    return declaration


def _range(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _spell(allowed: tuple[object, ...] | Multiples) -> str:
    return str(allowed) if isinstance(allowed, Multiples) else ", ".join(map(str, allowed))


def _outside(*wanted: tuple[str, object, Any]) -> list[str]:
    """Return an error for each value that is not allowed.  wanted: (name, value, allowed), the last two '' for any."""
    return [
        f"{what} {seen}, it takes {_spell(allowed)}"
        for what, seen, allowed in wanted
        if seen and allowed and seen not in allowed
    ]


def _installed(package: str) -> bool:
    """Return whether the top-level package can be found; nothing is imported."""
    try:
        return find_spec(package.strip().partition(".")[0]) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has a stand-in without a spec
        return False


def _source(module: str) -> str | None:
    """Return a module's source, found as by an import, but without importing its parent packages."""
    path: Any = None
    spec: ModuleSpec | None = None
    names = module.split(".")
    for end in range(1, len(names) + 1):
        try:
            spec = _find(".".join(names[:end]), path)
        except KeyError:  # a namespace package inside another one finds its parts only once it is imported
            return None
        if spec is None:
            raise PluginError(f"there is no module {'.'.join(names[:end])}")
        path = spec.submodule_search_locations
    get_source = getattr(spec.loader, "get_source", None) if spec is not None else None
    try:
        source: str | None = get_source(module) if get_source is not None else None
    except ImportError:  # not text
        return None
    return source


def _find(name: str, path: Any) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
