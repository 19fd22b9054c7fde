"""Running a recorded execution again, and what came of it beside what came of it then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap, zip_longest
from typing import Any, cast

from django.conf import settings
from django.db import transaction

from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Waits, wait_for
from executions.kernel.declarations import refuse
from executions.kernel.page_time import PageTime
from executions.kernel.text import from_json
from executions.ledger.append import append
from executions.runs.models import Execution
from executions.runs.record import Caller, Outcome
from executions.runs.requests import ExecutionRequest
from executions.runs.routes import Route
from executions.runs.routing import choices_for, require_choice
from executions.runs.service import running
from executions.tenants.service import internal_tenant
from providers.manager import Lease, manager
from providers.models import ProviderConfig
from providers.services.apart import waiting_apart
from providers.starting import start_provider

MAX_LINES = 1_000


def replay(execution: Execution, provider_id: str = "") -> Outcome:
    """As `replaying`, waited for in this thread."""
    return wait_for(replaying(execution, provider_id))


def replaying(execution: Execution, provider_id: str = "") -> Waits[Outcome]:
    """Run the same code again, on the provider it ran on or on `provider_id`.

    The replay is an execution of its own, recorded under the internal tenant, so that it neither
    counts for the tenant nor shows up in what the tenant lists. Raises InvalidConfiguration when
    the record does not hold all that was run, or there is no such configured provider.
    """
    wanted = provider_id or execution.provider
    request = recorded_request(execution)
    require_choice(wanted, execution.tenant_slug, execution.language)
    route = route_to(wanted)
    with transaction.atomic():
        content = {"provider": wanted}
        append("replay", str(execution.pk), content)
    caller = Caller(internal_tenant(), replay_of=execution, request_id=execution.request_id)
    return (yield from running(request, caller, route=route))


def recorded_request(execution: Execution) -> ExecutionRequest:
    """The request as it was. Raises InvalidConfiguration naming what is not kept of it."""
    if execution.is_open:
        refuse("execution", "Has not ended yet.")
    if not execution.code:
        refuse("code", "Not stored, only its hash.")
    if execution.input_files:
        refuse("files", "The input files are not stored, only their hashes.")
    # Without a provider the record has the most that it might have taken.
    seconds = execution.timeout if execution.provider else None
    # What came over the bridge may have taken more than others may ask for.
    is_usual = seconds is not None and seconds > settings.SANDBOX_MAX_TIMEOUT_SEC
    request = ExecutionRequest(
        execution.code,
        language=execution.language,
        arguments=from_json(execution.arguments) if execution.arguments else None,
        entrypoint=cast("Any", execution.entrypoint),
        timeout=None if is_usual else seconds,
        usual_timeout=seconds if is_usual else None,
        subject=f"replay by {current_actor()}"[:255],
    )
    if request.code_hash != execution.code_hash:
        refuse("code", "Differs from the code that ran: its hash is not the recorded one.")
    return request


def providers_for(execution: Execution) -> list[str]:
    """The providers a replay can be run on."""
    return choices_for(execution.tenant_slug, execution.language)


def route_to(provider_id: str) -> Route:
    """Lends this provider, whether it is active or not. Raises InvalidConfiguration."""
    row = ProviderConfig.objects.filter(provider_id=provider_id).first()
    if row is None:
        refuse("provider", f"There is no configuration of {provider_id!r}.")
    was_active = row.is_active

    @contextmanager
    def lease(*, wait: bool = True) -> Iterator[Lease]:
        """The one in service, or else one that is started for this run and closed after it."""
        if was_active:
            with manager.lease(wait=wait) as active:
                # Another one may be in its place by now, and the ledger has it that this one runs.
                if active.provider_id == provider_id:
                    yield active
                    return
        with waiting_apart():
            provider = start_provider(row)
        try:
            yield Lease(provider, row.provider_id, row.version)
        finally:
            provider.close()

    return lease


@dataclass(frozen=True)
class Line:
    """One line of either side; None where only the other side has one."""

    before: str | None
    after: str | None

    @property
    def kind(self) -> str:
        if self.before == self.after:
            return "same"
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


@dataclass(frozen=True)
class Difference:
    """One aspect of two outcomes. `matters` is False for what differs between any two runs."""

    name: str
    before: str
    after: str
    matters: bool = True

    @property
    def is_same(self) -> bool:
        return self.before == self.after

    def lines(self, page: PageTime) -> list[Line]:
        """Both texts side by side, at most MAX_LINES lines of each. Where it would take too long to
        find which lines are the same, each stands beside the one of its number."""
        before, after = _first_lines(self.before), _first_lines(self.after)
        return list(_side_by_side(before, after, page))

    @property
    def is_cut(self) -> bool:
        """Whether there are more lines than `lines` has."""
        return max(self.before.count("\n"), self.after.count("\n")) >= MAX_LINES


def differences_of(before: Execution, after: Execution) -> list[Difference]:
    """What came of two executions, aspect by aspect."""
    where = ("provider", "config_version", "runtime", "isolation", "sharing")
    circumstances = (*where, "start_ms", "run_ms", "total_ms")
    outcome = ("status", "exit_code", "error_code", "result", "outputs", "stdout", "stderr")
    return [
        *(Difference(name, _text(before, name), _text(after, name)) for name in outcome),
        Difference("artifacts", _artifacts(before), _artifacts(after)),
        *(
            Difference(name, _text(before, name), _text(after, name), matters=False)
            for name in circumstances
        ),
    ]


def _text(execution: Execution, name: str) -> str:
    value = getattr(execution, name)
    return "" if value is None else str(value)


def _artifacts(execution: Execution) -> str:
    artifacts = execution.artifacts.order_by("name")
    return "\n".join(
        f"{artifact.name} {artifact.size_bytes} {artifact.sha256[:16]}" for artifact in artifacts
    )


def _first_lines(text: str) -> list[str]:
    return text.split("\n", MAX_LINES)[:MAX_LINES]


def _side_by_side(before: list[str], after: list[str], page: PageTime) -> Iterator[Line]:
    if before == after:
        yield from map(Line, before, after)
        return
    # What is the same at the beginning costs nothing, and is most of most outcomes.
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    yield from map(Line, before[:same], after[:same])
    before, after = before[same:], after[same:]
    whole = [("replace", 0, len(before), 0, len(after))]
    is_simple = not before or not after or len(before) == len(after) == 1
    for kind, start, end, other_start, other_end in (
        whole if is_simple else page.aligned(before, after) or whole
    ):
        left, right = before[start:end], after[other_start:other_end]
        if kind == "equal":
            yield from map(Line, left, right)
        else:
            yield from starmap(Line, zip_longest(left, right))
