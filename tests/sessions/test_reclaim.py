"""What a remote service was not heard to make, or could not be made to end, is ended later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from providers.base import SandboxProvider
from providers.errors import SandboxError
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import open_aliyun, open_e2b
from tests.support.wire_server import eventually

WARNING = "a remote sandbox could not be ended"


@dataclass
class Service:
    """A provider on its service, and what the service calls the end of a sandbox."""

    provider: SandboxProvider
    server: E2BServer | AgentRunServer
    end: str


@pytest.fixture(params=["e2b", "aliyun"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))
    server = request.getfixturevalue(f"{request.param}_server")
    if request.param == "e2b":
        return Service(open_e2b(server), server, "kill")
    return Service(open_aliyun(server), server, "delete")


def always(operation: str) -> Callable[[str], str | None]:
    return lambda asked: "500" if asked == operation else None


def is_told_of(ref: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Others that earlier tests have left behind may be told of meanwhile."""
    return any(
        record.getMessage() == WARNING and getattr(record, "sandbox", "") == ref
        for record in caplog.records
    )


def leave_one_unheard_of(service: Service) -> None:
    service.server.fail("create", "truncated")
    with pytest.raises(SandboxError):
        service.provider.create_instance()
    assert len(service.server.sandboxes) == 1


def test_what_was_made_unheard_of_is_ended_though_the_provider_is_closed(
    service: Service,
) -> None:
    leave_one_unheard_of(service)
    service.provider.close()
    assert eventually(lambda: service.server.sandboxes == {})


def test_what_was_made_unheard_of_and_cannot_be_ended_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.server.fault = always(service.end)
    leave_one_unheard_of(service)
    # Others that earlier tests have left behind may be told of before.
    assert eventually(lambda: service.server.requests.count(service.end) >= 2)
    assert eventually(lambda: WARNING in caplog.text)
    assert len(service.server.sandboxes) == 1


def test_an_end_that_failed_is_tried_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    instance = service.provider.create_instance()
    service.server.fail(service.end, "500", "500")
    with pytest.raises(SandboxError):
        service.provider.destroy_instance(instance.instance_id)
    assert eventually(lambda: service.server.sandboxes == {})
    assert not is_told_of(instance.instance_id, caplog)


def test_an_end_that_keeps_failing_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.server.fault = always(service.end)
    instance = service.provider.create_instance()
    with pytest.raises(SandboxError):
        service.provider.destroy_instance(instance.instance_id)
    assert eventually(lambda: is_told_of(instance.instance_id, caplog))
    assert instance.instance_id in service.server.sandboxes


def test_nothing_is_logged_of_what_a_closed_provider_has_ended(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    instance = service.provider.create_instance()
    service.server.fail(service.end, "500")
    with pytest.raises(SandboxError):
        service.provider.destroy_instance(instance.instance_id)
    service.provider.close()
    assert service.server.sandboxes == {}
    assert not eventually(lambda: is_told_of(instance.instance_id, caplog), seconds=1)
