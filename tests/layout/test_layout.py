"""Layout files of both formats against devices: what is chosen, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alloy_agent.errors import ConfigError, PlanImpossibleError
from alloy_agent.layout import choose, read_layout
from alloy_agent.model import Device, DeviceId, Layout, ModeKind, Share
from alloy_agent.planner import plan
from tests.planner.world import cpu, gpu, mi300x, snapshot, trainium

EXAMPLES = Path(__file__).parents[2] / "examples"
# Everything but the Kubernetes manifests, which are no layout files.
LAYOUTS = sorted({*EXAMPLES.rglob("*.yaml")} - {*EXAMPLES.glob("kubernetes/*")})
NODE: tuple[Device, ...] = (
    gpu(index=0),
    gpu(index=1),
    cpu(node=0),
    cpu(node=1),
    mi300x(0),
    trainium(),
)
HEAD = "version: v1\nlayouts:\n  a:\n"
PARTED = "version: v1\nmig-configs:\n  a:\n"


def chosen(text: str, devices: tuple[Device, ...] = NODE, name: str | None = None) -> Layout:
    return choose(read_layout(text, "layout.yaml"), name, devices)


def refusal(text: str, devices: tuple[Device, ...] = NODE, name: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(text, devices, name)
    line = str(caught.value)
    assert "\n" not in line
    return line


def shape(layout: Layout) -> dict[str, list[str]]:
    """Return each device's wish as short texts."""
    return {
        wish.device: [f"{kind}={value}" for kind, value in wish.modes.items()]
        + [
            spec.profile + (f"@{spec.placement.start}" if spec.placement else "")
            for spec in wish.partitions or ()
        ]
        for wish in layout.devices
    }


# --- the native format ---------------------------------------------------------------------------


def test_each_way_of_cutting_a_device_becomes_its_wish() -> None:
    """MIG lists, none, modes, runs with caps, shares: one entry for each device."""
    text = HEAD + (
        "    - match: {vendor: nvidia, index: 0}\n"
        "      mig: [3g.40gb@4, 2g.20gb, 1g.10gb]\n"
        "    - match: {vendor: nvidia, index: 1}\n"
        "      mig: none\n"
        "    - match: {vendor: amd}\n"
        "      compute: cpx\n"
        "      memory: NPS4\n"
        "    - match: {vendor: neuron}\n"
        "      cores: [2, 2, 4]\n"
        "    - match: {vendor: cpu, numa: 0}\n"
        "      cores: [4, 2]\n"
        "      memory: [8GiB, 4294967296]\n"
        "    - match: {vendor: cpu, numa: 1}\n"
        "      cores: []\n"
    )
    layout = chosen(text)
    assert shape(layout) == {
        "GPU-0": ["mig=on", "3g.40gb@4", "2g.20gb", "1g.10gb"],
        "GPU-1": ["mig=off"],
        "amd-0": ["compute=CPX", "memory=NPS4"],
        "neuron-0": ["2c", "2c", "4c"],
        "cpu-0": ["4c", "2c"],
        "cpu-1": [],
    }
    caps = [spec.memory_bytes for spec in layout.devices[4].partitions or ()]
    assert caps == [8 << 30, 4 << 30]
    assert str(layout.devices[1].source) == "layout.yaml:6"


def test_a_shared_device_has_one_piece_for_each_tenant() -> None:
    """All shares lie over the whole device, and MIG is off."""
    layout = chosen(
        HEAD + "    - match: {index: 0, vendor: nvidia}\n      shared: {opportunistic: 2}\n"
    )
    (wish,) = layout.devices
    assert wish.modes == {ModeKind.MIG: "off"}
    assert [(s.profile, s.share, s.ordinal, s.size) for s in wish.partitions or ()] == [
        ("production-0", Share.PRODUCTION, 0, 8),
        ("opportunistic-0", Share.OPPORTUNISTIC, 0, 8),
        ("opportunistic-1", Share.OPPORTUNISTIC, 1, 8),
    ]


@pytest.mark.parametrize(
    "match",
    [
        "uuid: gpu-1",
        "uuid: S-1",
        "bus: '0000:01:00.0'",
        "bus: '00000000:01:00.0'",
        "bus: '01:00.0'",
        "vendor: nvidia, index: 1",
        "model: h100*, uuid: GPU-1",
        "vendor: nvidia, model: '*SXM5*', index: 1",
    ],
)
def test_a_device_is_found_by_each_of_its_names(match: str) -> None:
    """UUID, serial, bus address in any spelling, position, model glob; all must hold."""
    second = replace(gpu(index=1), serial="s-1")
    devices = (gpu(index=0), second, cpu(), replace(mi300x(1), bus="0000:09:00.0"))
    text = HEAD + f"    - match: {{{match}}}\n      mig: [1g.10gb]\n"
    assert list(shape(chosen(text, devices))) == ["GPU-1"]


