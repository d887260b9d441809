"""CU masks, the `gpu_metrics` table, queue descriptors and device rules, each read strictly."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.backends.amd import fence, mqd
from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.masks import Mask, MaskPlan, check, encode, parse
from alloy_agent.backends.amd.metrics import (
    LAYOUTS,
    Accumulator,
    busy_ratio,
    power_w,
    temperature_c,
)
from alloy_agent.backends.amd.metrics import parse as table
from alloy_agent.backends.amd.topology import KfdNode
from alloy_agent.errors import BackendError, ConfigError
from alloy_agent.model import Share

NODES = st.sampled_from([1, 2, 4, 6, 8])


def node(xccs: int, per_xcc: int, gfx: int = 90402) -> KfdNode:
    """Return a node with so many CUs on each XCC."""
    return KfdNode(number=2, gpu_id=9, gfx=gfx, xccs=xccs, cus=xccs * per_xcc, render_minor=128)


# --- masks ---


@given(xccs=NODES, each=st.integers(1, 10), slots=st.integers(1, 4), gpus=st.integers(1, 3))
def test_every_plan_gives_equal_disjoint_masks(xccs: int, each: int, slots: int, gpus: int) -> None:
    """Each XCC has equally many CUs of each tenant, none two tenants, none that is not there."""
    plan = MaskPlan.of_nodes((node(xccs, 38),) * gpus, each, slots)
    if each * slots >= 38:
        with pytest.raises(ConfigError, match="leave production none"):
            plan.of(Share.PRODUCTION, 0)
        return
    made = [plan.of(Share.PRODUCTION, 0)]
    made += [plan.of(Share.OPPORTUNISTIC, number) for number in range(slots)]
    masks = [mask for mask in made if isinstance(mask, Mask)]
    assert len(masks) == slots + 1
    taken: set[int] = set()
    for mask in masks:
        assert not taken & mask.bits
        taken |= mask.bits
        counts = {sum(bit % xccs == xcc for bit in mask.bits) for xcc in range(xccs)}
        assert len(counts) == 1
        assert min(counts) >= 1
        assert max(mask.bits) < xccs * 38
        assert parse(mask.text) == dict.fromkeys(range(gpus), mask.bits)
    assert taken == set(range(xccs * 38))


@given(xccs=NODES, bits=st.frozensets(st.integers(0, 400), max_size=64))
def test_a_mask_is_refused_or_reads_back(xccs: int, bits: frozenset[int]) -> None:
    """Whatever bits are asked for: either a rule refuses them, or the text means just them."""
    cus = xccs * 38
    counts = [sum(bit % xccs == xcc for bit in bits) for xcc in range(xccs)]
    legal = bits and max(bits) < cus and min(counts) == max(counts) > 0
    if legal:
        assert parse(encode({0: bits}, xccs, cus)) == {0: bits}
    else:
        with pytest.raises(ConfigError):
            encode({0: bits}, xccs, cus)


@given(place=st.integers(0, 20), junk=st.sampled_from(list(";:,-xg!_.+/\\@é")))
def test_one_wrong_character_anywhere_never_reads_as_the_mask(place: int, junk: str) -> None:
    """The runtime would give the whole GPU; here it is refused, or plainly another mask."""
    good = "0:0-15,32-47;1:0-15"
    bad = good[:place] + junk + good[place:]
    try:
        found = parse(bad)
    except ConfigError:
        return
    assert found != parse(good)


@given(text=st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No input raises anything else."""
    try:
        found = parse(text)
    except ConfigError:
        return
    assert all(found.values())


def test_what_the_runtime_ignores_is_refused() -> None:
    """A repeated GPU, an empty mask, an empty set and a reversed range are all mistakes."""
    for text in ("0:0-37;;", "0:0-3;0:4-7", "0:0x0", "", "0:7-3", "0:", "a:0-3", "0:0-5000"):
        with pytest.raises(ConfigError):
            parse(text)
    assert parse(" 0 , 1 : 0xf ") == {0: frozenset(range(4)), 1: frozenset(range(4))}


def test_halves_of_pairs_are_refused_where_the_hardware_does() -> None:
    """From gfx10 on CUs come in pairs; CDNA has none."""
    check(frozenset({0}), 1, 38, gfx=90402)
    check(frozenset({2, 3}), 1, 40, gfx=100300)
    with pytest.raises(ConfigError, match="pair"):
        check(frozenset({1, 2}), 1, 40, gfx=100300)


def test_fewer_cus_than_xccs_is_refused_with_the_reason() -> None:
    """An XCC without a CU hangs the queue: the message says so."""
    with pytest.raises(ConfigError, match="hangs the queue"):
        encode({0: frozenset(range(7))}, 8, 304)


