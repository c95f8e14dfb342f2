"""The arguments of a wrapper's kernel: collected once per plan, and passed with each layer's tensors.

Legend: T tokens · N query heads · H head size
Owns: which arguments belong to a layer.  Does not know: plans, the other arguments.

``run`` of a wrapper checks and collects some thirty arguments, of which four differ between layers; between the graphs
of a step with prompts that takes longer than the kernel.  So the first layer after a plan uses ``run`` while a proxy of
the compiled module records the call, and the others make the same call with their own four tensors.  These are found as
the objects that ``run`` was given, so nothing depends on their order.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.plugins.support.paging import KVPages

MODULE = "_cached_module"  # a wrapper's planned kernel; without this attribute every layer calls ``run``

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
            arguments = self._arguments.copy()  # do not keep a captured layer's tensors
            for place, tensor in zip(self._places, (q_TNH, *pages, out_TNH), strict=True):
                arguments[place] = tensor
            self._kernel(*arguments)
        elif self._is_noted:
            self._wrapper.run(q_TNH, pages, out=out_TNH)
        else:
            self._is_noted = True
            self._bind(self._noted(q_TNH, pages, out_TNH), (q_TNH, *pages, out_TNH))

    def _noted(self, q_TNH: Tensor, pages: KVPages, out_TNH: Tensor) -> list[Call]:
        """Run one layer, and return the calls to the compiled module."""
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
        """Keep the call if it was the only one and has each of the tensors exactly once."""
        if len(calls) != 1:
            return
        ((kernel, arguments),) = calls
        found = [[place for place, one in enumerate(arguments) if one is tensor] for tensor in tensors]
        if all(len(places) == 1 for places in found):
            self._places = tuple(places[0] for places in found)
            self._arguments = [None if place in self._places else one for place, one in enumerate(arguments)]
            self._kernel = kernel


class Noting:
    """A proxy of a compiled module.  calls: the functions that were called, with their arguments."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def noted(*arguments: Any) -> Any:
            self.calls.append((function, arguments))
            return function(*arguments)

        return noted
