"""What the door for E2B's SDKs needs of the database: keys in their form, lists by metadata."""

from __future__ import annotations

import io
import re
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from django.core.management import call_command
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rest_framework.test import APIClient

from executions.doors.e2b.connect import STREAM_TYPE, message
from executions.kernel.text import is_storable
from executions.sessions import capacity
from executions.sessions.models import Session
from executions.sessions.queries import LivingFilter, living_sessions, sessions_with_keys
from executions.tenants.keys import create_api_key, rotate
from executions.tenants.models import ApiKey
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import opened, row

pytestmark = pytest.mark.database
FORM = re.compile("e2b_[0-9a-f]{64}")


def test_a_key_in_the_form_of_e2bs_is_made_on_request_and_keeps_it(alice: Caller) -> None:
    told = io.StringIO()
    call_command("create_api_key", alice.tenant.slug, "--name", "sdk", "--e2b", stdout=told)
    assert FORM.fullmatch(told.getvalue().strip())
    key = ApiKey.objects.get(name="sdk")
    _, text = rotate(key, timezone.now() + timedelta(hours=1))
    assert FORM.fullmatch(text)


@pytest.mark.usefixtures("kept_here")
def test_sessions_are_found_by_all_of_their_metadata_and_by_their_keys(
    alice: Caller, charlie: Caller
) -> None:
    odd = "a__contains' OR 1=1 --$.x"
    first = opened(alice, metadata={"k": "v", odd: "1", "n": "2"})
    opened(alice, metadata={"k": "v", "n": 2})
    opened(charlie, metadata={"k": "v", odd: "1"})

    def found(**metadata: str) -> set[str]:
        page = living_sessions(alice.tenant, LivingFilter(["open"], metadata), None, 10)
        return {str(each.pk) for each in page.sessions}

    assert len(found(k="v")) == 2
    assert found(k="v", **{odd: "1"}) == {first["id"]}
    assert found(**{odd: "2"}) == found(k="w") == set()
    assert living_sessions(alice.tenant, LivingFilter(["asleep"]), None, 10).sessions == []
    holders = {str(pk): (key, digest) for pk, key, digest in sessions_with_keys(None, 10)}
    assert holders[first["id"]] == (alice.api_key.pk, alice.api_key.key_hash)
    assert len(holders) == 3
    assert [pk for pk, *_ in sessions_with_keys(row(first).pk, 10)] == [row(first).pk]


