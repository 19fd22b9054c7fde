"""The playground, the replay of an execution, and examples of calls."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap, zip_longest
from typing import Any, cast

from django.conf import settings
from django.db import transaction

from executions.kernel.audit import current_actor
from executions.kernel.coroutines import run_sync
from executions.kernel.declarations import refuse
from executions.kernel.presentation import PageTime
from executions.kernel.text import from_json, is_storable
from executions.ledger.append import append
from executions.runs.models import Execution
from executions.runs.provider_calls import Route
from executions.runs.record import Outcome
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import template_of
from executions.runs.routing import choices_for, ensure_choice
from executions.runs.service import execute
from executions.sessions import queries
from executions.sessions.control import open_session
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of
from executions.sessions.requests import SessionRequest, tenant_of
from executions.tenants.models import Tenant
from executions.tenants.service import INTERNAL, ensure_active, internal_tenant
from providers.manager import Lease, manager, start_provider
from providers.models import ProviderConfig
from providers.services.trial import waiting_apart

RAN, OPENED = "Ran it in the playground.", "Opened it in the playground."


async def run_in_playground(
    read: Callable[..., ExecutionRequest],
    tenant_slug: str,
    person: Any,
    *,
    address: str,
    request_id: str,
) -> Execution:
    """Queue an execution of the tenant, or of the tenant of the request's session.

    `read` makes the request, given what is not the person's to say. The record's subject names who
    asked, and so does the admin's log. Raises InvalidConfiguration for a tenant that is not there
    or not active, and what `read` and `execute` do.
    """
    request = read(mode="async", subject=_subject())
    if request.session is not None:
        tenant = tenant_of(living_session_of(None, request.session))
        ensure_active(tenant)
    else:
        tenant = _tenant(tenant_slug)
    caller = Caller(tenant, request_id=request_id, client_address=address)
    outcome = await execute(
        request,
        caller,
        waits=True,
        beside=lambda execution: queries.record_initiator(person, execution, RAN),
    )
    return outcome.execution


async def open_manual_session(
    read: Callable[..., SessionRequest],
    tenant_slug: str,
    person: Any,
    *,
    address: str,
    request_id: str,
) -> Session:
    """Open a session of the tenant, to run cells in. Raises what `run_in_playground` and
    `open_session` do."""
    request = read(subject=_subject())
    caller = Caller(_tenant(tenant_slug), request_id=request_id, client_address=address)
    return await open_session(
        request,
        caller,
        may_choose=True,
        beside=lambda session: queries.record_initiator(person, session, OPENED),
    )


def _subject() -> str:
    return f"playground by {current_actor()}"[:255]


def _tenant(slug: str) -> Tenant:
    if not is_storable(slug):
        refuse("tenant", "Must be the slug of a tenant.")
    if slug == INTERNAL:
        tenant = internal_tenant()
    else:
        found = Tenant.objects.filter(slug=slug).first()
        if found is None:
            refuse("tenant", "There is no tenant with this slug.")
        tenant = found
    ensure_active(tenant)
    return tenant


MAX_LINES = 1_000


def replay_sync(execution: Execution, provider_id: str = "") -> Outcome:
    """Replay as `replay` does, and wait for it in this thread."""
    return run_sync(replay(execution, provider_id))


async def replay(execution: Execution, provider_id: str = "") -> Outcome:
    """Run the same code again, on the provider it ran on or on `provider_id`.

    The replay is an execution of its own, recorded under the internal tenant, so that it neither
    counts for the tenant nor shows up in what the tenant lists. Raises InvalidConfiguration when
    the record does not hold all that was run, or there is no such configured provider.
    """
    wanted = provider_id or execution.provider
    request = recorded_request(execution)
    ensure_choice(wanted, execution.tenant_slug, execution.language)
    route = route_to(wanted)
    with transaction.atomic():
        content = {"provider": wanted}
        append("replay", str(execution.pk), content)
    caller = Caller(internal_tenant(), replay_of=execution, request_id=execution.request_id)
    return await execute(request, caller, route=route)


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
        template=_template_of(execution),
    )
    if request.code_hash != execution.code_hash:
        refuse("code", "Differs from the code that ran: its hash is not the recorded one.")
    return request


def _template_of(execution: Execution) -> str:
    """The version of the template that it ran with. In a session that is the session's."""
    used = None if execution.session_id else template_of(execution)
    if used is None:
        return ""
    return used["name"] if used["version"] is None else f"{used['name']}@{used['version']}"


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