# --- gpu_metrics ---


def made(revision: int, size: int | None = None, **values: int) -> bytes:
    """Return a table in which all but the given fields are absent."""
    layout = LAYOUTS[revision]
    raw = bytearray(b"\xff" * (size or layout.sizes[-1]))
    struct.pack_into("<HBB", raw, 0, size or layout.sizes[-1], 1, revision)
    for name, value in values.items():
        kind, at = layout.fields[name]
        struct.pack_into(f"<{kind}", raw, at, value)
    return bytes(raw)


@pytest.mark.parametrize("revision", sorted(LAYOUTS))
def test_a_table_gives_what_is_in_it_and_none_for_the_rest(revision: int) -> None:
    """All ones in a field's own width is absent, whatever the width."""
    found = table(made(revision, temperature_hotspot=61, energy_accumulator=5 << 16))
    assert found.get("temperature_hotspot") == 61
    assert found.get("energy_accumulator") == 5 << 16
    assert found.get("system_clock_counter") is None
    assert found.get("average_umc_activity") is None
    assert all(value is None for row in found.busy_inst for value in row)


@pytest.mark.parametrize("revision", sorted(LAYOUTS))
def test_fields_lie_inside_and_apart(revision: int) -> None:
    """No two fields of a layout overlap, and the rows of partitions end within the table."""
    layout = LAYOUTS[revision]
    taken: set[int] = set(range(4))
    for kind, at in layout.fields.values():
        here = set(range(at, at + struct.calcsize(kind)))
        assert at % struct.calcsize(kind) == 0
        assert not taken & here
        taken |= here
    for size, step in zip(layout.sizes, layout.xcp_sizes, strict=False):
        assert layout.xcp_at + 8 * step <= size
        assert max(taken) < layout.xcp_at


@pytest.mark.parametrize("revision", sorted(LAYOUTS))
@given(data=st.data())
def test_any_wrong_length_is_refused(revision: int, data: st.DataObject) -> None:
    """A cut file, a longer one and a wrong size in the header never give a number."""
    good = made(revision)
    cut = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:cut], good + b"\0" * 8, struct.pack("<H", cut) + good[2:]):
        with pytest.raises(BackendError):
            table(bad)


def test_a_body_of_another_revision_is_refused() -> None:
    """A 1.8 header on a 1.5 body, an old format and a self-describing table are all unknown."""
    body = made(5)
    for header in ((len(body), 1, 8), (len(body), 2, 5), (len(body), 1, 9), (len(body), 0, 0)):
        with pytest.raises(BackendError, match=r"revision|says"):
            table(struct.pack("<HBB", *header) + body[4:])


@given(raw=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Noise never raises anything but a refusal."""
    with pytest.raises(BackendError):
        table(raw + b"\0")


def test_both_lengths_of_the_newest_table_are_known() -> None:
    """The element of 1.8 has two sizes; a partition's row is found in each."""
    for size, step in zip(LAYOUTS[8].sizes, LAYOUTS[8].xcp_sizes, strict=True):
        raw = bytearray(made(8, size))
        struct.pack_into("<I", raw, 344 + 3 * step, 50)
        assert busy_ratio(table(bytes(raw)).busy_inst[3]) == 0.5


def test_impossible_readings_are_no_readings() -> None:
    """Zero watts, twice the cap, 200 degrees and 300 per cent were not measured."""
    assert power_w(table(made(6, current_socket_power=0)), 750.0) is None
    assert power_w(table(made(6, current_socket_power=1600)), 750.0) is None
    assert power_w(table(made(3, average_socket_power=300)), 300.0) == 300.0
    assert temperature_c(table(made(6, temperature_hotspot=200))) is None
    assert temperature_c(table(made(6, temperature_hotspot=0))) is None
    assert busy_ratio((300, None)) is None
    assert busy_ratio((100, 0, None)) == 0.5


def test_energy_follows_ticks_and_drops_jumps() -> None:
    """Ticks become joules; a wrap is followed; a step back or a spike is dropped and counted."""
    energy = Accumulator(2.0**-16, width=32, rate_max=750.0 * 1.5)
    energy.add(0, 0.0)
    assert energy.add(65536 * 500, 1.0) == pytest.approx(500.0)
    assert energy.add(100, 2.0) == pytest.approx(500.0)
    assert energy.rejected == 1
    assert energy.add(100 + 65536 * 300, 3.0) == pytest.approx(800.0)
    assert energy.add(100 + 65536 * 300 * 150, 4.0) == pytest.approx(800.0)
    assert energy.rejected == 2
    wrapping = Accumulator(1.0, width=32)
    wrapping.add((1 << 32) - 10, 0.0)
    before = wrapping.total
    assert wrapping.add(20, 1.0) - before == 30


@given(readings=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=30))
def test_a_sum_only_grows(readings: list[int]) -> None:
    """Whatever the counter does, what is exported never falls."""
    energy = Accumulator(2.0**-16, rate_max=1000.0)
    totals = [energy.add(raw, float(second)) for second, raw in enumerate(readings)]
    assert totals == sorted(totals)


