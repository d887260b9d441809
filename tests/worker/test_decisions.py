"""The pure decisions about workers: back-off, blame, rates, and the lateness histogram."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import ConfigError
from alloy_agent.model import DeviceId
from alloy_agent.worker import pace
from alloy_agent.worker.board import BUCKETS, bucket_ceiling_s, bucket_of, quantile_s
from alloy_agent.worker.supervision import Blame, Crash, backoff_s, blame, forgive

A, B, C = DeviceId("a"), DeviceId("b"), DeviceId("c")


@given(failures=st.integers(0, 10**6), chance=st.floats(0, 1))
def test_backoff_is_bounded_and_jittered(failures: int, chance: float) -> None:
    """A wait lies between nothing and the cap, and chance alone decides where below its ceiling."""
    wait_s = backoff_s(failures, chance, 0.1, 30.0)
    assert 0.0 <= wait_s <= 30.0
    assert wait_s == pytest.approx(chance * backoff_s(failures, 1.0, 0.1, 30.0))


def test_backoff_doubles_to_its_cap() -> None:
    """The first restart comes at once; then the ceiling doubles until the cap."""
    assert [backoff_s(n, 1.0, 0.1, 1.0) for n in range(8)] == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_two_crashes_in_a_device_quarantine_it() -> None:
    """The trace names the device twice: it is quarantined, and no other."""
    once = blame(Blame(), Crash(witness=A, inside=frozenset({A, B})))
    assert once.quarantined == ()
    assert blame(once, Crash(witness=A, inside=frozenset({A, C}))).quarantined == (A,)


def test_one_crash_each_quarantines_nobody() -> None:
    """Two devices with one crash each stay in use."""
    state = blame(blame(Blame(), Crash(witness=A)), Crash(witness=B))
    assert state.quarantined == ()


def test_a_kill_from_outside_blames_nobody() -> None:
    """However often an operator kills the worker, no device pays for it."""
    state = Blame()
    for _ in range(10):
        state = blame(state, Crash(inside=frozenset({A}), killed_from_outside=True))
    assert state == Blame()


def test_without_a_witness_only_what_is_common_is_blamed() -> None:
    """Of {a, b} and {a, c} only a can have done it."""
    state = blame(Blame(), Crash(inside=frozenset({A, B})))
    assert state.quarantined == ()
    assert blame(state, Crash(inside=frozenset({A, C}))).quarantined == (A,)


def test_a_group_that_cannot_be_told_apart_is_quarantined_at_the_third_crash() -> None:
    """Always the same two inside: one more crash is waited for, then both are left alone."""
    crash = Crash(inside=frozenset({A, B}))
    two = blame(blame(Blame(), crash), crash)
    assert two.quarantined == ()
    assert blame(two, crash).quarantined == (A, B)


def test_forgiven_is_forgiven() -> None:
    """A released device starts with no strikes."""
    state = blame(blame(Blame(), Crash(witness=A)), Crash(witness=A))
    released = forgive(state, A)
    assert released.quarantined == ()
    assert blame(released, Crash(witness=A)).quarantined == ()


crashes = st.builds(
    Crash,
    witness=st.sampled_from([None, A, B, C]),
    inside=st.frozensets(st.sampled_from([A, B, C])),
    killed_from_outside=st.booleans(),
)


@given(st.lists(crashes, max_size=12))
def test_nobody_is_quarantined_who_was_never_inside(sequence: list[Crash]) -> None:
    """Whatever happens, the quarantined were named or inside at least twice, and only grow."""
    state = Blame()
    for number, crash in enumerate(sequence, 1):
        before, state = state, blame(state, crash)
        assert set(before.quarantined) <= set(state.quarantined)
        for device in state.quarantined:
            seen = sum(
                1
                for c in sequence[:number]
                if not c.killed_from_outside and (c.witness == device or device in c.inside)
            )
            assert seen >= 2


@pytest.mark.parametrize("rate", [0, 0.99, 100.1, float("nan"), float("inf"), -5])
def test_a_rate_out_of_range_is_refused(rate: float) -> None:
    """A rate below 1 or above 100 Hz, or none at all, names itself and the range."""
    with pytest.raises(ConfigError, match="1 to 100 Hz"):
        pace.checked_rate(rate)


def test_a_burst_expires() -> None:
    """During a burst its rate holds, after it the old one."""
    state = pace.ask(pace.PaceState(rate_hz=10.0), 100.0, 2.0, 50.0)
    assert pace.rate_hz(state, 51.9) == 100.0
    assert pace.rate_hz(state, 52.0) == 10.0


@pytest.mark.parametrize("burst_s", [0.0, -1.0, 601.0, float("nan")])
def test_a_burst_without_end_is_refused(burst_s: float) -> None:
    """A burst has a length and a ceiling."""
    with pytest.raises(ConfigError):
        pace.ask(pace.PaceState(rate_hz=10.0), 100.0, burst_s, 0.0)


def test_over_budget_the_rate_halves_and_comes_back() -> None:
    """Twice over budget gives a quarter of the rate; calm rounds bring it back."""
    state = pace.PaceState(rate_hz=100.0)
    for _ in range(2):
        state = pace.budget(state, 0.06, 0.03, 0.0)
    assert pace.rate_hz(state, 0.0) == 25.0
    for _ in range(6):
        state = pace.budget(state, 0.01, 0.03, 0.0)
    assert pace.rate_hz(state, 0.0) == 100.0


def test_the_budget_does_not_swing() -> None:
    """A rate whose double would be near the budget again is kept."""
    state = pace.budget(pace.PaceState(rate_hz=100.0), 0.031, 0.03, 0.0)
    for _ in range(20):
        state = pace.budget(state, 0.0155, 0.03, 0.0)
    assert pace.rate_hz(state, 0.0) == 50.0


def test_the_budget_never_stops_sampling() -> None:
    """However far over budget, one sample a second remains."""
    state = pace.PaceState(rate_hz=100.0)
    for _ in range(100):
        state = pace.budget(state, 9.0, 0.03, 0.0)
    assert pace.rate_hz(state, 0.0) == 1.0


@given(st.integers(0, 10**11))
def test_a_bucket_holds_what_is_below_its_ceiling(lateness_ns: int) -> None:
    """Each lateness lies under its bucket's ceiling, and not far under it."""
    bucket = bucket_of(lateness_ns)
    if bucket < BUCKETS - 1:
        assert lateness_ns / 1e9 < bucket_ceiling_s(bucket) + 1e-12
        assert bucket_ceiling_s(bucket) <= lateness_ns / 1e9 * 1.26 + 1.01e-6


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=200))
def test_quantiles_bound_the_samples(lateness_ns: list[int]) -> None:
    """The p99 of the histogram is no less than that of the samples, and at most a quarter more."""
    counts = [0] * BUCKETS
    for one in lateness_ns:
        counts[bucket_of(one)] += 1
    true_s = sorted(lateness_ns)[-(-len(lateness_ns) * 99 // 100) - 1] / 1e9
    got_s = quantile_s(tuple(counts), 0.99)
    assert got_s is not None
    assert true_s <= got_s + 1e-12
    assert got_s <= true_s * 1.26 + 1.01e-6
