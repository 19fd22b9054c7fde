"""Who asked for a run, as its caller says: the agent, its model, the conversation and the person.

They are claims. Only the tenant and its key are known; nothing is allowed or refused by a claim.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated

from pydantic import Field

from executions.kernel.declarations import END, Rule, check_storable

MOST_CHARACTERS = 255
CLAIMS = ("agent", "model", "conversation", "on_behalf_of")

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII | re.DOTALL,
)
_SAMPLED = 1


def _plain(text: str) -> str:
    check_storable(text)
    if any(unicodedata.category(each) == "Cc" for each in text):
        raise ValueError("Must be plain text, without control characters.")
    return text


def read_traceparent(text: str) -> str:
    """The W3C trace context that a `traceparent` gives, as version 00 has it; "" for none.

    One that is not valid is ignored, as the specification has it, and never refused: a broken
    tracer in between is no reason to run nothing. Of a later version only what 00 has is taken.
    """
    found = _TRACEPARENT.fullmatch(text.strip(" \t"))
    if found is None or found["version"] == "ff":
        return ""
    if not found["trace"].strip("0") or not found["parent"].strip("0"):
        return ""
    if found["version"] == "00":
        return "" if found["more"] is not None else found[0]
    flags = int(found["flags"], 16) & _SAMPLED
    return f"00-{found['trace']}-{found['parent']}-{flags:02x}"


def trace_id_of(traceparent: str) -> str:
    """The trace that a valid `traceparent` names."""
    return traceparent[3:35]


Claim = Annotated[
    str,
    Field(max_length=MOST_CHARACTERS),
    Rule(_plain, {"pattern": rf"^[^\u0000-\u001f\u007f-\u009f]*{END}"}),
]
Agent = Annotated[Claim, Field(description="The agent, as claimed by the caller.")]
Model = Annotated[
    Claim, Field(description="The model that wrote the code, as claimed by the caller.")
]
ConversationName = Annotated[
    Claim, Field(description="The conversation, as claimed by the caller.")
]
OnBehalfOf = Annotated[
    Claim,
    Field(description="The person, as claimed by the caller. It is erased together with the code."),
]
Traceparent = Annotated[
    str, Rule(read_traceparent), Field(description="W3C trace context. An invalid one is ignored.")
]
