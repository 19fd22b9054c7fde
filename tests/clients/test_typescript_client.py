"""The TypeScript client holds conversations with a running service, and does what its pages show.

What it does is in tests/typescript, a function each, which throw where something is not as it
ought to be.
"""

from __future__ import annotations

import base64
import copy
import importlib
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from cofferdam import verify_receipt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from drf_spectacular.generators import SchemaGenerator

from providers.errors import CODES
from tests.clients.breaking_proxy import Proxy, breaking_proxy
from tests.clients.refusals import refusal
from tests.clients.typescript_package import SOURCE, Example, Installed, examples
from tests.support.processes import ROOT, clean_environment, free_port
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, MANAGE, Site


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("typescript"))


@pytest.fixture
def proxy(streaming_site: Site) -> Iterator[Proxy]:
    with breaking_proxy(streaming_site.service) as proxy:
        yield proxy


def test_its_shapes_are_those_of_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCE)
    monkeypatch.delitem(sys.modules, "make_shapes", raising=False)
    made = importlib.import_module("make_shapes")
    monkeypatch.delitem(sys.modules, "make_shapes")
    description: Any = SchemaGenerator().get_schema(request=None, public=True)
    for name, text in made.shapes_of(description).items():
        assert (SOURCE / "src" / name).read_text() == text, "run make_shapes.py"


def test_each_code_of_the_service_has_an_error() -> None:
    text = (SOURCE / "src" / "errors.ts").read_text()
    assert set(CODES) <= set(re.findall(r'\["(SB\d+)", \w+\]', text))


def test_it_needs_nothing_but_the_platform() -> None:
    told = json.loads((SOURCE / "package.json").read_text())
    assert not {"dependencies", "peerDependencies"} & set(told)
    text = "".join(path.read_text() for path in (SOURCE / "src").glob("*.ts"))
    imported = re.findall(r' from "([^"]+)"', text)
    assert imported
    assert all(name.startswith("./") for name in imported)


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_its_pages_show_what_their_programs_print(
    example: Example, installed: Installed, streaming_site: Site
) -> None:
    assert installed.run(example.name, site=streaming_site).splitlines() == example.shown


def test_a_page_has_each_thing_that_is_shown() -> None:
    assert len(examples()) >= 6
    assert all(example.shown for example in examples())


@pytest.mark.parametrize(
    "scenario",
    [
        *("runs", "refusals", "keys", "later", "streams", "dawdling", "leaving", "sessions"),
        *("tool", "receipts"),
    ],
)
def test_it_talks_with_the_service(
    scenario: str, installed: Installed, streaming_site: Site
) -> None:
    more = {
        "STRANGER_KEY": streaming_site.charlie,
        "NOWHERE": f"http://127.0.0.1:{free_port()}",
    }
    installed.run("main", scenario, site=streaming_site, **more)


