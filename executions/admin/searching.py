"""What the search of the list of executions finds, and what it does not hold yet."""

from __future__ import annotations

import re
from uuid import UUID

from django.db.models import Q

from executions.capabilities.search.service import (
    MOST_PROGRAMS,
    SHORTEST,
    not_taken_in,
    programs_with,
)
from executions.runs.requests import CLAIMS
from providers.admin.sifting import MOST, Condition
from providers.moments import in_words

HELP = (
    "Full execution id, full SHA-256 of the code, or part of the code (at least three characters; "
    "indexed one minute after the end). By caller: agent:NAME, model:, conversation:, "
    "on_behalf_of:, trace_id:. By schedule: schedule:ID."
)
_CLAIM = re.compile(rf"({'|'.join((*CLAIMS, 'trace_id'))}):(.+)", re.DOTALL)
_SCHEDULE = "schedule:"
_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def searched(term: str) -> Condition:
    """The executions that such a term finds."""
    if found := _HASH.fullmatch(term.lower()):
        return Condition(Q(code_hash=f"sha256:{found[1]}"), "found")
    if found := _CLAIM.fullmatch(term):
        return Condition(Q(**{found[1]: found[2].strip()}), "found")
    if (schedule := _id(term.removeprefix(_SCHEDULE))) and term.startswith(_SCHEDULE):
        return Condition(Q(schedule_id=schedule), "found")
    if pk := _id(term):
        return Condition(Q(pk=pk), "found")
    programs = programs_with(term)
    if len(programs) >= MOST_PROGRAMS:
        # It is near wherever one looks: the newest executions are looked through themselves.
        return Condition(Q(code__icontains=term))
    return Condition(Q(code_hash__in=programs) & ~Q(code=""), "found")


def is_code(term: str) -> bool:
    """Whether the term is looked for in the code."""
    if _HASH.fullmatch(term.lower()) or _CLAIM.fullmatch(term):
        return False
    return _id(term.removeprefix(_SCHEDULE)) is None


def notes(term: str) -> list[str]:
    """What is to be known of a search of code beside what it found."""
    if not is_code(term):
        return []
    if len(term) < SHORTEST:
        return ["Code search needs at least three characters."]
    waiting, since = not_taken_in()
    if since is None:
        return []
    number = f"{MOST:,}+" if waiting > MOST else f"{waiting:,}"
    return [
        f"The code index does not include executions requested since {in_words(since)} yet: "
        f"{number} executions."
    ]


def _id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