# --- queue descriptors ---


def dump(words: dict[int, int], size: int = 2048) -> str:
    """Return a hex dump as debugfs prints it: 32 bytes a line."""
    values = [words.get(at, 0) for at in range(0, size, 4)]
    return "".join(
        f"    {at * 4:08x}: {' '.join(f'{v:08x}' for v in values[at : at + 8])}\n"
        for at in range(0, len(values), 8)
    )


def test_mask_words_of_every_xcc_are_found() -> None:
    """Each process's queues on our nodes, one row an XCC; other devices and queues are left out."""
    ours = dump({92: 0xFFFF, 96: 0xFF, 104: 0x1, 108: 0x3})
    text = (
        "Process 41 PASID 0x8001:\n  Compute queue on device 9\n"
        + ours
        + dump({92: 0xFFFFFFFF})
        + "  Compute queue on device abc\n"
        + dump({})
        + "  SDMA queue on device 9\n"
        + dump({})
        + "Process 42 PASID 0x8002:\n  Compute queue on device 9\n"
        + dump({92: 7})
    )
    found = mqd.parse(text, {9})
    assert found == {
        41: ((0xFFFF, 0xFF, 1, 3), (0xFFFFFFFF, 0, 0, 0)),
        42: ((7, 0, 0, 0),),
    }


def test_a_descriptor_of_another_size_cannot_be_judged() -> None:
    """An unknown layout is unknown, never read at the old offsets."""
    with pytest.raises(ValueError, match="bytes"):
        mqd.parse("Process 1 PASID 1:\n  Compute queue on device 9\n" + dump({}, 1024), {9})
    masks = mqd.read(Files(), Roots(debug="/nowhere"), (node(1, 38),))
    assert masks.of(1) is None
    assert "/nowhere" in masks.reason
    assert mqd.read(Files(), Roots(), (node(1, 38, gfx=120000),)).reason


@given(text=st.text(alphabet="Proces 0123456789abcdef:\nComputequeondvi", max_size=300))
def test_any_dump_is_read_or_refused(text: str) -> None:
    """Debugfs text of any shape raises nothing but ValueError."""
    try:
        mqd.parse(text, {9})
    except ValueError:
        return


# --- device rules ---


def rules_of(listed: str) -> Callable[[int], fence.Rules | None]:
    """Return a reader of rules over one v1 devices cgroup."""

    class Tenant(Files):
        def data(self, path: str, limit: int = 65536) -> bytes:
            contents = {
                "/proc/7/cgroup": "5:devices:/t\n0::/t\n",
                "/proc/self/mountinfo": "31 1 0:31 / /cg1 rw - cgroup cgroup rw,devices\n",
                "/cg1/t/devices.list": listed,
                "/sys/class/kfd/kfd/dev": "234:0\n",
            }
            if path not in contents:
                raise FileNotFoundError(2, "No such file or directory", path)
            return contents[path].encode()[:limit]

        def names(self, path: str) -> list[str]:
            return ["renderD128", "renderD129"] if path == "/dev/dri" else []

    return fence.Fences(Tenant(), Roots()).of


def test_rules_name_the_nodes_they_open() -> None:
    """Minors become nodes; a wildcard opens all render nodes; everything open is no fence."""
    own = rules_of("c 1:3 rwm\nc 234:0 rw\nc 226:129 rw\n")(7)
    assert own is not None
    assert own.allowed == ("/dev/null", "/dev/kfd", "/dev/dri/renderD129")
    assert own.by
    wide = rules_of("c 226:* rw\n")(7)
    assert wide is not None
    assert set(wide.allowed) == {"/dev/dri/renderD128", "/dev/dri/renderD129"}
    assert rules_of("a *:* rwm\n")(7) == fence.Rules(by="", allowed=("*",))
    mknod = rules_of("c *:* m\nc 226:128 rw\n")(7)
    assert mknod is not None
    assert mknod.allowed == ("/dev/dri/renderD128",)


def test_rules_that_cannot_be_understood_are_unknown() -> None:
    """A line of another form, or a process that is gone, is no fence and no pass."""
    assert rules_of("what is this\n")(7) is None
    assert rules_of("c 226:128 rw\n")(8) is None
