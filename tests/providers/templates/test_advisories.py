"""Advisories and parts lists: which versions are affected, and what auditors are given."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

from providers.templates.advisories import Advisory, parse, read
from providers.templates.lock import Lock, LockedPackage
from providers.templates.sbom import cyclonedx


def entry(kind: str = "PyPI", name: str = "alpha", **affected: Any) -> dict[str, Any]:
    package = {"ecosystem": kind, "name": name}
    return {"id": "X-1", "summary": "It leaks.", "affected": [{"package": package, **affected}]}


def ranged(*events: dict[str, str], kind: str = "PyPI") -> Advisory:
    (found,) = parse(entry(kind, ranges=[{"type": "ECOSYSTEM", "events": list(events)}]))
    return found


@pytest.mark.parametrize(
    ("events", "inside", "outside"),
    [
        ([{"introduced": "0"}, {"fixed": "1.10"}], ["0.1", "1.9", "1.10rc1"], ["1.10", "2"]),
        ([{"introduced": "1.2"}, {"last_affected": "1.4"}], ["1.2", "1.4"], ["1.1", "1.4.1"]),
        ([{"introduced": "0"}], ["0", "99"], []),
        (
            [{"introduced": "1"}, {"fixed": "2"}, {"introduced": "3"}, {"fixed": "4"}],
            ["1.5", "3.5"],
            ["2.5", "4"],
        ),
        ([{"introduced": "1"}, {"fixed": "2"}], ["no version"], []),
    ],
)
def test_ranges_of_python(
    events: list[dict[str, str]], inside: list[str], outside: list[str]
) -> None:
    advisory = ranged(*events)
    assert [each for each in inside + outside if advisory.affects(each)] == inside


def test_what_is_affected_by_several_entries_is_one_advisory_and_names_a_remedy() -> None:
    described = entry(ranges=[ranges_of("0", "1.2")])
    described["affected"] += entry(ranges=[ranges_of("2", "2.5")], versions="none")["affected"]
    (advisory,) = parse(described)
    assert advisory.affects("1.0")
    assert advisory.affects("2.1")
    assert [advisory.fixed_for(each) for each in ("1.0", "2.1", "3")] == ["1.2", "2.5", ""]
    assert Advisory.of_json("X-1", "python", "alpha", advisory.to_json()) == advisory


def ranges_of(introduced: str, fixed: str) -> dict[str, Any]:
    events = [{"introduced": introduced}, {"fixed": fixed}]
    return {"type": "ECOSYSTEM", "events": events}


def test_ranges_of_npm_order_what_leads_up_to_a_release() -> None:
    advisory = ranged({"introduced": "1.0.0-beta.2"}, {"fixed": "1.10.0"}, kind="npm")
    inside = ["1.0.0-beta.2", "1.0.0-beta.11", "1.0.0", "1.9.9", "1.10.0-rc.1"]
    outside = ["1.0.0-alpha", "1.0.0-beta.1", "1.10.0", "1.10.0+build"]
    assert [each for each in inside + outside if advisory.affects(each)] == inside


def test_versions_that_are_listed_are_affected() -> None:
    (advisory,) = parse(entry(versions=["1.0", "1.1"]))
    assert advisory.affects("1.1")
    assert not advisory.affects("1.2")
    assert (advisory.id, advisory.summary) == ("X-1", "It leaks.")


def test_names_of_python_are_compared_in_their_one_form() -> None:
    (advisory,) = parse(entry(name="Foo_Bar.baz"))
    assert advisory.name == "foo-bar-baz"


def test_what_was_withdrawn_or_is_of_another_ecosystem_is_left_out() -> None:
    assert parse({**entry(), "withdrawn": "2026-01-01T00:00:00Z"}) == []
    assert parse(entry("crates.io")) == []


def test_an_archive_a_list_and_a_single_entry_are_read() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("X-1.json", json.dumps(entry()))
        file.writestr("README.txt", "no entry")
    archive.seek(0)
    for content in (
        archive,
        io.BytesIO(json.dumps([entry()]).encode()),
        io.BytesIO(json.dumps(entry()).encode()),
    ):
        assert [each.name for each in read(content)] == ["alpha"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"[1]", b"{}", b"[" * 100_000])
def test_what_is_no_file_of_advisories_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        list(read(io.BytesIO(content)))


def test_a_parts_list_names_each_file_with_its_hash_and_licence() -> None:
    lock = Lock(
        (
            LockedPackage("npm", "@a/b", "1.0.0", "https://x/b.tgz", "sha512", "ab", None, "n"),
            LockedPackage("python", "alpha", "1.0+local", "https://x/a.whl", "sha256", "cd"),
        )
    )
    document = cyclonedx("science", "3", "0" * 64, lock, {"alpha": "MIT"})
    assert document["metadata"]["component"]["version"] == "3"
    assert [each["purl"] for each in document["components"]] == [
        "pkg:npm/%40a/b@1.0.0",
        "pkg:pypi/alpha@1.0%2Blocal",
    ]
    assert document["components"][1]["licenses"] == [{"license": {"name": "MIT"}}]
    assert document["components"][1]["hashes"] == [{"alg": "SHA-256", "content": "cd"}]
    assert cyclonedx("science", "3", "0" * 64, lock, {}) == {
        **document,
        "components": [
            {key: value for key, value in each.items() if key != "licenses"}
            for each in document["components"]
        ],
    }
