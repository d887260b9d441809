"""`alloy-agent top` in a real terminal: tmux draws it, presses keys, shows what stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import DaemonProcess, Site, daemon, wait_for

LAYOUT = """version: v1
layouts:
  full:
    - match: {vendor: nvidia}
      mig: [1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb]
"""
TMUX = shutil.which("tmux") or ""
pytestmark = pytest.mark.skipif(not TMUX, reason="no tmux here: apt-get install tmux")


class Terminal:
    """A terminal of a size, in which one command runs."""

    def __init__(self, site: Site, size: tuple[int, int], **environment: str) -> None:
        self._socket = f"alloy-{uuid.uuid4().hex[:10]}"
        self.environment = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **environment}
        self._site = site
        self._size = size

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            [TMUX, "-L", self._socket, "-f", "/dev/null", *words],
            env={**self._site.environment, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def start(self, *words: str) -> None:
        """Run a command; what it returns stands behind its last picture."""
        command = shlex.join(self._site.command(*words))
        term = self.environment.get("TERM")
        inner = f"TERM={term} {command}" if term else command
        width, height = self._size
        self._tmux(
            "new-session", "-d", "-x", str(width), "-y", str(height),
            f"{inner}; echo ended with $?; sleep 3600",
        )  # fmt: skip

    def press(self, *keys: str) -> None:
        """Press keys, by tmux' names."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Change the size under the program."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def text(self, *, styled: bool = False) -> str:
        """Return what stands there."""
        return self._tmux("capture-pane", "-p", *(["-e"] if styled else []))

    def wait(self, pattern: str) -> str:
        """Return what stands there once it matches; `^` is the start of any line."""

        def look() -> str:
            text = self.text()
            return text if re.search(pattern, text, re.MULTILINE) else ""

        found: str = wait_for(f"{pattern} in\n{self.text()}", look)
        return found

    def close(self) -> None:
        """End the terminal and all in it."""
        subprocess.run([TMUX, "-L", self._socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    """Give a daemon of two devices with seven partitions each."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    site = Site(tmp_path, "2xH100-SXM5-80GB")
    with daemon(site, ALLOY_LAYOUT_FILE=str(layout)) as process:
        wait_for("the partitions", lambda: len(site.partitions()) == 14)
        yield process


@pytest.fixture
def terminals(running: DaemonProcess) -> Iterator[list[Terminal]]:
    """Give a list whose terminals are closed at the end."""
    made: list[Terminal] = []
    yield made
    for one in made:
        one.close()


def opened(
    running: DaemonProcess,
    terminals: list[Terminal],
    *words: str,
    size: tuple[int, int] = (80, 24),
    **environment: str,
) -> Terminal:
    """Give a terminal in which `top` runs."""
    made = Terminal(running.site, size, **environment)
    terminals.append(made)
    made.start("top", *words)
    return made


def test_every_key_works_at_80_columns(running: DaemonProcess, terminals: list[Terminal]) -> None:
    """Rows, views, help, order, filter and the way out; nothing is cut, nothing wraps."""
    top = opened(running, terminals, "--interval", "0.1")
    shown = top.wait(r"^#1 1g.10gb@6 +- .* \d+% .*(open|unknown|closed)")
    assert re.search(r"^PARTITION +TENANT .*GATE", shown, re.MULTILINE)
    assert "2 devices  14 partitions" in shown
    assert len([line for line in shown.splitlines() if line.startswith("#")]) == 14
    assert all(len(line) <= 80 for line in shown.splitlines())
    for title in ("# DEVICE ", "TENANT +PIECES", "STAGE +VERDICT", "FINDINGS OF", "PARTITION +T"):
        top.press("Tab")
        top.wait(title)
    top.press("h")
    top.wait(r"^Keys\n.*leave")
    top.press("?")
    top.wait(r"PARTITION +TENANT")
    top.press("s", "r")
    top.wait(r"s sort:active reversed")
    top.press("/")
    top.press("-l", "#1 ")
    top.press("BSpace", "Enter")
    shown = top.wait(r"filter:#1")
    rows = [line for line in shown.splitlines() if line.startswith("#")]
    assert len(rows) == 7
    assert all(row.startswith("#1") for row in rows)
    top.press(" ")
    top.wait(r"\(held\)")
    top.press("q")
    top.wait("ended with 0")


def test_a_terminal_that_changes_its_size_is_followed(
    running: DaemonProcess, terminals: list[Terminal]
) -> None:
    """Smaller: what fits is there and can be scrolled; larger: everything is."""
    top = opened(running, terminals, "--interval", "0.2")
    top.wait(r"#1 1g.10gb@6")
    top.resize(60, 10)
    small = top.wait(r"(?s)\A[^#]*#0 1g.10gb@0(?!.*#1 1g.10gb@6).*q quit")
    assert len(small.splitlines()) == 10
    for _ in range(40):
        top.press("Down")
    top.wait(r"#1 1g.10gb@6")
    top.press("Up")  # the way back begins at the last row, however long Down was held
    top.wait(r"(?s)#1 1g.10gb@5(?!.*#1 1g.10gb@6)")
    top.resize(120, 40)
    top.wait(r"(?s)^PARTITION .* RATE .*#0 1g.10gb@0.*#1 1g.10gb@6")


@pytest.mark.parametrize("value", ["1", ""])
def test_colour_is_left_out_where_nobody_wants_it(
    running: DaemonProcess, terminals: list[Terminal], value: str
) -> None:
    """With NO_COLOR not one colour is set, and all words are there; without it gates have one."""
    top = opened(running, terminals, NO_COLOR=value)
    top.wait(r"#1 1g.10gb@6 .*(open|closed|unknown)")
    colours = re.findall(r"\x1b\[(?:\d+;)*3[0-7]m", top.text(styled=True))
    assert bool(colours) == (not value)


def test_a_terminal_without_utf8_gets_ascii(
    running: DaemonProcess, terminals: list[Terminal]
) -> None:
    """In the C locale every character that is drawn is one of ASCII."""
    top = opened(running, terminals, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert top.wait(r"#1 1g.10gb@6").isascii()


def test_a_dumb_terminal_gets_pictures_in_a_row(
    running: DaemonProcess, terminals: list[Terminal]
) -> None:
    """TERM=dumb: no cursor is moved, one picture follows the other until Ctrl-C."""
    top = opened(running, terminals, "--interval", "0.2", size=(80, 100), TERM="dumb")
    shown = top.wait(r"(?s)(PARTITION +TENANT.*){3}")
    assert "\x1b" not in shown
    assert "q quit" not in shown
    top.press("C-c")
    top.wait("ended with 130")


def test_a_daemon_that_ends_is_one_line(running: DaemonProcess, terminals: list[Terminal]) -> None:
    """The terminal is given back, and the reason stands there."""
    top = opened(running, terminals, "--interval", "0.1")
    top.wait(r"#1 1g.10gb@6")
    running.kill()
    shown = top.wait(r"ended with 2")
    assert "alloy-agent: " in shown
    assert "the daemon ended" in shown.replace("\n", "")


def test_without_a_daemon_it_samples_by_itself(
    tmp_path: Path,
) -> None:
    """Its own workers, and nothing is left behind when it ends."""
    site = Site(tmp_path, "1xH100-SXM5-80GB")
    top = Terminal(site, (80, 24))
    try:
        top.start("top", "--interval", "0.2")
        top.press("Tab")
        top.wait(r"# DEVICE .*\n.*H100")
        top.press("q")
        top.wait("ended with 0")
    finally:
        top.close()
