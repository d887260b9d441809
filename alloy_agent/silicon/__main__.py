"""`python -m alloy_agent.silicon reload SPEC`: load the drivers of a simulated node again.

What a person does on a real node with `modprobe` has no command of the agent's. Modes that wait
for a driver reload hold afterwards; instances go, as they do on silicon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alloy_agent.errors import AlloyError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Reload the drivers and return 0, or 1 with one line that says why they were not."""
    from alloy_agent.silicon.build import digest, open_machine
    from alloy_agent.silicon.refusals import RefusalError
    from alloy_agent.silicon.spec import parse_specs

    parser = argparse.ArgumentParser(
        prog="python -m alloy_agent.silicon", description="Do to a simulated node what hosts do."
    )
    parser.add_argument("what", choices=("reload",), help="unload and load all drivers")
    parser.add_argument("specs", nargs="+", metavar="SPEC", help="as given to --fake")
    parser.add_argument("--state-dir", default="/var/lib/alloy", metavar="DIR")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.state_dir)
    try:
        recipe = parse_specs(arguments.specs)
        state = folder / f"silicon-{digest(recipe)}.json"
        if not state.is_file():
            raise ConfigError(
                f"{state}: no such simulated node was changed yet",
                cure="give the directory and the --fake options of the agent",
            )
        open_machine(recipe, folder).driver_reload()
    except (AlloyError, RefusalError, OSError) as exc:
        sys.stderr.write(f"{parser.prog}: {' '.join(str(exc).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