# The variable that the key is taken from.
KEY = "API_KEY"


def body_of(request: ExecutionRequest) -> dict[str, Any]:
    """What a caller with a key would send, without files. A chosen provider is not among it."""
    body: dict[str, Any] = {"code": request.code}
    if request.session is None:
        body["language"] = request.language
    elif request.context:
        body["context"] = request.context
    if request.arguments is not None:
        body["arguments"] = dict(request.arguments)
    if request.entrypoint != "auto":
        body["entrypoint"] = request.entrypoint
    if request.timeout is not None:
        body["timeout"] = request.timeout
    return body


def snippets_of(request: ExecutionRequest, url: str) -> dict[str, str]:
    """By the name of what it is for. Files are read where the snippet is run."""
    body, files = body_of(request), [file.path for file in request.files]
    return {
        "curl": _curl(url, body, files),
        "Python": _python(url, body, files),
        "JavaScript": _javascript(url, body, files),
    }


def _curl(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    call = (
        f'curl -sS {shlex.quote(url)} -H "X-API-Key: ${KEY}"'
        " -H 'Content-Type: application/json' --data-binary @-"
    )
    if not files:
        # No line of it can be the mark that ends it: each begins with a brace or with spaces.
        return f"{call} <<'JSON'\n{_json(body, indent=2)}\nJSON\n"
    # By pieces, and not as one argument, which a system takes only up to some size.
    start = _json(body)[:-1] + ', "files": ['
    lines = [f"printf '%s' {shlex.quote(start)}"]
    for number, name in enumerate(files):
        head = ("" if number == 0 else ", ") + f'{{"path": {_json(name)}, "content_base64": "'
        lines.append(
            f"printf '%s' {shlex.quote(head)}; base64 < {shlex.quote(name)} | tr -d '\\n';"
            " printf '%s' '\"}'"
        )
    lines.append("printf '%s' ']}'")
    return "{\n" + "".join(f"  {line}\n" for line in lines) + f"}} | {call}\n"


def _python(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    fields = "".join(
        f"    {name!r}: {_lines(value) if name == 'code' else repr(value)},\n"
        for name, value in body.items()
    )
    reading = (
        'body["files"] = [\n'
        '    {"path": name, "content_base64": '
        'base64.b64encode(open(name, "rb").read()).decode()}\n'
        f"    for name in {list(files)!r}\n]\n"
    )
    return (
        ("import base64\n" if files else "") + "import json\nimport os\nimport urllib.request\n\n"
        f"body = {{\n{fields}}}\n"
        + (reading if files else "")
        + f"request = urllib.request.Request(\n    {url!r},\n"
        "    data=json.dumps(body).encode(),\n"
        f'    headers={{"X-API-Key": os.environ["{KEY}"], "Content-Type": "application/json"}},\n'
        ")\n"
        "with urllib.request.urlopen(request) as answer:\n"
        "    print(json.dumps(json.load(answer), indent=2))\n"
    )


def _lines(code: str) -> str:
    """Line by line, as a program is read."""
    parts = code.splitlines(keepends=True)
    if len(parts) < 2:
        return repr(code)
    return "(\n" + "".join(f"        {part!r}\n" for part in parts) + "    )"


def _javascript(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    fields = "".join(f"  {name}: {_script(name, value)},\n" for name, value in body.items())
    reading = (
        f"body.files = await Promise.all({_json(list(files))}.map(async (path) => ({{\n"
        "  path,\n"
        '  content_base64: (await readFile(path)).toString("base64"),\n'
        "})));\n"
    )
    return (
        ('import { readFile } from "node:fs/promises";\n\n' if files else "")
        + f"const body = {{\n{fields}}};\n"
        + (reading if files else "")
        + f"const answer = await fetch({_json(url)}, {{\n"
        '  method: "POST",\n'
        f'  headers: {{ "X-API-Key": process.env.{KEY}, "Content-Type": "application/json" }},\n'
        "  body: JSON.stringify(body),\n"
        "});\n"
        "console.log(await answer.json());\n"
    )


def _script(name: str, value: Any) -> str:
    if name == "code" and len(parts := value.splitlines(keepends=True)) > 1:
        return "[\n" + "".join(f"    {_json(part)},\n" for part in parts) + '  ].join("")'
    text = _json(value)
    # In a literal this name would set what the object inherits from.
    return f"JSON.parse({_json(text)})" if "__proto__" in text else text


def _json(value: Any, *, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in text
    )
