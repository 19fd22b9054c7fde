"""The description of the API says what is answered. What it says of requests:
test_declared_requests.py."""

from __future__ import annotations

import jsonschema
import pytest
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema

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
