"""What `--fake SPEC` means: a count and a board, an instance, `mixed`, or a YAML file.

A YAML file holds one `Recipe`:

```yaml
seed: 7
boards:
  - {board: H100-SXM5-80GB, count: 2, instances: [3g.40gb@0]}   # made before the agent came
  - {board: MI300X, count: 8, compute: CPX}
processes:
  - {pid: 4711, device: "#0", instance: 1, load_ratio: 0.8, memory_bytes: 1073741824}
faults:
  - {call: "gpu.create_compute_instance", device: "#0", action: error, error: unknown, times: 1}
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from alloy_agent.errors import ConfigError
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NeuronInstance, NvidiaBoard
from alloy_agent.silicon.state import Fault

COUNT_MAX: Final = 64
MIXED: Final = (("H100-SXM5-80GB", 2), ("MI300X", 2), ("trn2.3xlarge", 1))
_COUNTED: Final = re.compile(r"(?:(?P<count>[0-9]{1,9})[xX])?(?P<name>[^/\s]{1,64})")


class BoardRecipe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Some boards of one kind, and how they are set up before the agent comes."""

    board: str
    count: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] = 1
    driver: str = ""
    passthrough: bool = False
    fenced: bool = True
    mig: bool = False
    instances: tuple[str, ...] = ()
    compute: str | None = None
    memory: str | None = None
    lnc: int | None = None


class ProcessRecipe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A process that runs from the start, as `state.Client`; device by id or `#<index>`."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
    device: str
    name: str = "python3"
    instance: Annotated[int, msgspec.Meta(ge=0)] | None = None
    compute_instance: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cores: tuple[Annotated[int, msgspec.Meta(ge=0, le=1023)], ...] = ()
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    load_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    opportunistic: bool = False
    tag: str = ""
    monitor: bool = False


class Recipe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A whole simulated node."""

    boards: tuple[BoardRecipe, ...] = ()
    processes: tuple[ProcessRecipe, ...] = ()
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    kfd_busy_scope: Literal["device", "node"] = "device"
    display_card: bool = False
    crash_at: Annotated[int, msgspec.Meta(ge=1)] | None = None
    crash_how: Literal["raise", "sigkill"] = "sigkill"


def parse_specs(specs: Sequence[str]) -> Recipe:
    """Return the node that one or more `--fake` options describe together.

    Raises:
        ConfigError: Naming the option, the cause and near matches.
    """
    recipe = Recipe()
    for spec in specs:
        recipe = _merge(recipe, parse_spec(spec))
    _check_together(recipe)
    return recipe


def parse_spec(spec: str) -> Recipe:
    """Return what one `--fake` option describes.

    Raises:
        ConfigError: Naming the option, the cause and near matches.
    """
    text = spec.strip()
    if text.lower() == "mixed":
        boards = tuple(BoardRecipe(board=name, count=count) for name, count in MIXED)
        return Recipe(boards=boards)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return _read_file(text)
    found = _COUNTED.fullmatch(text)
    name = board_name(found["name"]) if found is not None else None
    if found is None or name is None:
        raise _unknown(spec, found["name"] if found is not None else text)
    count = int(found["count"] or 1)
    if not 1 <= count <= COUNT_MAX:
        raise ConfigError(
            f"--fake {spec}: {count} boards", cure=f"ask for 1 to {COUNT_MAX} of a kind"
        )
    return Recipe(boards=(BoardRecipe(board=name, count=count),))


def board_name(text: str) -> str | None:
    """Return the full name of a board given by name or alias in any case, or None."""
    return _names().get(text.casefold())


def _names() -> dict[str, str]:
    names = {}
    for board in BOARDS.values():
        for name in (board.name, *board.aliases):
            names[name.casefold()] = board.name
    return names


def _unknown(spec: str, name: str) -> ConfigError:
    import difflib

    known = _names()
    close = difflib.get_close_matches(name.casefold()[:64], known, n=3, cutoff=0.4)
    near = list(dict.fromkeys(known[match] for match in close))
    shown = spec if len(spec) <= 80 else spec[:77] + "..."
    return ConfigError(
        f"--fake {shown!r}: no such board",
        cure="did you mean " + ", ".join(near) + "?"
        if near
        else "name one of " + ", ".join([*BOARDS, "mixed"]) + ", or a YAML file",
    )


def _read_file(path: str) -> Recipe:
    from alloy_agent.decoding import decode_yaml, read_text

    recipe = decode_yaml(read_text(Path(path)), Recipe, path)
    boards = []
    for entry in recipe.boards:
        name = board_name(entry.board)
        if name is None:
            raise _unknown(path, entry.board)
        boards.append(msgspec.structs.replace(entry, board=name))
    if not boards:
        raise ConfigError(f"{path}: no boards", cure="list at least one under `boards`")
    return msgspec.structs.replace(recipe, boards=tuple(boards))


def _merge(left: Recipe, right: Recipe) -> Recipe:
    """Return both together; settings of the later one win where it has any."""
    default = Recipe()
    settings = {
        name: getattr(right if getattr(right, name) != getattr(default, name) else left, name)
        for name in ("seed", "kfd_busy_scope", "display_card", "crash_at", "crash_how")
    }
    return Recipe(
        boards=left.boards + right.boards,
        processes=left.processes + right.processes,
        faults=left.faults + right.faults,
        **settings,
    )


def _check_together(recipe: Recipe) -> None:
    instances = [e for e in recipe.boards if isinstance(BOARDS[e.board], NeuronInstance)]
    if len(instances) > 1 or any(entry.count > 1 for entry in instances):
        names = ", ".join(f"{entry.count}x{entry.board}" for entry in instances)
        raise ConfigError(
            f"--fake {names}: a node is one instance", cure="keep a single Neuron instance"
        )
    for kind, limit in ((NvidiaBoard, COUNT_MAX), (AmdBoard, COUNT_MAX)):
        count = _count(recipe.boards, kind)
        if count > limit:
            raise ConfigError(f"--fake: {count} boards", cure=f"ask for at most {limit} a vendor")


def _count(boards: Iterable[BoardRecipe], kind: type[NvidiaBoard | AmdBoard]) -> int:
    return sum(entry.count for entry in boards if isinstance(BOARDS[entry.board], kind))
