"""AMD Instinct accelerators: sysfs and KFD as the ground, the vendor's `amdsmi` where it fits.

See `backend.py` for how it works, `evidence.py` for its facts and `docs/amd.md` for users.
"""

from __future__ import annotations

from alloy_agent.backends.amd.backend import AmdBackend, AmdOptions
from alloy_agent.model import Json

__all__ = ["AmdBackend", "AmdOptions", "open_backend"]


def open_backend(options: dict[str, Json]) -> AmdBackend:
    """Return the backend of a `BackendSpec`; options as in `AmdOptions`.

    Raises:
        ConfigError: An option is unknown or of the wrong kind.
    """
    import msgspec

    from alloy_agent.errors import ConfigError

    try:
        return AmdBackend(msgspec.convert(options, AmdOptions))
    except msgspec.ValidationError as error:
        raise ConfigError(f"amd backend: {error}", cure="correct the amd settings") from error