ODD_NAMES = (
    "42",
    "-1",
    "0",
    "99999999999999999999",
    " 7",
    "1_0",
    "٣",
    'a"b',
    "a\\",
    '"',
    "",
    "é😀",
)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_metadata_is_found_by_a_name_that_looks_like_a_place_or_a_path(
    alice: Caller, name: str
) -> None:
    assert found_by(alice, {name: "x", "other": "y"}, name, "x")
    assert not found_by(alice, {name: "z", f"{name}.": "x"}, name, "x")
    asked = alice.client.get("/v2/sandboxes", {"metadata": urlencode({quote(name): "x"})})
    assert (asked.status_code, len(asked.json())) == (200, 1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_metadata_is_found_by_any_name_and_any_text(alice: Caller, data: st.DataObject) -> None:
    texts = st.text().filter(is_storable)
    metadata = data.draw(st.dictionaries(texts, texts, min_size=1, max_size=5))
    name = data.draw(st.sampled_from(sorted(metadata)))
    assert found_by(alice, metadata, name, metadata[name])
    assert not found_by(alice, metadata, name, f"{metadata[name]}.")
    assert not found_by(alice, metadata, f"{max(metadata)}.", "")


@pytest.mark.parametrize(("value", "text"), [(2, "2"), (1.5, "1.5"), (True, "true")])
def test_metadata_that_is_no_text_is_found_by_how_json_writes_it(
    alice: Caller, value: object, text: str
) -> None:
    assert found_by(alice, {"n": value}, "n", text)
    assert not found_by(alice, {"n": value}, "n", "1")


def found_by(caller: Caller, metadata: dict[str, Any], name: str, value: str) -> bool:
    """Whether a session of this metadata is found by a name and a value."""
    made = Session.objects.create(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        metadata=metadata,
        idle_seconds=600,
        max_seconds=600,
    )
    page = living_sessions(caller.tenant, LivingFilter(["open"], {name: value}), None, 1)
    return [each.pk for each in page.sessions] == [made.pk]


@pytest.mark.usefixtures("kept_here")
def test_nothing_is_opened_to_find_out_that_no_network_cannot_be_had(alice: Caller) -> None:
    asked = alice.client.post("/v2/sandboxes", {"allow_internet_access": False})
    assert asked.status_code == 400
    assert "allow_internet_access" in asked.json()["message"]
    assert not Session.objects.exists()


@pytest.mark.usefixtures("kept_here")
def test_what_sleeps_is_bounded_too(
    alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.SESSIONS_PER_TENANT = 2
    monkeypatch.setattr(capacity, "ASLEEP_FOR_EACH", 1)
    for _ in range(2):
        made = alice.client.post("/v2/sandboxes", {}).json()["sandboxID"]
        assert alice.client.post(f"/sandboxes/{made}/pause", {}).status_code == 204
    for path in ("/v2/sandboxes", "/api/v1/sessions"):
        refused = alice.client.post(path, {})
        assert refused.status_code == 429, path
        assert "2 sleeping sessions" in refused.content.decode()
    # Others are not held up, and what sleeps can still be woken.
    assert charlie.client.post("/v2/sandboxes", {}).status_code == 201
    assert alice.client.post(f"/sandboxes/{made}/connect", {}).status_code == 201
    assert alice.client.post("/v2/sandboxes", {}).status_code == 201


@pytest.mark.usefixtures("kept_here")
def test_a_key_whose_tokens_are_used_is_used(alice: Caller) -> None:
    made = alice.client.post("/v2/sandboxes", {}).json()
    key = ApiKey.objects.filter(pk=alice.api_key.pk)
    key.update(last_used_at=None)
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    assert APIClient().get("/contexts", headers=headers).status_code == 200
    assert key.get().last_used_at is not None


@pytest.mark.usefixtures("kept_here")
def test_a_command_is_held_to_the_isolation_that_its_key_demands(alice: Caller) -> None:
    made = alice.client.post("/v2/sandboxes", {}).json()["sandboxID"]
    strict = Caller(*create_api_key(alice.tenant, "strict", None, minimum_isolation="microvm"))
    wanted = message({"process": {"cmd": "/bin/true", "args": []}})
    ends = []
    for caller in (alice, strict):
        answer = caller.client.generic(
            "POST",
            "/process.Process/Start",
            wanted,
            content_type=STREAM_TYPE,
            headers={"E2b-Sandbox-Id": made},
        )
        assert answer.status_code == 200, answer.content
        # The flag says that it is the last one.
        ends.append(answer.getvalue().rpartition(b"\x02")[2])
    assert b"error" not in ends[0]
    assert b"minimum_isolation is microvm" in ends[1]
    (sandbox,) = kept_here.sandboxes()
    assert len(sandbox.processes.list()) == 1


@pytest.mark.usefixtures("kept_here")
def test_commands_are_followed_with_the_scope_that_reads(alice: Caller) -> None:
    """As at the native API: to run something opens nothing that another key has run."""
    made = alice.client.post("/v2/sandboxes", {}).json()["sandboxID"]
    _, text = create_api_key(alice.tenant, "runs", None, "execute sessions")
    client = APIClient()
    client.credentials(HTTP_X_API_KEY=text)
    for method in ("List", "Connect"):
        path = f"/process.Process/{method}"
        answer = client.post(path, {}, headers={"E2b-Sandbox-Id": made}, format="json")
        assert (answer.status_code, "read" in answer.json()["message"]) == (403, True)
