"""The service of tenants of an engine that shares itself out, counted beside ``policy.fair``.

Owns: what each was served while another one waited, and by how much that may differ.  Does not know: the policy.
A tenant begins to wait with a counter that its own service alone has raised above the lowest one.  So one that starts
while it waits has got no more since than the tenant itself, and than it had got before.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.messages import Step
from engine.scheduling.rows import Sequence as Request
from server.extensions.chaos.sim.failures import SimIncorrect

OUTPUT_COST = 2  # of a token, to ``policy.fair``


@dataclass(slots=True)
class Wait:
    """A tenant's, since it began.  credit: what it had got by then.  started: requests of others that did so since.
    gains: what each tenant got since, others through those alone.  waiting: the tenant's own requests without a row."""

    credit: int
    waiting: set[int]
    started: set[int] = field(default_factory=set)
    gains: Counter[str] = field(default_factory=Counter)


class Shares:
    """The accounts of all tenants.

    slack: the cost of tokens that have been computed and not been reported yet."""

    def __init__(self, slack: int) -> None:
        self.waits: dict[str, Wait] = {}
        self._slack = slack
        self._tenants: dict[int, str] = {}
        self._served: Counter[str] = Counter()

    def served(self, request_id: int, cost: int) -> None:
        """A request has got something."""
        tenant = self._tenants.get(request_id, "")
        self._served[tenant] += cost
        for other, wait in self.waits.items():
            if tenant == other or request_id in wait.started:
                wait.gains[tenant] += cost

    def planned(self, step: Step, started: Sequence[Request], waiting: Collection[Request]) -> None:
        """Raise SimIncorrect if a request starts out of turn.  waiting: those that still wait."""
        ids: dict[str, set[int]] = {}
        for one in waiting:
            ids.setdefault(one.tenant, set()).add(one.request_id)
        # Those that have waited without a break since the step before.
        self.waits = {tenant: wait for tenant, wait in self.waits.items() if wait.waiting & ids.get(tenant, set())}
        for request, admission in zip(started, step.admissions, strict=True):
            tenant, is_new = request.tenant, request.request_id not in self._tenants
            for other, wait in self.waits.items():
                ahead = wait.gains[tenant] - wait.gains[other]
                if other != tenant and ahead > wait.credit + self._slack:
                    raise SimIncorrect(
                        f"step {step.step_id}: request {request.request_id} of {tenant} starts, which is {ahead} ahead "
                        f"since {other} waits; {wait.credit} + {self._slack} are fair"
                    )
                wait.started.add(request.request_id)
            self._tenants[request.request_id] = tenant
            if is_new:
                self.served(request.request_id, len(admission.token_ids) // 4 - admission.num_computed_tokens)
        for tenant, found in ids.items():
            wait = self.waits.setdefault(tenant, Wait(self._served[tenant], found))
            wait.waiting = found
