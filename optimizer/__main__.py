"""`python -m placemat`: see `placemat.cli`."""

from __future__ import annotations

import os
import sys

from placemat.cli import main


def _keep_standard_output() -> None:
    """Let Python alone write to standard output: file descriptor 1 goes where standard error goes.

    Libraries in C write to that descriptor (the solver HiGHS has a printf that no option silences), in the middle of
    what the command prints. It stays so to the end, since C's buffers are written out only then.
    """
    if sys.stdout is None or sys.stderr is None:  # the shell closed one of them
        return
    stdout = sys.stdout
    sys.stdout = os.fdopen(os.dup(stdout.fileno()), "w", encoding=stdout.encoding, errors=stdout.errors)
    os.dup2(sys.stderr.fileno(), stdout.fileno())


_keep_standard_output()
sys.exit(main())
