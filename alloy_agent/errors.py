"""The taxonomy of failures, by what the caller can do about them.

Every error that a person may see is one line that names the thing, the cause and the cure.
`AlloyError`
carries the three apart, so that logs keep them as fields and the command line prints them as one
sentence.
A broken invariant is a bug, not a condition: `InvariantError` is no `AlloyError`, so that no
handler eats it.
"""

from __future__ import annotations


class AlloyError(Exception):
    """A failure that the agent expects and explains.

    Args:
        message: The thing and the cause, as one clause without a full stop.
        cure: What the reader can do about it, as an imperative clause; empty when nothing is known.
    """

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure

    def __str__(self) -> str:
        """Return the one line a person reads."""
        line = f"{self.message}: {self.cure}" if self.cure else self.message
        return " ".join(line.split())


class ConfigError(AlloyError):
    """The operator must act: a settings or layout file, an option or a permission is wrong."""


class BackendError(AlloyError):
    """A device refused or failed a call; the subclass says what the caller can do."""


class UnsupportedError(BackendError):
    """This device or driver does not have the function; never retry."""


class DeviceBusyError(BackendError):
    """Somebody holds the device; back off and retry, then name the holders."""


class DeviceLostError(BackendError):
    """The device is gone or needs a reset; fence it and go on with the others."""


class DeviceStalledError(BackendError):
    """A call on this device is past its deadline; it is not entered again meanwhile."""


class NotPermittedError(BackendError):
    """The agent lacks a privilege for this call; the cure names it."""


class PlanImpossibleError(AlloyError):
    """What is desired cannot exist; refused before hardware is touched, naming the conflict."""


class ApplyError(AlloyError):
    """A plan stopped part way; the message holds the exact difference that remains."""


class StalePlanError(ApplyError):
    """The node is no longer as it was when the plan was made; nothing was touched, plan again."""


class DaemonGoneError(AlloyError):
    """The daemon ended while it was asked; what it had begun goes on at its next start."""


class ConsentError(ApplyError):
    """A plan interrupts somebody and nobody agreed to it; nothing was touched."""


class LeaseRefusedError(AlloyError):
    """A lease command was refused; the ledger is unchanged."""


class StaleTokenError(LeaseRefusedError):
    """The fencing token or the expected generation is older than what the node has."""


class LeaseExpiredError(LeaseRefusedError):
    """The lease ran out, or belongs to an earlier boot."""


class StoreError(AlloyError):
    """The state directory failed; every mutation stops, observation goes on."""


class StoreCorruptError(StoreError):
    """The state on disk cannot be trusted; it is kept aside and named."""


class StoreFullError(StoreError):
    """No room is left for the state; it ends when somebody makes some."""


class BrainUnavailableError(AlloyError):
    """Normal weather: keep the leases held, keep observing, reconnect."""


class InvariantError(Exception):
    """Something that must always hold does not: a bug. Die, and recover at restart."""
