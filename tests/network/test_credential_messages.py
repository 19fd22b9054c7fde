"""Changes of many credentials at once: each message is one that a service takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from executions.capabilities.network import credential_changes
from executions.capabilities.network.credential_changes import send
from providers.credentials import Credential, changes_to_json
from providers.errors import InvalidConfiguration
from providers.network import Network, with_credentials
from providers.remote.secret import Secret
from providers.runtime.service import messages

# A value whose JSON is twice as long.
LONG = '"' * 8192


class Service:
    """A provider that reads what it is sent as the service does."""

    id = "service"

    def __init__(self) -> None:
        self.taken: dict[str, Credential | None] = {}
        self.refuses = ""

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        given = messages.loads_small(messages.dumps(changes_to_json(changes)))
        found = messages.credential_changes(given)
        if self.refuses in found:
            raise InvalidConfiguration("credentials: Not this one.")
        self.taken |= found


@pytest.fixture
def service() -> Iterator[Any]:
    yield Service()
    credential_changes._forget()


def large(number: int) -> Credential:
    rules = ("https://api.example.com",)
    return Credential(str(number), f"c{number}", 1, "bearer", "", rules, "", Secret(LONG))


def test_a_revocation_arrives_with_more_changes_than_one_message_may_have(service: Any) -> None:
    changes: dict[str, Credential | None] = {str(n): large(n) for n in range(100)}
    changes["revoked"] = None
    assert send({service: changes}, seconds=60) == {service}
    assert service.taken.keys() == changes.keys()
    assert service.taken["revoked"] is None


def test_so_many_that_are_gone_arrive_too(service: Any) -> None:
    changes: dict[str, Credential | None] = dict.fromkeys(map(str, range(12_000)))
    assert send({service: changes}, seconds=60) == {service}
    assert service.taken == changes


def test_a_change_that_is_not_taken_holds_up_no_other_message(service: Any) -> None:
    changes: dict[str, Credential | None] = {str(n): large(n) for n in range(100)}
    service.refuses = "0"
    assert send({service: changes}, seconds=60) == set()
    assert "99" in service.taken


def test_a_revocation_that_comes_while_another_change_is_sent_follows_it(service: Any) -> None:
    goes_on, began, ended = threading.Event(), threading.Event(), threading.Event()
    real = service.change_credentials

    def wait(changes: Mapping[str, Credential | None]) -> None:
        began.set()
        assert goes_on.wait(60)
        real(changes)
        if "mine" in changes:
            ended.set()

    service.change_credentials = wait
    try:
        send({service: {"theirs": large(1)}}, seconds=0.0)
        assert began.wait(60)
        send({service: {"mine": large(2), "theirs": large(3)}}, seconds=0.0)
        send({service: {"mine": None}}, seconds=0.0)
    finally:
        goes_on.set()
    assert ended.wait(60)
    assert service.taken["mine"] is None
    assert service.taken["theirs"].name == "c3"


def test_a_former_version_that_comes_late_is_not_put_in_again() -> None:
    network = Network((), credentials=(replace(large(1), version=2),))
    assert with_credentials(network, {"1": large(1)}) == network
    assert with_credentials(network, {"1": None}).credentials == ()
    newer = replace(large(1), version=3)
    assert with_credentials(network, {"1": newer}).credentials == (newer,)
