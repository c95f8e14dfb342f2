"""``callboard whatif``: what recorded traffic would have seen of a server with other settings.

Owns: the order of the work.  Does not know: how anything is predicted.
"""

from argparse import Namespace

import msgspec
from rich.console import Console

from engine.config import Config
from engine.types.errors import ConfigError


def whatif(parsed: Namespace, config: Config) -> None:
    from engine.features.traffic.trace import read_trace
    from server.extensions.bench import report as bench
    from server.extensions.whatif import figures
    from server.extensions.whatif.changes import as_recorded, changed
    from server.extensions.whatif.costs import StepCosts
    from server.extensions.whatif.replay import TraceReplay, stand_ins

    trace = read_trace(parsed.trace)
    asked = [[*parsed.changes, *one] for one in parsed.cases] or [parsed.changes] * bool(parsed.changes)
    cases = [as_recorded(trace.head), *(changed(trace.head, one) for one in asked)]
    costs, tokens = StepCosts(trace.steps), stand_ins(trace.requests, trace.head)
    columns = [figures.recorded(trace)]
    for number, case in enumerate(cases):
        name = f"case {number}" if len(cases) > 2 else "changed"
        replayed = TraceReplay(case, trace.requests, tokens, costs.seconds, parsed.concurrency).run()
        if not replayed.ended:
            raise ConfigError(f"{case.name}: every request is refused, by {', '.join(replayed.refused)}")
        columns.append(figures.predicted(name if number else "replayed", case.name if number else "", replayed, costs))
    report = figures.Report(trace.head.model, costs.fit, columns)
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        figures.show(report, Console())
    if parsed.plot is not None:
        bench.plot({one.changes or one.name: figures.as_result(one) for one in columns}, parsed.plot)
