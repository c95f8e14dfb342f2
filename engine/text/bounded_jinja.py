"""A sandbox for Jinja templates in which work and memory are bounded as well.

Owns: what a template may compute: its time, how long texts and lists and how large numbers become.
Does not know: what templates are for.

Every loop, call, filter and operator of a template looks at the clock or at what it makes.  The clock is that of the
thread's own work, so that no template fails because the machine is busy.
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
MOST_NUMBER: Final = 100_000  # that is given to a filter or a method: widths, counts, indentations
MOST_BITS: Final = 4096  # of a number
WIDE: Final = re.compile(r"\d{6}")  # in the format of a text
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
        """Bound all filters that there are by now."""
        self.filters = {name: self._bounded(one) for name, one in self.filters.items()}

    def begin(self, most_chars: int) -> None:
        """Bound what this thread renders next.  most_chars: of any text that is made."""
        self._now.until, self._now.most = self._clock() + LONGEST_S, most_chars

    def check(self, made: Any) -> Any:
        """Returns what was made.  Raises SecurityError if it is too large, or the time is over."""
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

    # ---- what templates are compiled to -----------------------------------------------------

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(_Watching().visit(source), name, filename, defer_init)

    def watched(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, while there is time."""
        for item in items:
            self.check(None)
            yield item

    def joined(self, pieces: Iterable[str]) -> str:
        """The pieces as one text."""
        found = list(pieces)
        self._check_size(sum(map(len, found)))
        return "".join(found)

    def joined_values(self, *values: Any) -> str:
        """What ``~`` makes."""
        return self.joined(map(str, values))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        self.check(None)
        of, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(of, str | bytes):
            self._check_method(of, name, args)
        return self.check(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns what a template gets for a text's ``format``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, call = value.__self__, wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(text)
            _check_numbers([*args, *kwargs.values()])  # a width may be one of them
            return call(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what an operator makes of two values."""
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
        """A filter that is bounded.  Jinja says by attributes what a filter takes beside its value."""

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
    """Has loops and ``~`` go through the environment."""

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
