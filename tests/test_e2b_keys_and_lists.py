"""What the door for E2B's SDKs needs of the database: keys in their form, lists by metadata."""

from __future__ import annotations

import io
import re
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from executions.models import ApiKey
from executions.services.keys import rotate
from executions.services.sessions.finding import living_sessions, opened_by_keys
from tests.conftest import Caller
from tests.sessions import opened, row

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
        page = living_sessions(alice.tenant, ["open"], metadata, None, 10)
        return {str(each.pk) for each in page.sessions}

    assert len(found(k="v")) == 2
    assert found(k="v", **{odd: "1"}) == {first["id"]}
    assert found(**{odd: "2"}) == found(k="w") == set()
    assert living_sessions(alice.tenant, ["asleep"], {}, None, 10).sessions == []
    holders = {str(pk): key.tenant.slug for pk, key in opened_by_keys(None, 10)}
    assert holders[first["id"]] == alice.tenant.slug
    assert len(holders) == 3
    assert [pk for pk, _ in opened_by_keys(row(first).pk, 10)] == [row(first).pk]
