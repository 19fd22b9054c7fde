"""Links to saved files that this service signs and serves itself, where storage has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import requests

from executions.kernel.storage import WORKSPACES, file_store
from executions.runs.artifacts import sign_token
from executions.sessions.models import Blob
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from tests.conftest import Caller
from tests.support.bucket import Swift
from tests.support.saved_files import linked, stored

CONTENT = b"four and twenty blackbirds"


@pytest.fixture(autouse=True)
def own_folder(settings: Any, tmp_path: Path) -> None:
    settings.DATA_DIR = tmp_path


def made(tenant: Tenant, content: bytes = CONTENT, **changed: Any) -> str:
    [blob] = stored(tenant, content)
    url = linked(tenant, blob, **{"filename": "a/日本.csv", "mime_type": "text/csv", **changed})
    assert url is not None
    return url


def body(answer: Any) -> bytes:
    return b"".join(answer.streaming_content)


def test_whoever_holds_a_link_saves_the_file(alice: Caller, bob: Caller, client: Any) -> None:
    url = made(alice.tenant)
    for holder in (client, bob.client):
        answer = holder.get(url)
        assert (answer.status_code, body(answer)) == (200, CONTENT)
        assert answer["Content-Type"] == "text/csv"
        assert answer["Content-Disposition"].startswith('attachment; filename="__.csv"')
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in answer["Content-Security-Policy"]
        assert answer["Cache-Control"] == "private, no-store"
    assert client.post(url).status_code == 405


def test_only_its_owner_makes_a_link_to_a_file(alice: Caller, bob: Caller, charlie: Caller) -> None:
    [blob] = stored(alice.tenant, CONTENT)
    assert linked(bob.tenant, blob)
    assert linked(charlie.tenant, blob) is None


def test_links_die_with_the_keys_of_their_tenant(alice: Caller, client: Any) -> None:
    url = made(alice.tenant)
    Tenant.objects.filter(pk=alice.tenant.pk).update(is_active=False)
    assert client.get(url).status_code == 404
    assert linked(alice.tenant, Blob.objects.get()) is None
    Tenant.objects.filter(pk=alice.tenant.pk).update(is_active=True)
    assert client.get(url).status_code == 200


def test_a_link_that_was_changed_leads_nowhere(alice: Caller, client: Any) -> None:
    url = made(alice.tenant)
    start = url.rindex("/") + 1
    for place in range(start, len(url)):
        changed = url[:place] + ("A" if url[place] != "A" else "B") + url[place + 1 :]
        assert client.get(changed).status_code == 404, place


def test_a_number_that_is_given_again_is_no_other_tenants_file(
    alice: Caller, charlie: Caller, client: Any
) -> None:
    url = made(alice.tenant)
    number = Blob.objects.get().pk
    Blob.objects.all().delete()
    # As after a backup was restored that did not have it.
    [theirs] = stored(charlie.tenant, b"other bytes")
    Blob.objects.filter(pk=theirs.pk).update(id=number)
    assert client.get(url).status_code == 404
    former = sign_token("executions.workspace", 60, number, "a", "a/b")
    assert client.get(url[: url.rindex("/") + 1] + former).status_code == 404


def test_a_link_to_an_artifact_opens_no_file_and_the_other_way(alice: Caller, client: Any) -> None:
    url = made(alice.tenant)
    assert client.get(url.replace("/files/", "/artifacts/")).status_code == 404


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("bytes=0-3", CONTENT[:4]),
        ("bytes=5-", CONTENT[5:]),
        ("bytes=-5", CONTENT[-5:]),
        ("bytes=20-900", CONTENT[20:]),
    ],
)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_range_is_sent_alone(
    place: str, asked: str, sent: bytes, alice: Caller, client: Any, request: pytest.FixtureRequest
) -> None:
    if place == "bucket":
        request.getfixturevalue("unlinked")
    answer = client.get(made(alice.tenant), headers={"Range": asked})
    assert (answer.status_code, body(answer)) == (206, sent)
    start = CONTENT.index(sent)
    assert answer["Content-Range"] == f"bytes {start}-{start + len(sent) - 1}/{len(CONTENT)}"
    assert answer["Content-Length"] == str(len(sent))


@pytest.fixture
def unlinked(on_swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that clients do not reach."""
    monkeypatch.setattr(file_store(WORKSPACES), "_links", None)


def test_a_range_behind_the_end_is_refused(alice: Caller, client: Any) -> None:
    answer = client.get(made(alice.tenant), headers={"Range": "bytes=26-"})
    assert answer.status_code == 416
    assert answer["Content-Range"] == "bytes */26"


def test_who_goes_on_with_another_content_gets_the_whole(alice: Caller, client: Any) -> None:
    url = made(alice.tenant)
    etag = client.get(url)["ETag"]
    for condition, status in ((etag, 206), ('"another"', 200)):
        answer = client.get(url, headers={"Range": "bytes=3-", "If-Range": condition})
        assert answer.status_code == status


def test_an_empty_file_is_a_file(alice: Caller, client: Any) -> None:
    answer = client.get(made(alice.tenant, b""))
    assert (answer.status_code, body(answer), answer["Content-Length"]) == (200, b"", "0")


@pytest.mark.parametrize("name", ["x" * 5000 + ".csv", "a\r\nSet-Cookie: x=1", "\udcff/..", ""])
def test_no_name_breaks_a_link(name: str, alice: Caller, client: Any) -> None:
    url = made(alice.tenant, filename=name, mime_type="text/html")
    assert len(url) < 1000
    answer = client.get(url)
    assert (answer.status_code, body(answer)) == (200, CONTENT)
    assert answer["Content-Type"] == "application/octet-stream"
    assert "Set-Cookie" not in answer
    assert answer["Content-Disposition"].startswith("attachment;")


@pytest.mark.parametrize("seconds", [0, -1, 604_801, True, 1.5])
def test_a_link_lasts_one_second_to_seven_days(seconds: Any, alice: Caller) -> None:
    with pytest.raises(InvalidConfiguration, match="expires_in"):
        made(alice.tenant, expires_in=seconds)


def test_of_a_bucket_the_links_are_the_buckets_own(
    alice: Caller, charlie: Caller, on_swift: Swift
) -> None:
    content = os.urandom(100)
    url = made(alice.tenant, content)
    assert url.startswith(on_swift.endpoint)
    assert requests.get(url, timeout=30).content == content
    assert linked(charlie.tenant, Blob.objects.get()) is None
