"""`python -m alloy_brain`: the command line."""

import sys

from alloy_brain.cli import main

sys.exit(main())
