"""The arguments of a wrapper's kernel: put together once for each plan, and given with each layer's tensors.

Legend: T tokens · N query heads · H head size
Owns: which of the arguments are a layer's.  Does not know: plans, what the other arguments are.

``run`` of a wrapper checks and collects some thirty arguments, of which four differ from layer to layer; between the
graphs of a step with prompts that takes longer than the kernel.  So the first layer behind a plan goes through it while
a stand-in of the compiled module notes the call, and the others make the same call with their own four tensors.  They
are found as the objects that ``run`` was given, so nothing here depends on their order.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.plugins.support.paging import KVPages

MODULE = "_cached_module"  # of a wrapper: what its plan has chosen; a wrapper without it is asked to run every layer

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class PlannedKernel:
    """One wrapper's kernel for all layers, until its next plan."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._is_noted = False
        self._kernel: Callable[..., Any] | None = None
        self._arguments: list[Any] = []
        self._places: tuple[int, ...] = ()

    def __call__(self, q_TNH: Tensor, pages: KVPages, out_TNH: Tensor) -> None:
        """Compute one layer."""
        if self._kernel is not None:
            arguments = self._arguments.copy()  # a captured layer's tensors must not be kept
            for place, tensor in zip(self._places, (q_TNH, *pages, out_TNH), strict=True):
                arguments[place] = tensor
            self._kernel(*arguments)
        elif self._is_noted:
            self._wrapper.run(q_TNH, pages, out=out_TNH)
        else:
            self._is_noted = True
            self._bind(self._noted(q_TNH, pages, out_TNH), (q_TNH, *pages, out_TNH))

    def _noted(self, q_TNH: Tensor, pages: KVPages, out_TNH: Tensor) -> list[Call]:
        """Run one layer, and return what of the compiled module was called."""
        module = getattr(self._wrapper, MODULE, None)
        noting = Noting(module)
        if module is not None:
            setattr(self._wrapper, MODULE, noting)
        try:
            self._wrapper.run(q_TNH, pages, out=out_TNH)
        finally:
            if module is not None:
                setattr(self._wrapper, MODULE, module)
        return noting.calls

    def _bind(self, calls: list[Call], tensors: tuple[Tensor, ...]) -> None:
        """Keep the call if it was the only one and has each of the tensors once."""
        if len(calls) != 1:
            return
        ((kernel, arguments),) = calls
        found = [[place for place, one in enumerate(arguments) if one is tensor] for tensor in tensors]
        if all(len(places) == 1 for places in found):
            self._places = tuple(places[0] for places in found)
            self._arguments = [None if place in self._places else one for place, one in enumerate(arguments)]
            self._kernel = kernel


class Noting:
    """In the place of a compiled module.  calls: what was called of it, with which arguments."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def noted(*arguments: Any) -> Any:
            self.calls.append((function, arguments))
            return function(*arguments)

        return noted
