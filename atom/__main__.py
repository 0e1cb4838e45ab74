"""`python -m atom`: the same as `atom-run`."""

from __future__ import annotations

import sys

from atom.cli import main

sys.exit(main())
