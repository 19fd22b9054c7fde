"""Changes of many credentials at once: each message is one that a service takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from executions.capabilities.network import credential_changes
from executions.capabilities.network.credential_changes import send
from providers.credentials import Credential, changes_to_json
from providers.errors import InvalidConfiguration
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
