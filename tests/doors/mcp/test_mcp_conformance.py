"""Which server scenarios of MCP's conformance suite apply, as docs/mcp.md says, and why no others.

The suite is a package of npm, and sends no key: here its requests are made by our own means.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.mcp_client import LEGACY, call, initialize, send
from tests.support.processes import ROOT
from tests.support.site import Site

PASS = {
    *("server-initialize", "ping", "tools-list", "resources-list", "dns-rebinding-protection"),
    "server-sse-multiple-streams",
}
# What each other one asks for, by the suite's own name or by a method.
TOOLS = {
    "tools-call-simple-text": "test_simple_text",
    "tools-call-image": "test_image_content",
    "tools-call-audio": "test_audio_content",
    "tools-call-embedded-resource": "test_embedded_resource",
    "tools-call-mixed-content": "test_multiple_content_types",
    "tools-call-with-logging": "test_tool_with_logging",
    "tools-call-error": "test_error_handling",
    "tools-call-with-progress": "test_tool_with_progress",
    "tools-call-sampling": "test_sampling",
    "tools-call-elicitation": "test_elicitation",
    "json-schema-2020-12": "json_schema_2020_12_tool",
    "elicitation-sep1034-defaults": "test_elicitation_sep1034_defaults",
    "elicitation-sep1330-enums": "test_elicitation_sep1330_enums",
    "server-sse-polling": "test_reconnection",
}
RESOURCES = {
    "resources-read-text": "test://static-text",
    "resources-read-binary": "test://static-binary",
    "resources-templates-read": "test://template/123/data",
}
METHODS = {
    "logging-set-level": "logging/setLevel",
    "completion-complete": "completion/complete",
    "resources-subscribe": "resources/subscribe",
    "resources-unsubscribe": "resources/unsubscribe",
    "prompts-list": "prompts/list",
    "prompts-get-simple": "prompts/get",
    "prompts-get-with-args": "prompts/get",
    "prompts-get-embedded-resource": "prompts/get",
    "prompts-get-with-image": "prompts/get",
}
# The least that each method takes.
PARAMS: dict[str, dict[str, Any]] = {
    "logging/setLevel": {"level": "info"},
    "completion/complete": {
        "ref": {"type": "ref/prompt", "name": "test_prompt_with_arguments"},
        "argument": {"name": "arg1", "value": "t"},
    },
    "resources/subscribe": {"uri": "test://watched-resource"},
    "resources/unsubscribe": {"uri": "test://watched-resource"},
    "prompts/list": {},
    "prompts/get": {"name": "test_simple_prompt"},
}


def asked(site: Site, method: str, **params: Any) -> str:
    message = {"jsonrpc": "2.0", "id": 2, "method": method, "params": params}
    return send(site, message, MCP_Protocol_Version=LEGACY).text


def test_the_page_names_each_scenario_once_where_it_belongs() -> None:
    page = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (pass|not) .*\| (`.*`) \|$", page.partition("## Conformance")[2], re.M)
    named = {said: re.findall(r"`([a-z0-9-]+)`", "".join(r[1] for r in rows if r[0] == said))
             for said in ("pass", "not")}  # fmt: skip

    assert sorted(named["pass"]) == sorted(PASS)
    assert sorted(named["not"]) == sorted([*TOOLS, *RESOURCES, *METHODS])


def test_what_the_scenarios_that_pass_ask_is_answered(streaming_site: Site) -> None:
    site = streaming_site
    begun = send(site, initialize())
    assert begun.status_code == 200
    assert '"protocolVersion":"' + LEGACY in begun.text
    assert '"result":{}' in asked(site, "ping")
    assert '"inputSchema":{' in asked(site, "tools/list")
    assert '"resources":[' in asked(site, "resources/list")
    with ThreadPoolExecutor(3) as pool:
        lists = [pool.submit(asked, site, "tools/list") for _ in range(3)]
        assert all('"tools":[' in each.result() for each in lists)
    foreign = {"Host": "evil.example.com", "Origin": "http://evil.example.com"}
    assert 400 <= send(site, initialize(), **foreign).status_code < 500


def test_what_the_others_ask_for_is_not_there_and_is_not_announced(streaming_site: Site) -> None:
    site = streaming_site
    for name in TOOLS.values():
        answer = send(site, call(1, name), MCP_Protocol_Version=LEGACY).text
        assert f"Unknown tool: {name}" in answer
    for uri in RESOURCES.values():
        assert '"error":{' in asked(site, "resources/read", uri=uri)
    for method, params in PARAMS.items():
        assert "-32601" in asked(site, method, **params), method
    announced = send(site, initialize()).text.partition('"capabilities":')[2]
    for name in ("prompts", "logging", "completions", '"subscribe":true'):
        assert name not in announced.partition("serverInfo")[0]
