"""The door to NVML: loads the library, makes one call, and says what a failure means.

Every function of the library may be missing in an old driver, so none is taken for granted: a
missing one fails as `FUNCTION_NOT_FOUND`, like one that the device does not support. Codes stay
inside this backend (`NvmlCallError`); `translated` turns them once into the `BackendError` that
says what the caller can do.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from alloy_agent.errors import (
    BackendError,
    ConfigError,
    DeviceBusyError,
    DeviceLostError,
    NotPermittedError,
    UnsupportedError,
)
from alloy_agent.model import Json

# Source: nvml.h API 13, nvmlReturn_t.
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
IN_USE: Final = 19
INSUFFICIENT_RESOURCES: Final = 23
UNKNOWN: Final = 999

ABSENT: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
GONE: Final = frozenset({NOT_FOUND, INVALID_ARGUMENT})
LOST: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})

INIT_NO_GPUS: Final = 1  # nvml.h: NVML_INIT_FLAG_NO_GPUS, a node without GPU is no error
INIT_RETRY_S: Final = 5.0
SONAME: Final = "libnvidia-ml.so.1"

_MEANING: Final[dict[int, tuple[type[BackendError], str]]] = {
    NOT_SUPPORTED: (UnsupportedError, ""),
    FUNCTION_NOT_FOUND: (UnsupportedError, "install a newer driver"),
    NO_PERMISSION: (NotPermittedError, "run the agent as root with CAP_SYS_ADMIN"),
    GPU_IS_LOST: (DeviceLostError, "drain the node, then reset the GPU or restart the node"),
    RESET_REQUIRED: (DeviceLostError, "drain the GPU and reset it"),
    IN_USE: (DeviceBusyError, "end the processes that use it"),
    DRIVER_NOT_LOADED: (BackendError, "load the NVIDIA driver (modprobe nvidia)"),
    LIBRARY_NOT_FOUND: (BackendError, f"install the driver's user-space library ({SONAME})"),
    LIB_RM_VERSION_MISMATCH: (
        BackendError,
        "the driver was upgraded under a running library: restart the agent, or the node",
    ),
}


class NvmlCallError(Exception):
    """One call that the library did not carry out; never leaves this backend."""

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name}: {text} ({code})")
        self.name = name
        self.code = code


@contextlib.contextmanager
def translated(device: str) -> Iterator[None]:
    """Raise a failed call as the `BackendError` that says what the caller can do."""
    try:
        yield
    except NvmlCallError as failure:
        raise meaning(failure, device) from failure


def meaning(failure: NvmlCallError, device: str) -> BackendError:
    """Return the error that a failed call on a device is to the caller."""
    kind, cure = _MEANING.get(failure.code, (BackendError, ""))
    return kind(f"{device}: {failure}", cure=cure)


def load(library: str, options: dict[str, Json]) -> Any:
    """Return the `pynvml` module, over the library that is named.

    Args:
        library: "" for the driver's own; a path of a shared library; or "module:factory", a
            callable that takes `options` and returns what stands in for it.
        options: For the factory.

    Raises:
        ConfigError: There is no such factory.
    """
    if not library:
        return importlib.import_module("pynvml")
    module = _private_copy()
    if library.startswith("/"):
        import ctypes

        with contextlib.suppress(OSError):  # left out: the first call says LIBRARY_NOT_FOUND
            module.nvmlLib = ctypes.CDLL(library)
        return module
    name, _, factory = library.partition(":")
    try:
        make = getattr(importlib.import_module(name), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"nvidia.library {library!r}: {error}", cure="name a shared library by its path"
        ) from error
    with contextlib.suppress(OSError):
        module.nvmlLib = make(options)
    return module


def _private_copy() -> Any:
    """Return a module `pynvml` of its own: it keeps the loaded library in globals."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.loader is None:
        raise ConfigError("package nvidia-ml-py is missing", cure="install nvidia-ml-py")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("pynvml")
    sys.modules["pynvml"] = module  # it looks itself up there to make its error classes
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["pynvml"]
        else:
            sys.modules["pynvml"] = before
    return module


class Nvml:
    """The library, initialised once for the whole process. Thread-safe."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._lock = threading.Lock()
        self._ready = False
        self._refusal: NvmlCallError | None = None
        self._refused_at = 0.0

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Return what one function of the library returns.

        Raises:
            NvmlCallError: With the library's code.
        """
        if not self._ready:
            self.ensure()
        return self._raw(name, *args, **named)

    def _raw(self, name: str, *args: Any, **named: Any) -> Any:
        module = self.module
        try:
            return getattr(module, name)(*args, **named)
        except module.NVMLError as error:
            raise NvmlCallError(name, int(error.value), str(error)) from error
        except (module.NVMLLibraryMismatchError, AttributeError) as error:
            raise NvmlCallError(name, FUNCTION_NOT_FOUND, "Function Not Found") from error

    def maybe(self, name: str, *args: Any, default: Any = None, **named: Any) -> Any:
        """Return what a function returns, or `default` where the device or driver lacks it.

        Raises:
            NvmlCallError: For any other reason.
        """
        try:
            return self.call(name, *args, **named)
        except NvmlCallError as failure:
            if failure.code in ABSENT:
                return default
            raise

    def has(self, symbol: str) -> bool:
        """Return whether the loaded library exports a symbol."""
        library = self.module.nvmlLib
        return library is not None and hasattr(library, symbol)

    def ensure(self) -> None:
        """Initialise the library; a refusal is remembered for some seconds.

        Raises:
            NvmlCallError: It cannot be loaded, or its driver does not answer.
        """
        with self._lock:
            if self._ready:
                return
            now_s = time.monotonic()
            if self._refusal is not None and now_s - self._refused_at < INIT_RETRY_S:
                raise self._refusal
            try:
                try:
                    self._raw("nvmlInitWithFlags", INIT_NO_GPUS)
                except NvmlCallError as failure:
                    if failure.code != INVALID_ARGUMENT:
                        raise
                    self._raw("nvmlInit")
            except NvmlCallError as failure:
                self._refusal, self._refused_at = failure, now_s
                raise
            self._refusal = None
            self._ready = True

    def close(self) -> None:
        """Shut the library down."""
        with self._lock:
            if self._ready:
                self._ready = False
                with contextlib.suppress(NvmlCallError):
                    self._raw("nvmlShutdown")