def test_an_index_that_several_devices_have_is_refused() -> None:
    """Each vendor counts its own: without the vendor nobody's partitions go by a bare number."""
    text = HEAD + "    - match: {index: 0}\n      cores: []\n"
    told = refusal(text, (cpu(), gpu(index=0), gpu(index=1)))
    assert told.startswith("layout.yaml:4: index 0 is that of ")
    assert "GPU-0 (H100-SXM5-80GB) of nvidia" in told
    assert told.endswith(": add the vendor")
    twice = text.replace("{index: 0}", "{vendor: nvidia, index: 0}").replace("cores: []", "mig: []")
    other = replace(gpu(index=0), id=DeviceId("GPU-9"))
    assert refusal(twice, (gpu(index=0), other)).endswith("name one by uuid or bus")
    assert list(shape(chosen(text, (cpu(), gpu(index=1))))) == ["cpu-0"]
    mig_parted = "version: v1\nmig-configs:\n  one:\n    - devices: [0]\n      mig-enabled: false\n"
    assert list(shape(chosen(mig_parted, (cpu(), gpu(index=0), gpu(index=1))))) == ["GPU-0"]


def test_a_model_is_matched_with_or_without_its_maker() -> None:
    """Drivers print the maker in front, people leave it out."""
    device = replace(gpu(), model="NVIDIA H100 80GB HBM3")
    for pattern in ("H100*", "NVIDIA H100*", "h100 80gb*", "*HBM3"):
        text = HEAD + f"    - match: {{model: '{pattern}'}}\n      mig: none\n"
        assert list(shape(chosen(text, (device,)))) == ["GPU-0"]


def test_profiles_are_those_of_the_driver() -> None:
    """A name that a driver reports is taken as it is, and none is derived from a model."""
    odd = replace(gpu(), profiles=(replace(gpu().profiles[0], name="1g.11gb+x.all"),))
    text = HEAD + "    - match: {vendor: nvidia}\n      mig: [{}]\n"
    assert shape(chosen(text.replace("{}", "1g.11gb+x.all"), (odd,)))["GPU-0"][1:] == [
        "1g.11gb+x.all"
    ]
    assert "its profiles are 1g.11gb+x.all" in refusal(text.replace("{}", "1g.10gb"), (odd,))


def test_one_of_several_layouts_is_named() -> None:
    """A single layout needs no name; several do, and a slip gets the nearest."""
    two = "version: v1\nlayouts:\n  day:\n    - {match: {vendor: cpu}, cores: []}\n  night: []\n"
    assert chosen(two, name="night").devices == ()
    assert "day (line 3), night (line 5)" in refusal(two)
    assert "did you mean 'night'?" in refusal(two, name="nigth")


def test_the_digest_is_of_the_content() -> None:
    """Comments do not change it, wishes do."""
    text = HEAD + "    - match: {vendor: cpu, numa: 0}\n      cores: [2]\n"
    first = chosen(text)
    assert first.digest == chosen("# note\n\n" + text).digest
    assert first.digest != chosen(text.replace("[2]", "[3]")).digest
    assert len(first.digest) == 64


