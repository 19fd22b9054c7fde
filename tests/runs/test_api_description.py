"""The description of the API says what is answered. What it says of requests:
test_declared_requests.py."""

from __future__ import annotations

from typing import TypedDict
from uuid import UUID

import jsonschema
import pytest
from django.http import HttpResponse
from django.urls import path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from rest_framework.request import Request

from executions.doors.native.frame import ApiView
from executions.doors.native.schema import BYTES, endpoint
from executions.kernel.bodies import PageShape
from executions.sessions.requests import CHANGE
from tests.conftest import Caller
from tests.runs.execution_shape import SHAPE
from tests.support.running import run
from tests.support.schemas import strict

pytestmark = pytest.mark.one_database


def test_the_description_of_the_api_is_valid_and_names_what_is_answered(
    local_active: None, alice: Caller
) -> None:
    schema = SchemaGenerator().get_schema(public=True)

    validate_schema(schema)
    described = schema["components"]["schemas"]["Execution"]
    assert list(described["properties"]) == list(SHAPE)
    assert set(described["required"]) == set(SHAPE)
    for code in ("def main():\n    return [1]\nopen('artifacts/a', 'w')", "while True: pass"):
        jsonschema.validate(run(alice, code, timeout=0.5).json(), strict(schema, "Execution"))
    jsonschema.validate(run(alice, "").json(), strict(schema, "Error"))
    jsonschema.validate(
        alice.client.get("/api/v1/executions").json(), strict(schema, "ExecutionPage")
    )
    assert set(schema["paths"]) >= {
        "/api/v1/executions",
        "/api/v1/executions/{execution_id}",
        "/api/v1/executions/{execution_id}/artifacts/{name}",
        "/api/v1/languages",
        "/v1/execute",
    }
    post = schema["paths"]["/api/v1/executions"]["post"]
    assert {"200", "202", "400", "401", "409", "413", "415", "429", "503"} <= set(post["responses"])
    assert post["security"] == [{"apiKey": []}, {"bearer": []}]


def test_a_handler_without_a_declaration_is_named() -> None:
    class BareView(ApiView):
        def get(self, request: Request) -> HttpResponse:
            return HttpResponse()

    generator = SchemaGenerator(patterns=[path("bare", BareView.as_view())])
    with pytest.raises(TypeError, match=r"BareView\.get lacks @endpoint"):
        generator.get_schema(public=True)


def test_the_errors_of_an_endpoint_come_from_its_view_its_path_and_its_body() -> None:
    class OwnShape(TypedDict):
        problem: str

    class ThingView(ApiView):
        tag = "things"
        errors = (401,)
        error_shape = OwnShape

        @endpoint("change_thing", request=CHANGE, answers={200: PageShape[OwnShape]}, errors=(409,))
        def patch(self, request: Request, thing: UUID) -> HttpResponse:
            """Change a thing.

            It is changed
            at once.
            """
            return HttpResponse()

        @endpoint("fill_thing", request={"text/plain": BYTES}, answers={204: None})
        def put(self, request: Request, thing: UUID) -> HttpResponse:
            """Fill a thing."""
            return HttpResponse()

    generator = SchemaGenerator(patterns=[path("things/<uuid:thing>", ThingView.as_view())])
    schema = generator.get_schema(public=True)
    found = schema["paths"]["/things/{thing}"]
    change, fill = found["patch"], found["put"]
    told = [change[name] for name in ("operationId", "summary", "description", "tags")]
    assert told == ["change_thing", "Change a thing", "It is changed at once.", ["things"]]
    # The rate limit adds 429.
    assert list(change["responses"]) == ["200", "401", "404", "409", "413", "415", "429"]
    assert list(fill["responses"]) == ["204", "401", "404", "413", "429"]
    refused = change["responses"]["409"]["content"]["application/json"]["schema"]
    assert refused == {"$ref": "#/components/schemas/Own"}
    assert change["parameters"][0]["schema"] == {"type": "string", "format": "uuid"}
    page = schema["components"]["schemas"]["OwnPage"]
    assert page["properties"]["results"]["items"] == refused
