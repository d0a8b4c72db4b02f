"""Fair shares of prompt tokens by tenant and weight, and within a tenant by batch. A tenant's single requests count as one batch.

This is start-time fair queueing (Goyal, Vin, Cheng, 1996) over prompt tokens, in two levels. The flow with the smallest virtual
start is served next, and each planned chunk advances the flow's start. A flow that had no requests begins at the virtual time, so
that it loses the share that it did not use. If only one flow had requests, its start is at most one chunk after the virtual time.
Output tokens are not counted, because gateways take them into account when they send requests to this worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Payer = tuple[bytes, int, int]  # (tenant, peer, batch); peer and batch are 0 for single requests
MAX_TENANTS = 2048


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant with its flows."""

    name: bytes
    start: float  # virtual start, in tokens divided by weight
    weight: float = 1.0
    now: float = 0.0  # virtual time among the tenant's flows
    num_flows: int = 0  # flows with pending requests
    # Flows with pending requests, and the flow of single requests even if it has no pending request.
    flows: dict[Payer, Flow] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """The requests of one batch, or all single requests of one tenant, with their virtual start."""

    payer: Payer
    tenant: Tenant
    start: float  # virtual start within the tenant
    num_pending: int = 0  # requests with prompt tokens that are not planned

    @property
    def sort_key(self) -> tuple[float, float]:
        """Sort key of the flow. The flow with the smallest sort key is served next. Chunks of other flows never lower it."""
        return self.tenant.start, self.start


class Shares:
    """The flows of all tenants, and the virtual time."""

    def __init__(self) -> None:
        self.num_flows = 0  # flows with prompt tokens that are not planned
        self._tenants: dict[bytes, Tenant] = {}
        self._now = 0.0  # virtual time among the tenants

    def enter(self, payer: Payer, weight: float) -> Flow:
        """Adds a request with prompt tokens to its flow, and returns the flow.

        Args:
            payer: the flow's name.
            weight: weight of the tenant from now on.
        """
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
        """Removes a request from its flow, because its prompt tokens are planned or it has ended."""
        flow.num_pending -= 1
        assert flow.num_pending >= 0, "a request leaves its flow once"
        if not flow.num_pending:
            flow.tenant.num_flows -= 1
            self.num_flows -= 1
            if flow.payer[2]:
                del flow.tenant.flows[flow.payer]
            assert self.num_flows >= flow.tenant.num_flows >= 0, "num_flows is the sum over the tenants"

    def charge(self, flow: Flow, tokens: int) -> None:
        """Counts newly planned prompt tokens against a flow and its tenant: their virtual starts rise."""
        assert tokens > 0 and flow.num_pending > 0, "only a flow with pending requests is charged"
        tenant = flow.tenant
        self._now = max(self._now, tenant.start)
        tenant.start += tokens / tenant.weight
        tenant.now = max(tenant.now, flow.start)
        flow.start += tokens

    def pending(self) -> dict[Payer, int]:
        """Returns the number of pending requests by flow, for checks. Flows without pending requests are left out."""
        flows = [flow for tenant in self._tenants.values() for flow in tenant.flows.values()]
        return {flow.payer: flow.num_pending for flow in flows if flow.num_pending}

    def _last(self, tenant: Tenant) -> float:
        """Returns the start of a new batch: the latest start of the tenant's flows, so that a new batch cannot delay them."""
        return max((flow.start for flow in tenant.flows.values() if flow.num_pending), default=tenant.now)

    def _tenant(self, name: bytes) -> Tenant:
        if len(self._tenants) >= MAX_TENANTS:  # drops tenants without requests
            self._tenants = {each.name: each for each in self._tenants.values() if each.num_flows}
        tenant = self._tenants[name] = Tenant(name, self._now)
        return tenant
