"""How a simulated device says no, in the vendors' own meanings.

A fake of a vendor library maps each class to that library's code; `code` carries a scripted code
when a test asks for a certain one.
"""

from __future__ import annotations


class RefusalError(Exception):
    """A call that the device did not carry out.

    Args:
        message: The thing and the cause, in the driver's words.
        code: A vendor code asked for by a fault script; None: the usual one of the class.
        holders: Pids that hold what was asked for.
    """

    def __init__(
        self, message: str, *, code: int | None = None, holders: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.holders = holders


class InsufficientResourcesError(RefusalError):
    """Occupied, fragmented or exhausted: drivers do not tell these apart."""


class InUseError(RefusalError):
    """A process, a handle or a child instance holds it."""


class ResetRequiredError(RefusalError):
    """It would need a reset that did not happen."""


class InvalidArgumentError(RefusalError):
    """No such profile, placement, mode or index; also a mode that does not fit the other mode."""


class NotSupportedError(RefusalError):
    """The device has no such function, or not in its present mode."""


class NotPermittedError(RefusalError):
    """The caller lacks the privilege."""


class NotFoundError(RefusalError):
    """The instance does not exist, or no longer."""


class LostError(RefusalError):
    """The device has fallen off the bus."""


class UnknownFailureError(RefusalError):
    """The driver fails without saying why."""


class SimulatedCrash(BaseException):
    """The process dies here; raised in place of SIGKILL where a test drives the code in-process."""
