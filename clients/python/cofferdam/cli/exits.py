"""The exit codes, of which all but the program's own are in the help."""

from __future__ import annotations

from cofferdam.shapes import Execution

TIMED_OUT = 124
OURS = 125
BLOCKED = 126
CANCELLED = 130
OUT_OF_MEMORY = 137

_OF_STATUS = {
    "timed_out": TIMED_OUT,
    "out_of_memory": OUT_OF_MEMORY,
    "blocked": BLOCKED,
    "cancelled": CANCELLED,
    "error": OURS,
}

HELP = """\
exit codes:
  that of the program, and
  124  it ran longer than its timeout
  125  cofferdam itself failed: wrong arguments, no key, refused, unreachable
  126  the policy does not allow it
  130  it was cancelled, here with Ctrl-C or elsewhere
  137  it used more memory than it may
"""


def exit_code_of(execution: Execution) -> int:
    if execution.status in _OF_STATUS:
        return _OF_STATUS[execution.status]
    failed = 0 if execution.status == "succeeded" else 1
    return failed if execution.exit_code is None else execution.exit_code
