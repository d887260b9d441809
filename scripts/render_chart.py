"""Render the Helm chart's templates from the kustomize base, or check that they are current.

The base is the one source. A template is a file of the base with the values of `values.yaml` in
their places; there is no control flow, so that `render` below does what Helm does and tests need no
Helm.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "deploy" / "daemonset" / "base"
CHART = ROOT / "deploy" / "helm" / "alloy-agent"
SKIPPED = ("kustomization.yaml", "namespace.yaml")  # the namespace is Helm's to make
PLACES = (
    ("image: alloy-agent:latest", "image: {{ .Values.image }}"),
    ("alloy-system", "{{ .Values.namespace }}"),
    ("gpu.alloy.dev", "{{ .Values.driver }}"),
    ("/var/lib/kubelet", "{{ .Values.kubeletDir }}"),
    ("memory: 512Mi", "memory: {{ .Values.memoryLimit }}"),
)
ENVIRONMENT = """            - name: ALLOY_KUBERNETES_DRIVER
              value: {{ .Values.driver }}
            - name: ALLOY_KUBERNETES_KUBELET_DIR
              value: {{ .Values.kubeletDir }}
            - name: ALLOY_KUBERNETES_VENDORS
              value: {{ .Values.vendors }}
"""
BEFORE = "            # Keeps NVIDIA's runtime hook"


def templates() -> dict[str, str]:
    """Return the content of each template by its name."""
    found = {}
    for path in sorted(BASE.glob("*.yaml")):
        if path.name in SKIPPED:
            continue
        text = path.read_text()
        for literal, place in PLACES:
            text = text.replace(literal, place)
        found[path.name] = text.replace(BEFORE, ENVIRONMENT + BEFORE)
    return found


def render(text: str, values: dict[str, object]) -> str:
    """Return a template with values in their places.

    Raises:
        KeyError: It names a value that there is not.
    """
    return re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda match: str(values[match[1]]), text)


def values() -> dict[str, object]:
    """Return the chart's default values."""
    found: dict[str, object] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def main(argv: list[str]) -> int:
    """Return 0 when the templates are (now) current."""
    folder = CHART / "templates"
    wanted = templates()
    if "--check" in argv:
        there = {path.name: path.read_text() for path in folder.glob("*.yaml")}
        if there != wanted:
            print("the chart is not current; run scripts/render_chart.py", file=sys.stderr)  # noqa: T201
            return 1
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.yaml"):
        path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
