"""How shared devices stand, as `top`, the metrics page and the wire show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from alloy_agent.model import Value
from alloy_agent.telemetry.exposition import Family, counter, gauge

if TYPE_CHECKING:
    from alloy_agent.conformance.keeper.messages import ShareView, TenantView
    from alloy_agent.proto import agent_pb2 as pb

POINTS: Final = 60  # of the history that `top` is given: two minutes
ANSWERS: Final = ("conform", "violated", "undecided")
STAGES: Final = ("learning", "controlling", "idle", "blind")
TENANT: Final = ("device", "tenant", "role")
DEVICE: Final = ("device",)


class TopTenant(Value, frozen=True, kw_only=True):
    """One tenant of a shared device. `state` is "running", "frozen", or what is wrong."""

    name: str
    role: str
    weight: float
    partition: str = ""
    processes: int
    launches: int
    device_s: float
    lease: str  # "valid", "none", or "" for production, which needs none
    state: str


class TopShare(Value, frozen=True, kw_only=True):
    """One shared device.

    `production_ratio` (speed against solo) and `lent_ratio` (share of the device's time that the
    neighbours had) are columns of one value each two seconds, oldest first; None: not measured.
    """

    device: str
    stage: str
    verdict: str
    reason: str = ""
    loss_ratio: float | None = None
    budget_ratio: float
    lent_now_ratio: float
    e_value: float
    windows: int
    keeper: str
    bypasses: tuple[str, ...] = ()
    tenants: tuple[TopTenant, ...] = ()
    production_ratio: tuple[float | None, ...] = ()
    lent_ratio: tuple[float, ...] = ()


def top_shares(views: Iterable[ShareView]) -> tuple[TopShare, ...]:
    """Return what the live view shows of shared devices."""
    return tuple(_top(view) for view in sorted(views, key=lambda view: view.device))


def _top(view: ShareView) -> TopShare:
    return TopShare(
        device=view.device,
        stage=view.stage,
        verdict=view.answer,
        reason=view.held or view.throttled or view.reason,
        loss_ratio=view.loss_ratio,
        budget_ratio=view.budget_ratio,
        lent_now_ratio=view.lent_ratio,
        e_value=view.e_value,
        windows=view.windows,
        keeper=view.keeper,
        bypasses=view.bypass,
        tenants=tuple(_top_tenant(tenant) for tenant in view.tenants),
        production_ratio=view.history.production_ratio[-POINTS:],
        lent_ratio=view.history.lent_ratio[-POINTS:],
    )


def _top_tenant(tenant: TenantView) -> TopTenant:
    return TopTenant(
        name=tenant.name,
        role=tenant.role,
        weight=tenant.weight,
        partition=tenant.partition,
        processes=tenant.processes,
        launches=tenant.launched,
        device_s=round(tenant.device_s, 3),
        lease=_lease(tenant),
        state="frozen" if tenant.frozen else tenant.trouble or "running",
    )


def _lease(tenant: TenantView) -> str:
    if tenant.role == "production":
        return ""
    return "valid" if tenant.leased else "none"


# --- metrics ----------------------------------------------------------------------------------


def share_families(views: Sequence[ShareView]) -> Iterator[Family]:
    """Yield the figures of every shared device and tenant; none where no device is shared."""
    if not views:
        return
    yield from _device_families(views)
    yield from _audit_families(views)
    yield from _tenant_families(views)


def _device_families(views: Sequence[ShareView]) -> Iterator[Family]:
    loss = gauge("alloy_share_loss_ratio", "Loss of production against solo, decayed.", DEVICE)
    budget = gauge("alloy_share_budget_ratio", "Loss that production may suffer.", DEVICE)
    lent = gauge(
        "alloy_share_lent_ratio", "Share of the device's time that neighbours had.", DEVICE
    )
    opening = gauge(
        "alloy_share_opening_ratio", "Idle time that is lent; above 1: past its end.", DEVICE
    )
    stage = gauge("alloy_share_stage", "1 for the stage of the control loop.", ("device", "stage"))
    cpu = gauge("alloy_share_keeper_cpu_ratio", "Part of a core that the keeper takes.", DEVICE)
    late = counter("alloy_share_overruns", "Control periods that came late.", DEVICE)
    for view in views:
        if view.loss_ratio is not None:
            loss.add((view.device,), view.loss_ratio)
        budget.add((view.device,), view.budget_ratio)
        lent.add((view.device,), view.lent_ratio)
        opening.add((view.device,), view.opening)
        for name in STAGES:
            stage.add((view.device, name), view.stage == name)
        cpu.add((view.device,), view.cpu_ratio)
        late.add((view.device,), view.overruns)
    yield from (loss, budget, lent, opening, stage, cpu, late)


def _audit_families(views: Sequence[ShareView]) -> Iterator[Family]:
    verdict = gauge(
        "alloy_share_verdict", "1 for what the sequential audit says.", ("device", "verdict")
    )
    evidence = gauge("alloy_share_e_value", "Evidence against the promise; alarm at 3e6.", DEVICE)
    bound = gauge(
        "alloy_share_slowdown_bound_ratio",
        "Confidence sequence of production's mean slowdown.",
        ("device", "bound"),
    )
    judged = gauge("alloy_share_windows", "Windows of one second that are judged.", DEVICE)
    skipped = counter("alloy_share_windows_excluded", "Windows that were not judged.", DEVICE)
    bypasses = gauge("alloy_share_bypasses", "Ways around the gate that show now.", DEVICE)
    for view in views:
        for name in ANSWERS:
            verdict.add((view.device, name), view.answer == name)
        evidence.add((view.device,), view.e_value)
        for name, value in (("lower", view.lower_ratio), ("upper", view.upper_ratio)):
            if value is not None:
                bound.add((view.device, name), value)
        judged.add((view.device,), view.windows)
        skipped.add((view.device,), view.skipped)
        bypasses.add((view.device,), len(view.bypass))
    yield from (verdict, evidence, bound, judged, skipped, bypasses)


def _tenant_families(views: Sequence[ShareView]) -> Iterator[Family]:
    launches = counter("alloy_share_tenant_launches", "Launches, by the tenant's page.", TENANT)
    busy = counter("alloy_share_tenant_device_seconds", "Device time, by its page.", TENANT)
    waited = counter("alloy_share_tenant_waited_seconds", "Time at the launch gate.", TENANT)
    leased = gauge("alloy_share_tenant_leased", "1 while its gate has a lease.", TENANT)
    frozen = gauge("alloy_share_tenant_frozen", "1 while its cgroup is frozen.", TENANT)
    for view in views:
        for tenant in view.tenants:
            labels = (view.device, tenant.name, tenant.role)
            launches.add(labels, tenant.launched)
            busy.add(labels, tenant.device_s)
            if tenant.role == "opportunistic":
                waited.add(labels, tenant.waited_s)
                leased.add(labels, tenant.leased)
                frozen.add(labels, tenant.frozen)
    yield from (launches, busy, waited, leased, frozen)


# --- the wire ---------------------------------------------------------------------------------


def rate_state(view: ShareView, now_s: float) -> pb.RateState:
    """Return how a shared device stands, for the wire."""
    from alloy_agent.proto import agent_pb2 as pb

    verdicts = {"conform": pb.VERDICT_PASS, "violated": pb.VERDICT_FAIL}
    message = pb.RateState(
        device=view.device,
        phase=view.stage,
        age_ms=max(0, round((now_s - view.taken_at_s) * 1e3)),
        reason=view.held or view.throttled or view.reason,
        verdict=verdicts.get(view.answer, pb.VERDICT_UNKNOWN),
        e_value=view.e_value,
        lent_ratio=view.lent_ratio,
        limit_ratio=view.opening,
        tenants=len(view.tenants),
        leased=sum(t.leased for t in view.tenants),
        bypasses=view.bypass,
        loss_budget_ratio=view.budget_ratio,
    )
    if view.loss_ratio is not None:
        message.loss_ratio = view.loss_ratio
    return message


def rate_states(
    devices: Iterable[str], views: Iterable[ShareView], now_s: float
) -> Iterator[pb.RateState]:
    """Yield how each of some devices stands; one that is shared no more has ended."""
    from alloy_agent.proto import agent_pb2 as pb

    known = {view.device: view for view in views}
    for device in sorted(devices):
        view = known.get(device)
        if view is None:
            yield pb.RateState(device=device, phase="ended", verdict=pb.VERDICT_UNKNOWN)
        else:
            yield rate_state(view, now_s)