def test_it_administrates(installed: Installed, streaming_site: Site) -> None:
    done = subprocess.run(
        [*MANAGE, "create_api_key", "wonderland", "--name", "ts", "--scope", "admin"],
        env=clean_environment(streaming_site.data_dir),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    installed.run("main", "administration", site=streaming_site, ADMIN_KEY=done.stdout.strip())


def test_what_ran_while_its_answer_was_lost_is_told_and_not_run_again(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    proxy.lose = 1
    installed.run("main", "lost", site=streaming_site, url=proxy.url, AGENT=uuid.uuid4().hex)
    assert proxy.requests[:2] == ["POST /api/v1/executions"] * 2


def test_a_command_whose_answer_was_lost_is_not_sent_again(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    made = ask(streaming_site.service, "POST", "/api/v1/sessions", {}, key=streaming_site.alice)
    proxy.lose, proxy.lost_of = 1, "/processes"
    session = made.json["id"]
    installed.run("main", "command", site=streaming_site, url=proxy.url, SESSION=session)
    assert [each for each in proxy.requests if each.endswith("/processes")] == [
        f"POST /api/v1/sessions/{session}/processes"
    ]
    path = f"/api/v1/sessions/{session}"
    ask(streaming_site.service, "DELETE", path, key=streaming_site.alice)


def test_who_is_refused_comes_back_when_it_was_told_to(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    proxy.refusals = [refusal(429, "SB008", "1"), refusal(502, "SB003", "0")]
    installed.run("main", "refused", site=streaming_site, url=proxy.url)
    assert len(proxy.requests) == 3
    proxy.refusals = [refusal(503, "SB004", "0")] * 4
    installed.run("main", "bounded", site=streaming_site, url=proxy.url)
    assert len(proxy.requests) == 7


# What is answered, and what the client makes of it.
FINAL = (
    (refusal(429, "SB008", "3600"), "RateLimited"),
    (refusal(503, "SB001"), "ProviderNotInitialized"),
    (refusal(503, "SB009", ran=True), "ProviderUnavailable"),
    (refusal(500, "internal_error"), "ServiceError"),
    ((200, {"Content-Type": "text/html"}, b"<html>"), "UnexpectedAnswer"),
    ((200, {"Content-Type": "application/json"}, b'{"id": "a"}'), "UnexpectedAnswer"),
    ((404, {}, b"no such host"), "UnexpectedAnswer"),
    # Of another host, to which the key would go.
    ((302, {"Location": "http://127.0.0.1:1/"}, b""), "UnexpectedAnswer"),
)


def test_what_would_not_help_is_not_tried(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    """Each call takes one answer: a second try would take that of the next call."""
    answers, errors = zip(*FINAL, strict=True)
    proxy.refusals = list(answers)
    installed.run("main", "final", site=streaming_site, url=proxy.url, ERRORS=",".join(errors))
    assert len(proxy.requests) == len(FINAL)


def test_a_stream_that_breaks_is_taken_up_where_it_was(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    proxy.break_after = 2
    installed.run("main", "broken", site=streaming_site, url=proxy.url)
    assert proxy.requests[1].startswith("GET /api/v1/executions/")
    proxy.break_after = 1
    proxy.requests.clear()
    installed.run("main", "attached", site=streaming_site, url=proxy.url)
    assert proxy.requests == ["POST /api/v1/executions"]


def test_the_next_page_is_of_the_same_service(
    installed: Installed, streaming_site: Site, proxy: Proxy
) -> None:
    page = {"results": [], "next": "http://evil.example/api/v1/executions?status=failed&limit=1"}
    proxy.refusals = [(200, {"Content-Type": "application/json"}, json.dumps(page).encode())]
    installed.run("main", "pages", site=streaming_site, url=proxy.url)
    assert proxy.requests[1] == "GET /api/v1/executions?status=failed&limit=1"


def test_it_judges_receipts_as_the_script_of_auditors_does(
    installed: Installed, streaming_site: Site
) -> None:
    keys, documents = receipts_of(streaming_site)
    given = json.dumps({"keys": keys, "documents": documents})
    lines = installed.run("main", "judged", site=streaming_site, given=given).splitlines()
    verdicts = [judged(document, keys) for document in documents]
    theirs = [found[1] if found and not found[0] else None for found in map(json.loads, lines)]
    pairs = zip(documents, theirs, verdicts, strict=True)
    assert [pair for pair in pairs if pair[1] != pair[2]] == []
    assert "artifacts[].url" in (verdicts[0] or [])
    assert 5 < len([each for each in verdicts if each is not None]) < len(verdicts) / 2


def judged(document: str, keys: Any) -> list[Any] | None:
    """What no receipt binds of an answer that holds. None where anything is wrong with it."""
    try:
        problems, unbound, _ = verify_receipt.check(json.loads(document), keys)  # type: ignore[no-untyped-call]
    except verify_receipt.CANNOT:
        return None
    return None if problems else unbound


CODE = """
import pathlib
def main():
    pathlib.Path("artifacts").mkdir(exist_ok=True)
    pathlib.Path("artifacts/a.txt").write_text("a")
    print("\\u00fc \\U0001f600")
    return {"b": [1.0, 1e22, 1e16, 5e-324, -0.0, 2**70], "a": "\\u2028\\x7f/"}
"""


def receipts_of(site: Site) -> tuple[Any, list[str]]:
    """The keys, and answers as they came and as somebody has changed them."""
    keys = ask(site.service, "GET", "/api/v1/ledger/keys", key=site.alice).json
    told = [
        ask(site.service, "POST", EXECUTIONS, {"code": code, **more}, key=site.alice).json
        for code, more in ((CODE, {"on_behalf_of": "ada"}), ("1 / 0", {}), ("while 1: 1", SHORT))
    ]
    forged = Ed25519PrivateKey.generate()
    public = base64.b64encode(forged.public_key().public_bytes_raw()).decode()
    keys["keys"].append({"key_id": "old", "algorithm": "Ed25519", "public_key": public})
    old = {**told[0]["receipt"], "key_id": "old", "nöte": "ünï \x7f \U0001f600"}
    del old["signature"]
    message = verify_receipt.signed_message(old)  # type: ignore[no-untyped-call]
    old["signature"] = base64.b64encode(forged.sign(message)).decode()
    found = [*told, old, {**told[0], "receipt": old}, {**old, "nöte": ""}]
    for answer in told:
        found += [{each: answer[each] for each in answer if each != name} for name in answer]
    first = told[0]
    found += [dict(first, **{name: value}) for name in first for value in OTHERS]
    for name in first["receipt"]:
        for value in OTHERS:
            changed = copy.deepcopy(first)
            changed["receipt"][name] = value
            found += [changed, changed["receipt"]]
    found += [
        {**first, "created_at": first["created_at"].replace("+00:00", "Z")},
        {**first, "newer": 1},
        {"error": {"code": "SB009", "message": "no"}, "id": first["id"], "receipt": old},
        [],
    ]
    texts = [json.dumps(each) for each in found]
    # The same values, as another program has written them.
    return keys, [*texts, texts[0].replace("1.0,", "1,"), texts[0].replace("[1.0", '["n1.0"')]


SHORT = {"timeout": 1}
OTHERS: tuple[Any, ...] = (None, "", "x", "\ud800", 0, 1.0, True, [], {"a": 1})
