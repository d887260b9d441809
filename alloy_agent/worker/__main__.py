"""Entry of the worker process: `python -m alloy_agent.worker SOCKET_FD BOARD_FD NOTE_FD`."""

import sys

from alloy_agent.worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
