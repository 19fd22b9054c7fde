"""A tool for agents: one function that runs code and returns its result as a short text."""

from __future__ import annotations

from cofferdam._sync.client import Cofferdam
from cofferdam.errors import CofferdamError
from cofferdam.shapes import Execution

# The longest result; a model reads all of it.
MOST_CHARACTERS = 10_000
_WAITED_BEYOND = 60.0
# Where the code did not end by itself. Of code that ran too long it is that of `get_sandbox`, too.
_NO_EXIT = -1


def run_python_code(code: str, timeout: int = 20) -> str:
    """Execute Python code using the configured sandbox.

    Note: Output is compact and self-contained: the printed text, or, if the code did not succeed,
    "Error (exit_code=...): " and the reason. `timeout` is seconds. The service and the key come
    from COFFERDAM_URL and COFFERDAM_API_KEY. Raises nothing.
    """
    try:
        with Cofferdam() as client:
            execution = client.run(code, timeout=timeout, wait_seconds=timeout + _WAITED_BEYOND)
    except (CofferdamError, ValueError) as error:
        return f"Error (exit_code={_NO_EXIT}): {_short(str(error))}"
    if execution.status == "succeeded":
        return _short(execution.stdout)
    exit_code = _NO_EXIT if execution.exit_code is None else execution.exit_code
    return f"Error (exit_code={exit_code}): {_short(_why(execution))}"


def _why(execution: Execution) -> str:
    if execution.status == "timed_out":
        return f"{execution.stderr.rstrip()}\nExecution timed out".lstrip("\n")
    said = execution.error.message if execution.error else execution.status
    advice = "".join(f"{line}\n" for line in execution.advice)
    return f"{execution.stderr or said}{advice}"


def _short(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
