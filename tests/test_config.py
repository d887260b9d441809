"""Settings: their sources in order, their bounds, and where each refusal points."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.config import (
    BrainSettings,
    Enable,
    Settings,
    find_config,
    read_settings,
    setting_names,
    unknown_variables,
    variable_of,
)
from alloy_agent.errors import ConfigError

EXAMPLE = Path(__file__).parents[1] / "docs" / "config.example.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "agent.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str = "", **sources: Any) -> str:
    """Return the one line with which settings are refused, without the directory."""
    with pytest.raises(ConfigError) as caught:
        read_settings(write(tmp_path, text), sources.get("environ"), sources.get("overrides"))
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix(f"{tmp_path}/")


def test_without_any_source_every_setting_has_its_default() -> None:
    """No file is needed; the node is called as the host."""
    settings = read_settings(None)
    assert settings.node_name == os.uname().nodename
    assert settings.state_dir == "/var/lib/alloy"
    assert settings.metrics.address == "127.0.0.1:9464"
    assert settings.cpu.reserved_cores == (0,)
    assert settings.sampler.rate_hz == 10


def test_the_example_shows_every_setting_at_its_default() -> None:
    """The annotated example is complete and true."""
    assert read_settings(EXAMPLE) == read_settings(None)
    text = EXAMPLE.read_text(encoding="utf-8")
    for name in setting_names():
        key = name.rpartition(".")[2]
        assert re.search(rf"^ *{key}: .", text, re.MULTILINE), f"{name} is not in the example"


def test_every_key_of_the_example_is_explained() -> None:
    """No setting stands there without a word, but for pairs that share one."""
    bare = [
        line.strip()
        for line in EXAMPLE.read_text(encoding="utf-8").splitlines()
        if re.match(r" *[a-z_]+: .", line) and "#" not in line
    ]
    alone = {"state_dir", "address", "nvidia", "amd", "neuron", "cpu", "tls_key_file"}
    alone |= {"certificate_file", "key_file"}
    assert {line.partition(":")[0] for line in bare} <= alone


def test_later_sources_win(tmp_path: Path) -> None:
    """File, then environment, then command line."""
    path = write(tmp_path, "log: {level: warning, format: json}\nsampler: {rate_hz: 20}\n")
    settings = read_settings(
        path,
        {"ALLOY_LOG_LEVEL": "error", "ALLOY_CPU_RESERVED_CORES": "0, 1", "ALLOY_FAKE": "a,b"},
        {"log.level": "debug", "audit.events": "false", "sampler.burst_rate_hz": 50},
    )
    assert (settings.log.level, settings.log.format) == ("debug", "json")
    assert settings.sampler.rate_hz == 20
    assert settings.sampler.burst_rate_hz == 50
    assert settings.cpu.reserved_cores == (0, 1)
    assert settings.fake == ("a", "b")
    assert settings.audit.events is False


def test_units_work_in_every_source(tmp_path: Path) -> None:
    """Durations and sizes are texts or plain numbers, wherever they stand."""
    path = write(tmp_path, "observe: {period_s: 250ms, call_deadline_s: 3}\n")
    settings = read_settings(path, {"ALLOY_AUDIT_ROTATE_BYTES": "1MiB"}, {"audit.period_s": "2m"})
    assert settings.observe.period_s == 0.25
    assert settings.observe.call_deadline_s == 3
    assert settings.audit.rotate_bytes == 1 << 20
    assert settings.audit.period_s == 120


def test_settings_cannot_change() -> None:
    """They are read once."""
    settings = read_settings(None)
    with pytest.raises(AttributeError):
        settings.node_name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "start", "words"),
    [
        ("log:\n  levle: info\n", "agent.yaml:2: log: unknown key 'levle'", "'level'"),
        ("log:\n  level: loud\n", "agent.yaml:2: log.level: unknown value", "debug, error"),
        ("observe:\n  period_s: 1ms\n", "agent.yaml:2: observe.period_s", ">= 0.05"),
        ("observe:\n  period_s: 2h\n", "agent.yaml:2: observe.period_s", "<= 3600"),
        ("sampler:\n  rate_hz: true\n", "agent.yaml:2: sampler.rate_hz", "true or false"),
        ("sampler:\n  rate_hz: .nan\n", "agent.yaml:2: .nan", "finite"),
        ("cpu:\n  reserved_cores: [0, -1]\n", "agent.yaml:2: cpu.reserved_cores[1]", ">= 0"),
        ("cpu:\n  cgroup_root: ../x\n", "agent.yaml:2: cpu.cgroup_root", "'../x'"),
        ("state_dir: here\n", "agent.yaml:1: state_dir", "absolute path"),
        ("socket_path: /" + "x" * 200 + "\n", "agent.yaml:1: socket_path", "107"),
        ("backends: {cpu: yes}\n", "agent.yaml:1: backends.cpu", "auto, on, off"),
        ("log: {}\nlog: {}\n", "agent.yaml:2: key 'log'", "line 1"),
        ("- a\n", "agent.yaml:1: expected a mapping", "list"),
        ("metrics:\n  address: here\n", "agent.yaml:2: metrics.address", "host:port"),
        ("metrics:\n  address: a:99999\n", "agent.yaml:2: metrics.address", "host:port"),
        ("metrics:\n  tls_key_file: /k\n", "agent.yaml:2: metrics.tls_key_file", "certificate"),
        ("brain:\n  address: brain:1\n", "agent.yaml:2: brain.address", "brain.insecure"),
        ("brain:\n  spiffe_id: x\n", "agent.yaml:2: brain.spiffe_id", "spiffe"),
        ("sampler:\n  rate_hz: 150\n", "agent.yaml:2: sampler.rate_hz", "burst_rate_hz 100"),
        ("observe:\n  restart_max_s: 100ms\n", "agent.yaml:2: observe.restart_max_s", "0.2"),
        ("layout:\n  name: a\n", "agent.yaml:2: layout.name", "layout.file"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(
    tmp_path: Path, text: str, start: str, words: str
) -> None:
    """File, line, path, cause and cure in one line."""
    line = refusal(tmp_path, text)
    assert line.startswith(start), line
    assert words in line


def test_a_wrong_variable_or_option_is_named_as_the_source(tmp_path: Path) -> None:
    """The line tells where the value came from, not where it would stand in the file."""
    line = refusal(tmp_path, "log:\n  level: info\n", environ={"ALLOY_LOG_LEVEL": "x"})
    assert line.startswith("environment ALLOY_LOG_LEVEL: log.level: unknown value 'x'")
    line = refusal(tmp_path, overrides={"sampler.rate_hz": "many"})
    assert line.startswith("command line sampler.rate_hz: sampler.rate_hz: expected a number")
    line = refusal(tmp_path, overrides={"log.levl": "info"})
    assert "did you mean 'log.level'?" in line


def test_a_brain_off_loopback_needs_mutual_tls_or_consent(tmp_path: Path) -> None:
    """Plain text stays on the machine unless somebody says otherwise."""
    for address in ("127.0.0.1:7443", "localhost:1", "[::1]:1", "unix:/run/brain.sock"):
        path = write(tmp_path, f"brain: {{address: '{address}'}}\n")
        assert read_settings(path).brain.address == address
    path = write(tmp_path, "brain: {address: 'brain:7443', insecure: true}\n")
    assert read_settings(path).brain.insecure
    keys = "ca_file: /c, certificate_file: /d, key_file: /k"
    path = write(tmp_path, f"brain: {{address: 'brain:7443', {keys}}}\n")
    assert read_settings(path).brain == BrainSettings(
        address="brain:7443", ca_file="/c", certificate_file="/d", key_file="/k"
    )
    line = refusal(tmp_path, "brain: {address: '127.evil.example:1'}\n")
    assert "not on loopback" in line


def test_an_empty_section_keeps_its_defaults(tmp_path: Path) -> None:
    """A heading whose keys are all commented out is no mistake."""
    path = write(tmp_path, "log:\n  # level: debug\nbackends: {cpu: off}\n")
    settings = read_settings(path)
    assert settings.log == Settings().log
    assert settings.backends.cpu is Enable.OFF


def test_variables_of_service_discovery_are_not_settings() -> None:
    """A pod beside a service `alloy-brain` starts, and a slip is still found."""
    environ = {
        "ALLOY_BRAIN_PORT": "tcp://10.0.0.1:80",
        "ALLOY_BRAIN_SERVICE_HOST": "10.0.0.1",
        "ALLOY_AGENT_PORT_80_TCP_ADDR": "10.0.0.1",
        "ALLOY_LOG_LEVL": "debug",
        "PATH": "/bin",
    }
    assert read_settings(None, environ) == read_settings(None)
    assert unknown_variables(environ) == (("ALLOY_LOG_LEVL", "ALLOY_LOG_LEVEL"),)


def test_cpus_that_this_host_cannot_have_are_not_reserved(tmp_path: Path) -> None:
    """A CPU that is not there would keep nothing: refused with file, line and the true range."""
    path = write(tmp_path, "cpu:\n  reserved_cores:\n    - 0\n    - 65000\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert f"{path}:4: cpu.reserved_cores[1]: this host has no CPU 65000" in str(caught.value)
    assert "0 to" in caught.value.cure
    with pytest.raises(ConfigError, match="environment ALLOY_CPU_RESERVED_CORES"):
        read_settings(None, {"ALLOY_CPU_RESERVED_CORES": "0,65000"})
    off = write(tmp_path, "backends: {cpu: off}\ncpu: {reserved_cores: [65000]}\n")
    assert read_settings(off).cpu.reserved_cores == (65000,)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ALLOY_LOG_LEVL", "ALLOY_LOG_LEVEL"),
        ("ALLOY_STATEDIR", "ALLOY_STATE_DIR"),
        ("ALLOY_CPU_RESERVED_CORE", "ALLOY_CPU_RESERVED_CORES"),
        ("alloy_log_level", "ALLOY_LOG_LEVEL"),
        ("ALLOY_BACKEND_CPU", "ALLOY_BACKENDS_CPU"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_right_one(variable: str, meant: str) -> None:
    """What looks like a setting and is none is named, with the setting that was meant."""
    assert unknown_variables({variable: "1"}) == ((variable, meant),)


def test_variables_of_tenants_are_no_slips() -> None:
    """What the agent hands to tenants is not taken for a misspelt setting of its own."""
    given = ("ALLOY_GATE_ROLE", "ALLOY_PARTITION", "ALLOY_PARTITIONS", "ALLOY_CLAIM_UID")
    assert unknown_variables(dict.fromkeys(given, "1")) == ()


def test_every_setting_has_a_variable_of_its_own() -> None:
    """No two settings are set by one variable, and none looks like service discovery."""
    names = [variable_of(name) for name in setting_names()]
    assert len(names) == len(set(names))
    assert not any(name.endswith(("_PORT", "_SERVICE_HOST")) for name in names)


def test_the_file_is_the_given_one_else_the_variable(tmp_path: Path) -> None:
    """The option wins over ALLOY_CONFIG."""
    assert find_config("/a.yaml", {"ALLOY_CONFIG": "/b.yaml"}) == Path("/a.yaml")
    assert find_config(None, {"ALLOY_CONFIG": "/b.yaml"}) == Path("/b.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        read_settings(tmp_path / "none.yaml")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1s", "8GiB", "auto", "debug", "/x", "1.2.3.4:5"]),
    st.lists(st.integers(), max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(setting_names())), VALUES, max_size=4))
def test_no_override_ever_raises_anything_else(overrides: dict[str, Any]) -> None:
    """Whatever the values, they are taken or refused in one line."""
    told = "taken"
    try:
        read_settings(None, {}, overrides)
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told


@given(
    st.dictionaries(
        st.sampled_from(sorted(variable_of(name) for name in setting_names())),
        st.text(max_size=12),
        max_size=4,
    )
)
def test_no_variable_ever_raises_anything_else(environ: dict[str, str]) -> None:
    """Whatever the environment, it is taken or refused in one line."""
    told = "taken"
    try:
        read_settings(None, environ)
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told