ENTRY = "    - match: {vendor: nvidia, index: 0}\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("layouts: {a: []}\n", ("layout.yaml:1", "key 'version' is missing")),
        ("version: v2\nlayouts: {a: []}\n", ("layout.yaml:1: version", "'v2'", "use one of v1")),
        ("version: v1\nlayout: {a: []}\n", ("layout.yaml:2", "'layout'", "did you mean 'layouts'")),
        ("version: v1\nlayouts: {}\n", ("layout.yaml:2", "holds no layout")),
        ("version: v1\nlayouts: {}\nmig-configs: {}\n", ("layout.yaml:3", "line 2", "one file")),
        (HEAD + "    - mig: none\n", ("layout.yaml:4", "'match' is missing")),
        (HEAD + "    - match: {}\n      mig: none\n", ("layout.yaml:4", "is empty")),
        (
            HEAD + "    - match: {vendor: intel}\n      mig: none\n",
            ("layout.yaml:4", "nvidia, amd"),
        ),
        (HEAD + "    - match: {vender: amd}\n      mig: none\n", ("layout.yaml:4", "'vendor'?")),
        (HEAD + ENTRY, ("layout.yaml:4", "asks for nothing")),
        (HEAD + ENTRY + "      mgi: none\n", ("layout.yaml:5", "'mgi'", "did you mean 'mig'?")),
        (
            HEAD + ENTRY + "      mig: none\n      cores: [1]\n",
            ("'cores' (line 6) and 'mig' (line 5)", "cannot be combined"),
        ),
        (
            HEAD + ENTRY + "      mig: []\n      memory: NPS4\n",
            ("'memory' (line 6) and 'mig' (line 5)", "keep one"),
        ),
        (HEAD + ENTRY + "      mig: 3g.40gb\n", ("layout.yaml:5", "no list", "[3g.40gb]")),
        (
            HEAD + ENTRY + "      mig:\n        - 3g.40gb\n        - 9g.90gb\n",
            ("layout.yaml:7: mig[1]", "no profile '9g.90gb'", "1g.10gb, 1g.10gb+me, 1g.20gb"),
        ),
        (HEAD + ENTRY + "      mig: ['3g.40gb@']\n", ("layout.yaml:5: mig[0]", "is no profile")),
        (
            HEAD + ENTRY + "      mig: [3g.40gb@2]\n",
            ("layout.yaml:5: mig[0]", "cannot start at 2", "its starts are 0, 4"),
        ),
        (
            HEAD + ENTRY + "      mig:\n        - 4g.40gb@0\n        - 1g.10gb@3\n",
            ("layout.yaml:7: mig[1]: 1g.10gb@3 overlaps 4g.40gb@0 (line 6)",),
        ),
        (
            HEAD + ENTRY + "      mig:\n        - 4g.40gb\n        - 4g.40gb\n",
            ("layout.yaml:7: mig[1]: 2 x 4g.40gb", "has at most 1"),
        ),
        (
            HEAD + ENTRY + "      mig:\n        - 4g.40gb\n        - 3g.40gb\n        - 1g.10gb\n",
            ("layout.yaml:8: mig[2]: 1g.10gb has no room", "beside 4g.40gb, 3g.40gb", "line 6"),
        ),
        (
            HEAD + ENTRY + "      mig: none\n" + ENTRY + "      mig: []\n",
            ("layout.yaml:6", "two entries for GPU-0", "line 4"),
        ),
        (
            HEAD + "    - match: {vendor: nvidia, index: 5}\n      mig: none\n",
            ("layout.yaml:4: vendor nvidia, index 5 matches no device", "GPU-0 (H100-SXM5-80GB)"),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      mig: none\n",
            ("layout.yaml:5: 'mig' does not apply to cpu-0", "cut by cores"),
        ),
        (HEAD + ENTRY + "      cores: [1]\n", ("layout.yaml:5", "'cores' does not apply to GPU-0")),
        (HEAD + ENTRY + "      compute: CPX\n", ("layout.yaml:5", "does not apply", "use mig")),
        (
            HEAD + "    - match: {vendor: amd}\n      compute: ZPX\n",
            ("layout.yaml:5", "no compute mode 'ZPX'", "SPX, DPX, QPX, CPX"),
        ),
        (
            HEAD + "    - match: {vendor: amd}\n      compute: SPX\n      memory: NPS4\n",
            ("layout.yaml:6: SPX (line 5) does not work with NPS4", "amd-0"),
        ),
        (
            HEAD + "    - match: {vendor: amd}\n      memory: NPS4\n",
            ("layout.yaml:5: SPX does not work with NPS4 (compute stays)",),
        ),
        (
            HEAD + "    - match: {vendor: neuron}\n      cores: [2, 3]\n",
            ("layout.yaml:5: cores[1]", "no runs of 3 cores", "legal are 1, 2, 4, 8"),
        ),
        (
            HEAD + "    - match: {vendor: neuron}\n      cores: [4]\n      memory: [1GiB]\n",
            ("layout.yaml:6", "goes with its cores"),
        ),
        (
            HEAD + "    - match: {vendor: cpu, numa: 0}\n      cores:\n        - 4\n        - 4\n",
            ("layout.yaml:7: cores[1]: 4 behind 4 (from line 6) makes 8 cores", "1 more stay"),
        ),
        (
            HEAD + "    - match: {vendor: cpu, numa: 0}\n      cores: [99]\n",
            ("layout.yaml:5: cores[0]: 99 cores, cpu-0", "has 7 to lend (1 more", "take away 92"),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      cores: [1]\n      memory: [17GiB]\n",
            ("layout.yaml:6: memory[0]: 17GiB is more than the 16GiB of cpu-0", "away 1GiB"),
        ),
        (HEAD + "    - match: {vendor: cpu}\n      cores: [0]\n", ("layout.yaml:5", ">= 1")),
        (
            HEAD + "    - match: {vendor: cpu}\n      cores: [1]\n      memory: [1GiB, 1GiB]\n",
            ("layout.yaml:6", "2 memory sizes for 1 runs", "line 5"),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      cores: [1, 1]\n      memory: [12GiB, 8GiB]\n",
            ("layout.yaml:6: memory[1]: 8GiB behind 12GiB", "the 16GiB of cpu-0", "away 4GiB"),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      cores: [1]\n      memory: [1XB]\n",
            ("layout.yaml:6: memory[0]: '1XB' is not a size",),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      cores: [1]\n      memory: [4096]\n",
            ("layout.yaml:6: memory[0]: 4096 bytes are too few",),
        ),
        (
            HEAD + "    - match: {vendor: cpu}\n      memory: [1GiB]\n",
            ("layout.yaml:5", "without cores"),
        ),
        (
            HEAD + ENTRY + "      shared: {production: 0, opportunistic: 0}\n",
            ("layout.yaml:5", "shared by nobody"),
        ),
        (HEAD + ENTRY + "      shared: {production: 2}\n", ("layout.yaml:5", "<= 1")),
    ],
)
def test_a_wrong_layout_is_refused_with_line_both_sides_and_cure(
    text: str, parts: tuple[str, ...]
) -> None:
    """Nothing is planned, and the line tells where, what with what, and what to do."""
    line = refusal(text)
    for part in parts:
        assert part in line, line


