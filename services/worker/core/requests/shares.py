"""Whose prompt tokens are computed next where several have some: each tenant gets its share by weight, and within a tenant each
batch; its requests that came alone count as one batch together.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over prompt tokens, in two levels: the least virtual start goes first, and what
is planned, a chunk at a time, moves it on. Who comes back begins at the virtual time, so nobody saves up a share; who was served
alone is at most a chunk behind it. Outputs are not counted: who admits requests to this worker weighs those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Payer = tuple[bytes, int, int]  # tenant; peer and batch, 0 and 0 for requests that came alone
MAX_TENANTS = 2048


@dataclass(slots=True, eq=False)
class Tenant:
    """start: virtual, in tokens by weight. now: the virtual time of its flows. num_flows: those that have requests."""

    name: bytes
    start: float
    weight: float = 1.0
    now: float = 0.0
    num_flows: int = 0
    flows: dict[Payer, Flow] = field(default_factory=dict)  # and the one of single requests, whether it has or not


@dataclass(slots=True, eq=False)
class Flow:
    """num_pending: its requests that have prompt tokens yet to be planned."""

    payer: Payer
    tenant: Tenant
    start: float
    num_pending: int = 0

    @property
    def turn(self) -> tuple[float, float]:
        """The least is next. What is charged to others never makes it less."""
        return self.tenant.start, self.start


class Shares:
    """num_flows: those that have prompt tokens yet to be planned, of all tenants."""

    def __init__(self) -> None:
        self.num_flows = 0
        self._tenants: dict[bytes, Tenant] = {}
        self._now = 0.0

    def enter(self, payer: Payer, weight: float) -> Flow:
        """A request has prompt tokens to be planned. weight: of its tenant, from now on."""
        tenant = self._tenants.get(payer[0]) or self._tenant(payer[0])
        tenant.weight = weight
        flow = tenant.flows.get(payer)
        if flow is None:
            flow = tenant.flows[payer] = Flow(payer, tenant, self._last(tenant) if payer[2] else tenant.now)
        if not flow.num_pending:
            tenant.start = max(tenant.start, self._now) if not tenant.num_flows else tenant.start
            flow.start = max(flow.start, tenant.now)
            tenant.num_flows += 1
            self.num_flows += 1
        flow.num_pending += 1
        return flow

    def leave(self, flow: Flow) -> None:
        """All of a request's prompt tokens are planned, or it has ended."""
        flow.num_pending -= 1
        assert flow.num_pending >= 0, "a request leaves a flow that it is not in"
        if not flow.num_pending:
            flow.tenant.num_flows -= 1
            self.num_flows -= 1
            if flow.payer[2]:
                del flow.tenant.flows[flow.payer]
            assert self.num_flows >= flow.tenant.num_flows >= 0, "each flow is one tenant's"

    def charge(self, flow: Flow, tokens: int) -> None:
        """tokens: of a prompt, planned just now."""
        assert tokens > 0 and flow.num_pending > 0, "only who has something to compute is charged"
        tenant = flow.tenant
        self._now = max(self._now, tenant.start)
        tenant.start += tokens / tenant.weight
        tenant.now = max(tenant.now, flow.start)
        flow.start += tokens

    def pending(self) -> dict[Payer, int]:
        """Requests of each flow that have prompt tokens yet to be planned. For checks."""
        flows = [flow for tenant in self._tenants.values() for flow in tenant.flows.values()]
        return {flow.payer: flow.num_pending for flow in flows if flow.num_pending}

    def _last(self, tenant: Tenant) -> float:
        """A batch comes after the tenant's others: however many follow each other, none of them waits for more than its round."""
        return max((flow.start for flow in tenant.flows.values() if flow.num_pending), default=tenant.now)

    def _tenant(self, name: bytes) -> Tenant:
        if len(self._tenants) >= MAX_TENANTS:  # who has nothing to compute is forgotten, with a chunk that it may be behind
            self._tenants = {each.name: each for each in self._tenants.values() if each.num_flows}
        tenant = self._tenants[name] = Tenant(name, self._now)
        return tenant
