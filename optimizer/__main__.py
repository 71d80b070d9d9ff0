"""`python -m placemat`: see `placemat.cli`."""

from __future__ import annotations

import sys

from placemat.cli import main

sys.exit(main())