# --- mig-parted's format -------------------------------------------------------------------------


def test_a_mig_parted_file_is_taken_as_it_is() -> None:
    """Filters, positions, counts and the mode mean what they mean there."""
    devices = (gpu("A100-SXM4-40GB", 0), gpu(index=1), gpu(index=2), cpu(), mi300x())
    text = PARTED + (
        '    - device-filter: "0x20B010DE"\n'
        "      devices: all\n"
        "      mig-enabled: true\n"
        '      mig-devices: {"1g.5gb": 2, "3g.20gb": 1}\n'
        '    - device-filter: ["0x20B210DE", 0x2330]\n'
        "      devices: [1]\n"
        "      mig-enabled: false\n"
        "    - device-filter: 0x20B510DE\n"
        "      devices: all\n"
        "      mig-enabled: true\n"
    )
    assert shape(chosen(text, devices)) == {
        "GPU-0": ["mig=on", "1g.5gb", "1g.5gb", "3g.20gb"],
        "GPU-1": ["mig=off"],
    }


def test_all_in_a_mig_parted_file_means_the_gpus() -> None:
    """No other vendor's device is ever meant, and MIG on with no devices is a wish."""
    text = PARTED + "    - {devices: all, mig-enabled: true, mig-devices: {}}\n"
    assert shape(chosen(text)) == {"GPU-0": ["mig=on"], "GPU-1": ["mig=on"]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (PARTED + "    - {devices: some, mig-enabled: true}\n", ("layout.yaml:4", "devices")),
        (PARTED + "    - {devices: all}\n", ("layout.yaml:4", "'mig-enabled' is missing")),
        (PARTED + "    - {devices: all, mig-enabled: yes}\n", ("layout.yaml:4", "true or false")),
        (
            PARTED + "    - {devices: all, mig-enabled: true, mig-device: {}}\n",
            ("layout.yaml:4", "'mig-devices'?"),
        ),
        (
            PARTED
            + "    - devices: all\n      mig-enabled: false\n      mig-devices: {1g.10gb: 1}\n",
            ("layout.yaml:6", "mig-enabled (line 5) is false"),
        ),
        (
            PARTED + "    - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: -1}}\n",
            ("layout.yaml:4: mig-configs.a[0].mig-devices.1g.10gb", ">= 0"),
        ),
        (
            PARTED + "    - devices: all\n      mig-enabled: true\n      mig-devices:\n"
            "        2g.20gb: 1\n        9g.90gb: 1\n",
            ("layout.yaml:8: mig[1]", "'9g.90gb'"),
        ),
        (
            PARTED + "    - {devices: all, mig-enabled: true, device-filter: GPU}\n",
            ("layout.yaml:4", "no PCI id"),
        ),
        (
            PARTED + "    - {devices: all, mig-enabled: true, device-filter: '0x20B010DE'}\n",
            ("layout.yaml:3", "matches no device"),
        ),
        (
            PARTED
            + "    - {devices: all, mig-enabled: true}\n    - {devices: [1], mig-enabled: true}\n",
            ("layout.yaml:5", "two entries for GPU-1", "line 4"),
        ),
        (
            PARTED + "    - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 999}}\n"
            "    - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 99999}}\n",
            ("layout.yaml:5", "<= 1024"),
        ),
    ],
)
def test_a_wrong_mig_parted_file_is_refused_the_same_way(text: str, parts: tuple[str, ...]) -> None:
    """With line, cause and cure, in the words of that format."""
    line = refusal(text)
    for part in parts:
        assert part in line, line


