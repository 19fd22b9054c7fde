"""What an answer to a call of a tool says."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from executions.kernel.declarations import STORABLE, Body, declared, refuse
from executions.kernel.text import to_json
from providers.guest.protocol import CALL_ANSWER_BYTES

MOST_CHARACTERS = 4000


@declared
class ToolAnswer:
    """What a call came to: a result, null where it is left out, or an error for the code."""

    result: Annotated[
        Any,
        Field(description=f"At most {CALL_ANSWER_BYTES} bytes of JSON, including the envelope."),
    ] = None
    error: Annotated[
        Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS), STORABLE] | None,
        Field(description="The error that is raised in the code, as ToolError."),
    ] = None

    def __post_init__(self) -> None:
        if self.error is not None and self.result is not None:
            refuse("error", "Give a result or an error, not both.")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            refuse("result", "Must hold no lone surrogates.")
        except ValueError as error:
            refuse("result", f"Must be JSON: {error}.")
        if size > CALL_ANSWER_BYTES:
            refuse("result", f"Must be at most {CALL_ANSWER_BYTES} bytes; send data as files.")

    @property
    def text(self) -> str:
        """As it is kept, and handed to the code."""
        if self.error is not None:
            return to_json({"error": self.error})
        return to_json({"result": self.result})


TOOL_ANSWER = Body(
    ToolAnswer,
    "ToolAnswer",
    says={
        "anyOf": [
            {"properties": {"error": {"type": "null"}}},
            {"properties": {"result": {"type": "null"}}},
        ]
    },
)
