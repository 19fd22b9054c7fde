"""The exit codes of the command."""

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
  the exit code of the program, or
  124  the program ran longer than its time limit
  125  cofferdam itself failed: wrong arguments, no API key, request refused,
       service unreachable
  126  the policy does not allow the code
  130  the run was cancelled, with Ctrl-C or elsewhere
  137  the program exceeded its memory limit
"""


def exit_code_of(execution: Execution) -> int:
    if execution.status in _OF_STATUS:
        return _OF_STATUS[execution.status]
    failed = 0 if execution.status == "succeeded" else 1
    return failed if execution.exit_code is None else execution.exit_code
