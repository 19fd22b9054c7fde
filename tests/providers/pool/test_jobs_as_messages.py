"""A job over the wire: as JSON, and as the first frame of a connection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from providers.errors import InvalidConfiguration
from providers.runtime.guest import wire
from providers.runtime.service import messages, operations
from providers.values import Job

SECRET = "wire-token-4711"
GIVEN = {"TOKEN": SECRET, "EMPTY": "", "ANY": "é=\n'\"$"}


def received(frame: bytes) -> Any:
    [read] = wire.Parser(wire.REQUEST_LIMIT).feed(frame)
    return read


def test_the_variables_of_a_job_arrive() -> None:
    job = Job("print(1)", environment=GIVEN)
    over_http = messages.job_from_json(json.loads(messages.dumps(messages.job_to_json(job))), 1.0)
    over_a_connection = operations.run_from_frame(received(operations.run_to_frame(job)))
    assert over_http.environment == over_a_connection.environment == GIVEN


def test_a_job_without_variables_is_the_one_that_older_services_know() -> None:
    assert "environment" not in messages.job_to_json(Job("print(1)"))


@pytest.mark.parametrize(
    "given",
    [
        ["TOKEN"],
        {"TOKEN": 1},
        {"": SECRET},
        {"A=B": SECRET},
        {"A": f"{SECRET}\0"},
        {"A\0": SECRET},
        {"A": f"{SECRET}\udcff"},
    ],
)
def test_what_no_process_can_be_given_is_refused_without_its_value(given: Any) -> None:
    body = {**messages.job_to_json(Job("print(1)")), "environment": given}
    with pytest.raises(InvalidConfiguration) as refused:
        messages.job_from_json(body, 1.0)
    assert refused.value.field == "environment"
    assert SECRET not in refused.value.message


def test_no_repr_of_a_job_has_its_variables() -> None:
    assert SECRET not in repr(Job("print(1)", environment=GIVEN))
