"""E2B's SDK makes, finds, pauses and ends sandboxes, which are sessions of the key's tenant."""

from __future__ import annotations

import httpx
import pytest
from e2b import SandboxException, SandboxNotFoundException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException
from e2b_code_interpreter import Sandbox

from providers.runtime.pool.cgroup import CgroupParent
from tests.support.e2b_door import native_of, opened
from tests.support.raw_http import ask
from tests.support.site import Site
from tests.support.waiting import wait_until


def test_a_sandbox_lives_as_its_client_says(door: Site) -> None:
    with opened(metadata={"k": "v w"}, envs={"A": "1"}, allow_internet_access=False) as sandbox:
        assert sandbox.is_running()
        info = sandbox.get_info()
        assert (info.state, info.metadata) == (SandboxState.RUNNING, {"k": "v w"})
        assert 290 < (info.end_at - info.started_at).total_seconds() <= 301
        sandbox.set_timeout(60)
        assert (sandbox.get_info().end_at - info.started_at).total_seconds() < 100
        # To connect never shortens it.
        assert Sandbox.connect(sandbox.sandbox_id, timeout=30).is_running()
        assert (sandbox.get_info().end_at - info.started_at).total_seconds() > 50
        assert sandbox.get_metrics()[0].mem_used > 0
        assert sandbox.commands.run("echo $A").stdout == "1\n"
        native = ask(door.service, "GET", native_of(sandbox), key=door.alice)
        assert native.json["state"] == "open"
    assert not sandbox.is_running()
    assert not sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_metrics_are_of_what_is_used_now(sandbox: Sandbox) -> None:
    # Where we may make no group, nobody counts a sandbox's processor.
    is_counted = CgroupParent.create() is not None
    before = sandbox.get_metrics()[0]
    sandbox.files.write("three", b"3" * 3_000_000)
    busy = sandbox.commands.run("while :; do :; done", background=True)
    try:
        # On a busy machine it may not have had its turn within a tenth of a second.
        wait_until(lambda: not is_counted or sandbox.get_metrics()[0].cpu_used_pct > 0, 60)
        after = sandbox.get_metrics()[0]
    finally:
        busy.kill()
    assert before.disk_used + 3_000_000 <= after.disk_used <= after.disk_total


def test_pausing_keeps_files_and_connecting_resumes(door: Site) -> None:
    with opened() as sandbox:
        sandbox.files.write("kept.txt", "kept")
        assert sandbox.pause()
        assert not sandbox.pause()
        assert not sandbox.is_running()
        assert sandbox.get_info().state == SandboxState.PAUSED
        with pytest.raises(SandboxNotFoundException):
            sandbox.set_timeout(60)
        again = Sandbox.connect(sandbox.sandbox_id, timeout=120)
        assert again.is_running()
        assert again.files.read("kept.txt") == "kept"
        left = again.get_info().end_at - again.get_info().started_at
        assert left.total_seconds() < 300


def test_sandboxes_are_listed_by_state_and_metadata_and_in_pages(door: Site) -> None:
    with opened(metadata={"of": "list"}) as first, opened(metadata={"of": "list", "n": "2"}):
        first.pause()
        everyone = Sandbox.list(query=SandboxQuery(metadata={"of": "list"}), limit=1)
        seen = []
        while everyone.has_next:
            seen += everyone.next_items()
        assert len(seen) == 2
        assert first.sandbox_id in {each.sandbox_id for each in seen}
        query = SandboxQuery(metadata={"of": "list"}, state=[SandboxState.PAUSED])
        (paused,) = Sandbox.list(query=query).next_items()
        assert paused.sandbox_id == first.sandbox_id
        assert not Sandbox.list(query=SandboxQuery(metadata={"of": "'--"})).next_items()
        assert not Sandbox.list(
            query=SandboxQuery(metadata={"of": "list"}), api_key=door.charlie
        ).next_items()


def test_older_clients_have_their_paths(door: Site) -> None:
    api = httpx.Client(base_url=door.service.url, headers={"X-API-KEY": door.alice}, timeout=60)
    made = api.post("/sandboxes", json={"templateID": "base", "secure": True, "autoPause": False})
    assert made.status_code == 201
    one = f"/sandboxes/{made.json()['sandboxID']}"
    assert api.post(f"{one}/connect", json={}).status_code == 200
    assert made.json()["sandboxID"] in {each["sandboxID"] for each in api.get("/sandboxes").json()}
    assert api.delete(one).status_code == 204
    assert api.delete(one).status_code == 404
    # Without the header of a sandbox it is another door's.
    assert api.get("/health").json() == {"status": "ok"}


def test_what_is_not_there_says_so(door: Site, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="not implemented here"):
        Sandbox.create(network={"dns_servers": ["1.1.1.1"]})
    with pytest.raises(SandboxException, match="not implemented here"):
        sandbox.update_network({"deny_out": ["8.8.8.8"]})
    pieces = httpx.post(f"{door.service.url}/volumes", content=iter([b"{}", b""]))
    assert pieces.status_code == 501, pieces.text
    for path in ("/volumes", "/default-templates", f"/sandboxes/{sandbox.sandbox_id}/logs"):
        answer = ask(door.service, "GET", path, key=door.alice)
        assert (answer.status, answer.json["code"]) == (501, 501), path
    with pytest.raises(SandboxException, match="template"):
        Sandbox.create(template="nobody-has-made-it")
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_0123456789abcdef")
