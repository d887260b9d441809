"""What `--fake` takes: names, instances, a mixture, files; one line for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import ConfigError
from alloy_agent.silicon.boards import BOARDS
from alloy_agent.silicon.build import digest, open_machine
from alloy_agent.silicon.spec import parse_spec, parse_specs
from tests.silicon.conftest import machine_of

NODE = """
seed: 7
kfd_busy_scope: node
boards:
  - {board: h100, count: 2, instances: [3g.40gb@0, 1g.10gb]}
  - {board: MI300X, count: 8, compute: CPX, memory: NPS4}
  - {board: trn2.3xlarge, lnc: 1}
processes:
  - {pid: 4711, device: "#0", instance: 1, load_ratio: 0.8, memory_bytes: 1073741824}
faults:
  - {call: "gpu.create_compute_instance", device: "#1", error: unknown, times: 1}
"""


@pytest.mark.parametrize(
    ("spec", "board", "count"),
    [
        ("8xH100-SXM5-80GB", "H100-SXM5-80GB", 8),
        ("8xH100", "H100-SXM5-80GB", 8),
        ("8Xh100", "H100-SXM5-80GB", 8),
        ("1xA100-SXM4-40GB", "A100-SXM4-40GB", 1),
        ("A30", "A30-24GB", 1),
        ("8xMI300X", "MI300X", 8),
        ("trn2.48xlarge", "trn2.48xlarge", 1),
        ("1xtrn1.2xlarge", "trn1.2xlarge", 1),
        (" 2xb200 ", "B200-180GB", 2),
    ],
)
def test_boards_by_name_and_alias(spec: str, board: str, count: int) -> None:
    """A count and a name or alias in any case."""
    (entry,) = parse_spec(spec).boards
    assert (entry.board, entry.count) == (board, count)


def test_every_board_opens() -> None:
    """Each table makes a machine with unique ids, addresses and serials."""
    for name in BOARDS:
        machine = machine_of(name)
        assert machine.state.devices
        for field in ("id", "bus", "serial", "uuid"):
            values = [getattr(device, field) for device in machine.state.devices]
            assert len(set(values)) == len(values), field


def test_mixed_has_every_vendor() -> None:
    """`mixed` is a node with devices of all three vendors."""
    recipe = parse_specs(["mixed"])
    assert {type(BOARDS[entry.board]).__name__ for entry in recipe.boards} == {
        "NvidiaBoard",
        "AmdBoard",
        "NeuronInstance",
    }


def test_several_options_make_one_node() -> None:
    """`--fake` may be given again; all boards are on one node, with different ids."""
    machine = machine_of("2xH100", "1xA100", "2xMI300X")
    assert len({device.id for device in machine.state.devices}) == 5
    assert [device.index for device in machine.state.devices] == [0, 1, 2, 3, 4]


def test_ids_are_deterministic() -> None:
    """The same specification gives the same ids, another seed others."""
    one = [device.id for device in machine_of("2xH100").state.devices]
    assert one == [device.id for device in machine_of("2xH100").state.devices]
    assert digest(parse_specs(["2xH100"])) != digest(parse_specs(["3xH100"]))


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("8xH1000", "H100-SXM5-80GB"),
        ("MI300Z", "MI300X"),
        ("trn2.xlarge", "trn2"),
        ("1xzzzzzzzz", "name one of"),
        ("", "name one of"),
        ("0xH100", "1 to 64"),
        ("65xH100", "1 to 64"),
        ("2xtrn2.48xlarge", "single"),
    ],
)
def test_what_is_unknown_names_what_is_near(spec: str, hint: str) -> None:
    """One line with the option and near matches."""
    with pytest.raises(ConfigError) as raised:
        parse_specs([spec])
    assert hint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_describes_a_whole_node(tmp_path: Path) -> None:
    """Boards in their modes, instances made before, processes, faults."""
    path = tmp_path / "node.yaml"
    path.write_text(NODE)
    machine = open_machine(parse_specs([str(path)]))
    devices = machine.state.devices
    assert len(devices) == 11
    assert [(e.start, len(e.compute)) for e in devices[0].instances] == [(0, 1), (4, 1)]
    assert {(d.compute_mode, d.memory_mode) for d in devices[2:10]} == {("CPX", "NPS4")}
    assert devices[10].lnc == 1
    assert machine.state.clients[0].pid == 4711
    assert machine.state.faults[0].fault.device == "#1"
    assert machine.state.kfd_busy_scope == "node"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("boards: []", "no boards"),
        ("boards: [{board: H100, cuont: 2}]", "cuont"),
        ("boards: [{board: H1000}]", "no such board"),
        ("boards: [{board: H100, count: 0}]", "count"),
        ("boards: [{board: H100, instances: [9g.80gb]}]", "9g.80gb"),
        ("boards: [{board: H100, instances: [3g.40gb@2]}]", "3g.40gb"),
        ("boards: [{board: H100, instances: [7g.80gb, 1g.10gb]}]", "insufficient"),
        ("boards: [{board: MI300X, compute: TPX}]", "TPX"),
        ("boards: [{board: MI300X, memory: NPS3}]", "NPS3"),
        ("boards: [{board: trn1.2xlarge, lnc: 2}]", "configuration 2"),
        ("boards: [{board: H100}]\nprocesses: [{pid: 1, device: '#4'}]", "#4"),
        ("boards: [{board: H100}]\nfaults: [{action: explode}]", "explode"),
        ("boards: [", "YAML"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, cause: str) -> None:
    """Each slip is named with its cause and a cure, before any device exists."""
    path = tmp_path / "node.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        open_machine(parse_specs([str(path)]))
    assert cause.lower() in str(raised.value).lower()
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        parse_specs([str(tmp_path / "none.yaml")])


def _complaint(specs: list[str]) -> str:
    """Return what is wrong with a specification; empty when it makes a machine."""
    try:
        open_machine(parse_specs(specs))
    except ConfigError as error:
        return str(error)
    return ""


@given(st.text(max_size=60))
def test_any_option_is_a_recipe_or_one_line(text: str) -> None:
    """No option, however odd, ends in anything but a recipe or a `ConfigError`."""
    assert len(_complaint([text]).splitlines()) <= 1


YAML_BITS = st.sampled_from(
    ["boards", "board", "H100", ":", "-", " ", "\n", "[", "]", "{", "}", ",", "count", "1", "&a",
     "*a", "<<", "faults", "mig", "true", "null", "'", '"', "#", "|", "!!python/object", "\t", "~"]
)  # fmt: skip


@given(st.lists(YAML_BITS, max_size=40).map("".join))
def test_any_file_is_a_machine_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """No file, however broken, ends in anything but a machine or a `ConfigError`."""
    path = tmp_path_factory.mktemp("fuzz") / "node.yaml"
    path.write_text(text)
    assert len(_complaint([str(path)]).splitlines()) <= 1
