"""The description of the API is kept beside this test, so that a change of it shows in the diff."""

from __future__ import annotations

import os

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiYamlRenderer

from tests.support.processes import ROOT

SNAPSHOT = ROOT / "tests" / "data" / "api-schema.yaml"


def test_the_description_of_the_api_is_the_one_that_is_kept() -> None:
    schema = SchemaGenerator().get_schema(public=True)
    text = OpenApiYamlRenderer().render(schema, renderer_context={}).decode()
    if os.environ.get("RENEW") == "schema":
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text(), "RENEW=schema on this test writes the snapshot anew"
