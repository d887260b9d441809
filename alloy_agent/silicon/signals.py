"""What simulated devices measure: smooth, deterministic functions of time, seed and load.

A load of `l` makes a piece busy `l * (0.9 + 0.1 sin(2 pi t / period + phase))` of the time, so that
the integral is exact and energy counters agree with power. Power follows the device's load between
idle and cap; temperature follows power. Near the cap the clock is throttled a little.
"""

from __future__ import annotations

import math
import zlib
from typing import Final

import msgspec

from alloy_agent.silicon.state import DeviceState, SignalScript

PERIODS_S: Final = (7.0, 11.0, 13.0, 17.0, 19.0, 23.0)
THROTTLE_FROM: Final = 0.95  # load from which the power cap is felt
THROTTLE_RATIO: Final = 0.1  # share of time throttled at full load
AMBIENT_C: Final = 32.0
RISE_C: Final = 45.0  # at full power


class Wave(msgspec.Struct, frozen=True):
    """A busy ratio over time."""

    load: float
    omega: float
    phase: float

    def at(self, time_s: float) -> float:
        """Return the busy ratio at a time, 0 to `load`."""
        return self.load * (0.9 + 0.1 * math.sin(self.omega * time_s + self.phase))

    def integral(self, since_s: float, until_s: float) -> float:
        """Return the busy seconds between two times."""
        swing = math.cos(self.omega * since_s + self.phase) - math.cos(
            self.omega * until_s + self.phase
        )
        return self.load * (0.9 * (until_s - since_s) + 0.1 * swing / self.omega)


def wave(seed: int, key: str, load: float) -> Wave:
    """Return the wave of a piece; `key` names it, `load` is clipped to 0..1."""
    mark = zlib.crc32(f"{seed}/{key}".encode())
    period = PERIODS_S[mark % len(PERIODS_S)]
    phase = (mark >> 8) / float(1 << 24) * 2 * math.pi
    return Wave(min(1.0, max(0.0, load)), 2 * math.pi / period, phase)


def throttle_ratio(load: float) -> float:
    """Return the share of time that a device of this load is held back by its power cap."""
    over = (min(1.0, load) - THROTTLE_FROM) / (1.0 - THROTTLE_FROM)
    return max(0.0, over) * THROTTLE_RATIO


class PowerModel(msgspec.Struct, frozen=True):
    """Power, energy, heat and throttling of one device under one load, from `since_s` on."""

    wave: Wave
    idle_w: float
    cap_w: float
    limit_c: float
    energy_j: float
    throttle_s: float
    since_s: float

    def power_w(self, time_s: float) -> float:
        """Return the power of the whole device."""
        return self.idle_w + (self.cap_w - self.idle_w) * self.wave.at(time_s)

    def energy_at(self, time_s: float) -> float:
        """Return the energy counter in joules; it only grows."""
        span = max(0.0, time_s - self.since_s)
        busy = self.wave.integral(self.since_s, self.since_s + span)
        return self.energy_j + self.idle_w * span + (self.cap_w - self.idle_w) * busy

    def throttle_at(self, time_s: float) -> float:
        """Return the seconds throttled so far."""
        return self.throttle_s + throttle_ratio(self.wave.load) * max(0.0, time_s - self.since_s)

    def headroom_c(self, time_s: float) -> float:
        """Return how many degrees are left to the limit."""
        heat = AMBIENT_C + RISE_C * self.power_w(time_s) / self.cap_w
        return self.limit_c - heat


def settle(device: DeviceState, model: PowerModel, now_s: float) -> None:
    """Write the counters as of `now_s` into the state, before the load changes."""
    device.energy_j = model.energy_at(now_s)
    device.throttle_s = model.throttle_at(now_s)
    device.energy_since_s = now_s


def scripted(script: SignalScript, now_s: float) -> float | None:
    """Return the scripted value at a time; None where it shall read as absent."""
    if not script.values:
        return None
    step = int(max(0.0, now_s - script.started_s) / script.step_s) if script.step_s > 0 else 0
    if script.repeat:
        return script.values[step % len(script.values)]
    return script.values[min(step, len(script.values) - 1)]
