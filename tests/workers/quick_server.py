"""An engine, and ``callboard``, whose executors compute nothing; all else is the real thing.

    python -m tests.workers.quick_server serve ...

Owns: which executors it has.  Does not know: what they say.
"""

import engine.control.system
from engine.actors.runner import Runner
from engine.control.engine_spec import EngineSpec
from engine.control.system import System
from engine.workers.executors import ExecutorPlacement, GenerationSettings
from engine.workers.placement import ProcessExecutors
from server.cli import main
from tests.workers import quick_executor


class QuickSystem(System):
    """``System`` with such executors, in this process or in others."""

    def placement(self, engine: EngineSpec) -> ExecutorPlacement:
        """See ``System``."""
        placement = super().placement(engine)
        if isinstance(placement, ProcessExecutors):
            placement._module = quick_executor.__name__
        return placement

    def _load_runner(self, engine: EngineSpec, rank: int, settings: GenerationSettings, rendezvous: str = "") -> Runner:
        return quick_executor.quick_runner(engine.config, settings.num_pages)


if __name__ == "__main__":
    engine.control.system.System = QuickSystem  # type: ignore[misc]
    main()