def test_a_device_without_a_pci_id_cannot_be_filtered() -> None:
    """A filter that cannot be judged is no match and no miss, but an error."""
    device = replace(gpu(), pci_id=None)
    text = PARTED + "    - {devices: all, mig-enabled: true, device-filter: '0x233010DE'}\n"
    assert "does not tell its PCI id" in refusal(text, (device,))


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_sample_is_read_and_planned(path: Path) -> None:
    """Each layout of each sample works on the machine that it is written for."""
    text = path.read_text(encoding="utf-8")
    eight = tuple(gpu(index=n) for n in range(8))
    devices = (*(eight if "mig-parted" in str(path) else eight[:1]), *NODE[2:])
    file = read_layout(text, str(path))
    for name in file.layouts:
        layout = choose(file, name, devices)
        assert layout.devices
        assert plan(layout, snapshot(devices)).layout == layout


# --- anything ------------------------------------------------------------------------------------

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70000),
    st.sampled_from(["none", "all", "3g.40gb", "1g.10gb@2", "1g.10gb@99", "8GiB", "CPX", "NPS4"]),
    st.text(max_size=6),
)
MATCHES = st.dictionaries(
    st.sampled_from(["vendor", "model", "uuid", "bus", "index", "numa"]),
    st.sampled_from(["nvidia", "amd", "cpu", "neuron", "H100*", "*", "[", 0, 1, "01:00.0"]),
    max_size=2,
)
ENTRIES = st.dictionaries(
    st.sampled_from(
        ["mig", "compute", "memory", "cores", "shared", "devices", "mig-enabled", "mig-devices"]
    ),
    st.one_of(
        SCALARS,
        st.lists(SCALARS, max_size=4),
        st.dictionaries(st.sampled_from(["production", "opportunistic", "1g.10gb"]), SCALARS),
    ),
    max_size=3,
)


@given(st.lists(st.tuples(MATCHES, ENTRIES), max_size=3), st.booleans())
def test_no_layout_ever_raises_anything_else(
    entries: list[tuple[dict[str, Any], dict[str, Any]]], parted: bool
) -> None:
    """Nearly right files become a layout that can be planned, or one line that says why not."""
    rows = [entry if parted else {"match": match, **entry} for match, entry in entries]
    document = {"version": "v1", "mig-configs" if parted else "layouts": {"a": rows}}
    told = "planned"
    try:
        layout = chosen(json.dumps(document))
        plan(layout, snapshot(NODE))
    except (ConfigError, PlanImpossibleError) as error:
        told = str(error)
    assert "\n" not in told


@given(st.lists(st.sampled_from(gpu().profiles), max_size=8), st.data())
def test_what_is_chosen_can_always_be_planned(profiles: list[Any], data: st.DataObject) -> None:
    """The reader and the planner agree on what fits a board."""
    names = [
        profile.name
        + (f"@{data.draw(st.sampled_from(profile.starts))}" if data.draw(st.booleans()) else "")
        for profile in profiles
    ]
    text = HEAD + f"    - match: {{uuid: GPU-0}}\n      mig: {names}\n"
    try:
        layout = chosen(text)
    except ConfigError:
        return
    made = plan(layout, snapshot((gpu(),)))
    assert made.cost.steps == len(names)
    assert all(wish.device == DeviceId("GPU-0") for wish in layout.devices)
