"""Rich outputs on their way through the API: kept with the record, and shown as they came."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from executions.runs.models import Execution
from providers.errors import InvalidConfiguration
from providers.local.provider import LocalProvider
from providers.values import ExecutionResult
from tests.conftest import Caller
from tests.support.running import run
from tests.support.sandboxes import Local

RICH = """
import sys
class Table:
    def _repr_html_(self): return "<b>naïve</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def __repr__(self): return "Table()"
print("before")
display(Table())
display({"a": 1})
"""


def test_rich_values_come_back_as_mime_bundles_and_are_kept(
    local_active: None, alice: Caller
) -> None:
    body = run(alice, RICH).json()

    expected = [
        {
            "text/html": "<b>naïve</b>",
            "image/png": base64.b64encode(b"\x89PNG").decode(),
            "text/plain": "Table()",
        },
        {"text/plain": "{'a': 1}", "application/vnd.cofferdam.listed+json": {"a": 1}},
    ]
    assert (body["status"], body["stdout"]) == ("succeeded", "before\n")
    assert body["outputs"] == expected
    assert alice.client.get(f"/api/v1/executions/{body['id']}").json()["outputs"] == expected
    assert json.loads(Execution.objects.get(pk=body["id"]).outputs) == expected


def test_an_output_that_no_client_could_read_is_left_out_and_counted(
    local_active: None, alice: Caller
) -> None:
    code = """
class Deep:
    def _repr_json_(self):
        value = []
        for _ in range(250):
            value = [value]
        return value
display(Deep())
display("kept")
"""
    body = run(alice, code).json()

    assert body["outputs"] == [{"text/plain": "'kept'"}]
    assert body["status"] == "succeeded"
    [skipped] = body["outputs_skipped"]
    assert skipped["name"] == "output 1"
    assert "nested" in skipped["reason"]
    assert Execution.objects.get(pk=body["id"]).meta["outputs_skipped"] == [
        [skipped["name"], skipped["reason"]]
    ]


@pytest.mark.parametrize("own", [{"preload": "wave, colorsys"}], indirect=True)
def test_preloaded_modules_are_there_before_the_program_asks(own: Local) -> None:
    result = own.run("import sys\nprint('wave' in sys.modules, 'colorsys' in sys.modules)")
    assert result.stdout == "True True\n"


@pytest.mark.parametrize("own", [{"isolation": "tenant", "pool_size": 1}], indirect=True)
def test_a_tenants_runs_may_share_a_sandbox_and_nobody_elses(own: Local) -> None:
    provider = own.provider
    used: dict[str, set[str]] = {"alice": set(), "mallory": set()}

    def serve(owner: str) -> ExecutionResult:
        instance = provider.create_instance("python", owner=owner)
        used[owner].add(instance.instance_id)
        try:
            code = "import os\nprint(os.path.exists('left'))\nopen('left', 'w').close()"
            return provider.execute_code(instance.instance_id, code, "python")
        finally:
            provider.destroy_instance(instance.instance_id)
            own.assert_nothing_is_left()

    for owner in ("alice", "mallory", "alice", "alice", "mallory"):
        assert serve(owner).stdout == "False\n"
    assert not used["alice"] & used["mallory"]
    assert len(used["alice"]) == 1


@pytest.mark.parametrize("given", ["numpy; import os", "../x", "a b-c"])
def test_a_preload_that_names_no_module_is_refused(given: str) -> None:
    config: dict[str, Any] = {"preload": given}
    with pytest.raises(InvalidConfiguration) as caught:
        LocalProvider.check_config(config)
    assert caught.value.field == "preload"
