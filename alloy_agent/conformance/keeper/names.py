"""The names of shared devices and their tenants, which become paths of files and of cgroups.

Whatever builds such a path takes a name of these types, and they come from these functions alone:
a name is judged before there is a path that it could lead astray.
"""

from __future__ import annotations

import re
from typing import Final, NewType

from alloy_agent.errors import ConfigError

NAME_LENGTH: Final = 64
DEVICE_LENGTH: Final = 128
TENANT: Final = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_LENGTH - 1}}}")

DeviceName = NewType("DeviceName", str)
TenantName = NewType("TenantName", str)


def device_name(text: str) -> DeviceName:
    """Return a device's name that is one part of a path.

    Raises:
        ConfigError: It cannot be one.
    """
    fine = 0 < len(text) <= DEVICE_LENGTH and text.isprintable()
    if not fine or "/" in text or text.startswith("."):
        raise ConfigError(f"{_shown(text)} is no device", cure="see `alloy-agent devices`")
    return DeviceName(text)


def tenant_name(text: str) -> TenantName:
    """Return a tenant's name that is one part of a path: letters, digits, `-`, `_` and dots.

    Raises:
        ConfigError: It cannot be one.
    """
    if not TENANT.fullmatch(text):
        raise ConfigError(
            f"tenant {_shown(text)} is no name",
            cure=f"use at most {NAME_LENGTH} letters, digits, '-', '_' and dots, no dot first",
        )
    return TenantName(text)


def _shown(text: str) -> str:
    """Return a text as an error shows it; nobody reads ten thousand letters."""
    return repr(text) if len(text) <= DEVICE_LENGTH else f"{text[:NAME_LENGTH]!r}..."
