"""A sandbox for Jinja templates that also bounds time and memory.

Owns: the limits of a template: its time, and the sizes of texts, lists and numbers.
Does not know: what templates are for.

Loops, calls, filters and operators that can grow a value check the clock or the size of their result.  The clock counts
the thread's own work, so that no template fails because the machine is busy.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LONGEST_S: Final = 2.0
MOST_NUMBER: Final = 100_000  # for arguments of filters and methods: widths, counts, indentations
MOST_BITS: Final = 4096  # of a number
WIDE: Final = re.compile(r"\d{6}")  # a width in a format string
PADDING: Final = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox.  clock: seconds of a thread's own work."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float] = time.thread_time, **options: Any) -> None:
        super().__init__(**options)
        self._clock = clock
        self._now = threading.local()
        self.concat = self.joined  # type: ignore[method-assign]

    def bound_filters(self) -> None:
        """Bound all filters registered so far."""
        self.filters = {name: self._bounded(one) for name, one in self.filters.items()}

    def begin(self, most_chars: int) -> None:
        """Start the limits of this thread's next rendering.  most_chars: size of any text."""
        self._now.until, self._now.most = self._clock() + LONGEST_S, most_chars

    def check(self, made: Any) -> Any:
        """Return ``made``.  Raises SecurityError if it is too large, or the time is over."""
        if isinstance(made, str | bytes | list | tuple):
            self._check_size(len(made))
        elif isinstance(made, int) and made.bit_length() > MOST_BITS:
            raise SecurityError("the template makes a number that is too large")
        if self._clock() > getattr(self._now, "until", float("inf")):
            raise SecurityError(f"the template takes longer than {LONGEST_S:g} s")
        return made

    def _check_size(self, size: int) -> None:
        if size > getattr(self._now, "most", float("inf")):
            raise SecurityError("the template makes more text than the conversation can need")

    # ---- operations of compiled templates ---------------------------------------------------

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(_Watching().visit(source), name, filename, defer_init)

    def watched(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop while there is time."""
        for item in items:
            self.check(None)
            yield item

    def joined(self, pieces: Iterable[str]) -> str:
        """Return the pieces joined to one text."""
        found = list(pieces)
        self._check_size(sum(map(len, found)))
        return "".join(found)

    def joined_values(self, *values: Any) -> str:
        """Return the result of ``~``."""
        return self.joined(map(str, values))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template."""
        self.check(None)
        of, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(of, str | bytes):
            self._check_method(of, name, args)
        return self.check(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the bounded ``format`` method of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, call = value.__self__, wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(text)
            _check_numbers([*args, *kwargs.values()])  # an argument may be a width
            return call(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator."""
        if operator == "*":
            for one, count in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(count, int):
                    self._check_size(len(one) * count)
        elif operator == "**" and isinstance(right, int) and isinstance(left, int):
            if left.bit_length() * abs(right) > MOST_BITS:
                raise SecurityError("the template makes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return self.check(super().call_binop(context, operator, left, right))

    # ---- guards -----------------------------------------------------------------------------

    def _check_method(self, text: Any, name: str, args: tuple[Any, ...]) -> None:
        if name in PADDING:
            _check_numbers(args)
        elif name == "replace" and len(args) > 1:
            self._check_size(len(text) + text.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            found = list(args[0])
            self._check_size(sum(map(len, found)) + len(found) * len(text))

    def _bounded(self, given: Callable[..., Any]) -> Callable[..., Any]:
        """Return a bounded filter.  Jinja marks by attributes the arguments that a filter takes before its value."""

        @functools.wraps(given)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            at = 1 if hasattr(given, "jinja_pass_arg") else 0
            values = [*args[at:], *kwargs.values()]
            _check_numbers(values[1:])
            if given.__name__ in ("do_replace", "do_format") and values:
                text = str(values[0])
                _check_format(text) if given.__name__ == "do_format" else self._check_method(
                    text, "replace", tuple(map(str, values[1:3]))
                )
            elif given.__name__ in ("do_join", "sync_do_join") and values:
                found = list(values[0])
                separator = str(values[1]) if len(values) > 1 else ""
                self._check_size(sum(len(one) if isinstance(one, str) else 1 for one in found))
                self._check_size(len(found) * len(separator))
                args = (*args[:at], found, *args[at + 1 :])
            return self.check(given(*args, **kwargs))

        return bounded


class _Watching(NodeTransformer):
    """Rewrites loops and ``~`` to call the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _asked("watched", [cast("nodes.Expr", node.iter)], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _asked("joined_values", node.nodes, node)


def _asked(name: str, args: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    called = nodes.EnvironmentAttribute(name)
    return nodes.Call(called, args, [], None, None, lineno=node.lineno)


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MOST_NUMBER for value in values):
        raise SecurityError(f"the template asks for more than {MOST_NUMBER} of something")


def _check_format(text: Any) -> None:
    if WIDE.search(str(text)):
        raise SecurityError(f"the template formats something to more than {MOST_NUMBER} characters")
