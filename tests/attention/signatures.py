"""The signatures of the libraries that attention plugins call, as recorded in ``signatures.json`` and as installed.

Most of these libraries install on machines with CUDA only, so tests bind every call to what was recorded, on any
machine, and to the library itself where it is installed.  To record again, from installed packages or unpacked sources:

    python -m tests.attention.signatures flashinfer=0.7.2.post1
    python -m tests.attention.signatures flash_attn=2.8.3.post1 --path flash-attention
    python -m tests.attention.signatures flash_attn_interface=3.0.0 --path flash-attention/hopper
    python -m tests.attention.signatures flash_mla=1.0.0 --path FlashMLA

Owns: reading signatures from source text, which imports nothing, and the file.  Does not know: who calls what.
"""

import argparse
import ast
import functools
import inspect
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "signatures.json"
Name = tuple[str, str]  # of a module, and of a function or Class.method in it
Call = tuple[Name, int, tuple[str, ...]]  # a function, how many arguments it got by position, and which by name


def libraries() -> dict[str, Any]:
    """By top-level module: version, and in functions, by module, the parameters of every function that is called."""
    return json.loads(FILE.read_text())


def names(library: str) -> list[Name]:
    return [(module, one) for module, functions in libraries()[library]["functions"].items() for one in functions]


@functools.cache
def recorded(name: Name) -> inspect.Signature:
    module, function = name
    parameters = libraries()[module.partition(".")[0]]["functions"][module][function]
    (definition,) = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(definition, ast.FunctionDef)
    return signature_of(definition)


def call_of(name: Name, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return name, len(args), tuple(sorted(kwargs))


def binds(signature: inspect.Signature, call: Call) -> None:
    """Raises TypeError if a function with this signature would not take the call."""
    signature.bind(*[None] * call[1], **dict.fromkeys(call[2]))


def as_recorded(signature: inspect.Signature) -> inspect.Signature:
    """Without types, and with None for every default: their values are nobody's promise."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        one.replace(annotation=empty, default=empty if one.default is empty else None)
        for one in signature.parameters.values()
    )


def signature_of(definition: ast.FunctionDef) -> inspect.Signature:
    """See ``as_recorded``."""
    arguments, parameter = definition.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [
        parameter(
            one.arg,
            parameter.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else parameter.POSITIONAL_OR_KEYWORD,
            default=parameter.empty if index < first_default else None,
        )
        for index, one in enumerate(positional)
    ]
    if arguments.vararg:
        found.append(parameter(arguments.vararg.arg, parameter.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(parameter(one.arg, parameter.KEYWORD_ONLY, default=parameter.empty if default is None else None))
    if arguments.kwarg:
        found.append(parameter(arguments.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def definition_in(source: str, function: str) -> ast.FunctionDef:
    """The definition of a function or Class.method in source text; of several, as with overloads, the last."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, name = function.split(".")
    for one in classes:
        (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == one)
        body = found.body
    definitions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not definitions:
        raise LookupError(f"there is no {function}")
    return definitions[-1]


def source_of(module: str, path: Path | None = None) -> str | None:
    """The text of a module below ``path``, or of the installed one without importing it; None if there is none."""
    if path is None:
        try:
            found = find_spec(module.partition(".")[0])
        except ValueError:  # a stand-in in sys.modules
            found = None
        if found is None or found.origin is None:
            return None
        path = Path(found.origin).parent
        path = path.parent if found.submodule_search_locations else path
    stem = path.joinpath(*module.split("."))
    for file in (stem.with_suffix(".py"), stem / "__init__.py"):
        if file.is_file():
            return file.read_text()
    return None


def signature_in_source(name: Name) -> inspect.Signature:
    """From the source of the installed library.  Raises LookupError if it, or the function in it, is not there."""
    source = source_of(name[0])
    if source is None:
        raise LookupError(f"{name[0]} is not installed")
    return signature_of(definition_in(source, name[1]))


def record(library: str, version: str, path: Path | None) -> None:
    """Write a library's signatures as they are now.  Raises LookupError if one of its functions is not there."""
    everything = libraries()
    for module, functions in everything[library]["functions"].items():
        source = source_of(module, path)
        if source is None:
            raise LookupError(f"there is no source of {module} in {path or 'the installed packages'}")
        for function in functions:
            functions[function] = ", ".join(spell(signature_of(definition_in(source, function))))
    everything[library]["version"] = version
    FILE.write_text(json.dumps(everything, indent=1) + "\n")


def spell(signature: inspect.Signature) -> list[str]:
    """Parameters without types and with None for every default."""
    parts, kinds = [], inspect.Parameter
    before: Any = None
    for one in signature.parameters.values():
        if before == kinds.POSITIONAL_ONLY and one.kind != before:
            parts.append("/")
        if one.kind == kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            parts.append("*")
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(one.kind, "")
        parts.append(star + one.name + ("" if one.default is one.empty else "=None"))
        before = one.kind
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="+", metavar="MODULE=VERSION", help=f"of {', '.join(libraries())}")
    parser.add_argument("--path", type=Path, help="folder with the module in it; the installed packages without")
    arguments = parser.parse_args()
    for one in arguments.library:
        library, _, version = one.partition("=")
        if library not in libraries() or not version:
            parser.error(f"{one}: must be MODULE=VERSION")
        try:
            record(library, version, arguments.path)
        except LookupError as error:
            sys.exit(f"{library}: {error}")


if __name__ == "__main__":
    main()
