"""Bases of templates as they are declared, read and resolved for: what is refused, and why."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from providers.errors import InvalidConfiguration
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.declaration import Declaration
from providers.templates.files import BuildFailed
from providers.templates.lock import Lock
from providers.templates.resolve import apt_job, job_for, read_facts
from providers.templates.sbom import package_url
from providers.templates.store import TemplateStore
from providers.templates.wheels import tags_for

DIGEST = f"sha256:{'a' * 64}"
HASH = "b" * 64
URI = f"'http://a.example/pool/h/hello_2.10-3_amd64.deb' hello_2.10-3_amd64.deb 53132 SHA256:{HASH}"
FACTS: dict[str, Any] = {
    "base": {
        "python": "3.12",
        "interpreter": "/usr/local/bin/python3.12",
        "libc": "glibc 2.36",
        "machine": "x86_64",
    },
    "has_apt": True,
    "sources": ["http://deb.example:8080", "https://security.example"],
}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"base": "python2.7"}, "base"),
        ({"base": "python3.8"}, "base"),
        ({"base": "python3.12/../../bin/sh"}, "base"),
        ({"base": "/usr/bin/python3"}, "base"),
        ({"base": "image:"}, "base"),
        ({"base": "image:a b"}, "base"),
        ({"base": "image:-v"}, "base"),
        ({"base": "image:../x"}, "base"),
        ({"base": 3}, "base"),
        ({"apt": ["curl"]}, "apt"),
        ({"apt": ["curl"], "base": "python3.12"}, "apt"),
        ({"apt": ["-o Dir=/"], "base": "image:x"}, "apt"),
        ({"apt": ["./x.deb"], "base": "image:x"}, "apt"),
        ({"apt": ["curl=1 x"], "base": "image:x"}, "apt"),
        ({"apt": ["Curl"], "base": "image:x"}, "apt"),
        ({"apt": ["c"], "base": "image:x"}, "apt"),
    ],
)
def test_a_declaration_names_what_is_refused(document: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        Declaration.parse(document)
    assert refused.value.field == field


def test_a_declaration_tells_what_a_provider_needs() -> None:
    def needs(**document: Any) -> frozenset[str]:
        return Declaration.parse(document).needs

    assert needs(python=["a"]) == frozenset()
    assert needs(base="python3.12") == {"interpreter"}
    assert needs(base="image:python:3.12-slim") == {"image"}
    assert needs(base="image:x", apt=["curl=8.0-1", "jq"]) == {"image", "apt"}
    declared = Declaration.parse({"base": "image:x", "apt": ["jq", "curl"]})
    assert Declaration.parse(declared.to_json()) == declared


def test_what_an_image_says_of_itself_is_not_believed() -> None:
    assert read_facts("image:x", DIGEST, json.dumps(FACTS)).base.python == "3.12"
    hostile: list[Any] = [
        "",
        "[]",
        "null",
        "[" * 10_000,
        json.dumps({**FACTS, "sources": 3}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "interpreter": "python3"}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "interpreter": "/bin/a\n[x]"}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "python": "3.12/../.."}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "python": "2.7"}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "libc": "glibc 2.36 --x"}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "machine": "x86_64 --x"}}),
        json.dumps({**FACTS, "base": {**FACTS["base"], "more": "x"}}),
        json.dumps({**FACTS, "base": {"python": "3.12"}}),
    ]
    for printed in hostile:
        with pytest.raises(InvalidConfiguration) as refused:
            read_facts("image:x", DIGEST, printed)
        assert refused.value.field == "base"
    lying = {**FACTS, "base": {**FACTS["base"], "name": "image:other", "image": "x", "look": "x"}}
    found = read_facts("image:x", DIGEST, json.dumps(lying)).base
    assert (found.name, found.image, found.look) == ("image:x", DIGEST, "")


def test_packages_are_resolved_for_the_python_and_the_libc_of_the_base() -> None:
    def options(base: Base) -> str:
        return job_for(Declaration(python=("a",)), base=base).code

    image = read_facts("image:x", DIGEST, json.dumps(FACTS)).base
    assert "'--python-version', '3.12'" in options(image)
    assert "'--python-platform', 'x86_64-manylinux_2_36'" in options(image)
    musl = Base("image:x", DIGEST, "3.12", "/bin/python3", "musl 1.2", "x86_64")
    assert "'x86_64-unknown-linux-musl'" in options(musl)
    other = options(Base("python3.13"))
    assert "'--python-version'" not in options(Base())
    assert "--python-platform" not in other
    for libc in ("glibc 2.5", ""):
        with pytest.raises(InvalidConfiguration, match="wheels"):
            options(Base("image:x", DIGEST, "3.12", "/bin/python3", libc, "x86_64"))
    with pytest.raises(InvalidConfiguration, match="python3 of 3"):
        options(Base("image:x", DIGEST))


def test_wheels_of_another_platform_are_told_apart() -> None:
    image = read_facts("image:x", DIGEST, json.dumps(FACTS)).base
    glibc = {str(tag) for tag in tags_for("3.12", image.platforms)}
    musl = Base("image:x", DIGEST, "3.12", "/bin/python3", "musl 1.2", "x86_64")
    names = {str(tag) for tag in tags_for("3.12", musl.platforms)}
    for found in (glibc, names):
        assert "py3-none-any" in found
        assert "cp311-cp311-manylinux_2_17_x86_64" not in found
    assert {"cp312-cp312-manylinux_2_36_x86_64", "cp312-abi3-manylinux2014_x86_64"} <= glibc
    assert "cp312-cp312-manylinux_2_37_x86_64" not in glibc
    assert "cp312-cp312-musllinux_1_2_x86_64" in names
    assert not any("manylinux" in each for each in names)


def test_the_lock_of_apt_has_files_with_hashes() -> None:
    more = URI.replace("hello_2.10-3_amd64", "libfoo+x_1%3a2.0~rc1_all").replace("SHA256", "SHA512")
    lock = Lock.parse(apt=f"{URI}\n{more.replace(HASH, HASH * 2)}\n")
    assert [(each.kind, each.name, each.version, each.size) for each in lock.packages] == [
        ("apt", "hello", "2.10-3", 53132),
        ("apt", "libfoo+x", "1:2.0~rc1", 53132),
    ]
    assert package_url(lock.packages[0]) == "pkg:deb/debian/hello@2.10-3"
    assert Lock.from_json(lock.to_json()) == lock


@pytest.mark.parametrize(
    "line",
    [
        "Reading package lists...",
        URI.replace(f"SHA256:{HASH}", ""),
        URI.replace("SHA256", "MD5Sum"),
        URI.replace(HASH, HASH[:-1]),
        URI.replace("http://a.example", "file://"),
        URI.replace("http://a.example", "http://user:pass@a.example"),
        URI.replace("hello_2", "../hello_2"),
        URI.replace("53132", "-1"),
    ],
)
def test_a_line_of_apt_that_is_no_file_with_a_hash_is_refused(line: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        Lock.parse(apt=line)
    assert refused.value.field == "apt"


def test_apt_needs_an_image_with_apt_and_sources() -> None:
    declared = Declaration(base="image:x", apt=("hello",))
    facts = read_facts("image:x", DIGEST, json.dumps(FACTS))
    assert apt_job(declared, facts).rules == ("deb.example:8080", "security.example")
    without = read_facts("image:x", DIGEST, json.dumps({**FACTS, "has_apt": False}))
    with pytest.raises(InvalidConfiguration, match="no apt-get"):
        apt_job(declared, without)
    without = read_facts("image:x", DIGEST, json.dumps({**FACTS, "sources": []}))
    with pytest.raises(InvalidConfiguration, match="no sources"):
        apt_job(declared, without)


def test_a_file_that_is_no_package_of_debian_is_refused(tmp_path: Path) -> None:
    content = b"PK\x03\x04 no package"
    line = URI.replace(HASH, hashlib.sha256(content).hexdigest()).replace("53132", "100")
    store = TemplateStore(tmp_path)
    base = Base("image:x", DIGEST)
    with pytest.raises(BuildFailed, match="no package of Debian"):
        store.build(
            Declaration(base="image:x", apt=("hello",)), Lock.parse(apt=line),
            lambda url, most: iter([content]), lambda line: None, base=base,
        )  # fmt: skip
    assert store.digests() == []


def test_the_digest_of_a_template_has_its_base(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    declared = Declaration(base="image:x")

    def built(base: Base) -> str:
        return store.build(
            declared, Lock(), lambda url, most: iter(()), lambda line: None, base=base
        ).digest

    first, second = built(Base("image:x", DIGEST)), built(Base("image:x", DIGEST[:-1] + "b"))
    assert first != second
    assert store.verify(first) == ""
    assert bases.read(store.path(first)).image == DIGEST
    (store.path(first) / bases.FILE).write_text(json.dumps(Base("image:y").to_json()))
    assert "changed" in store.verify(first)
    (store.path(first) / bases.FILE).write_text("[]")
    assert store.folder(first) is None


def test_each_look_at_a_base_is_another_template(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    looks = {store.add_look("image:x") for _ in range(3)}
    assert len(looks) == 3
    for digest in looks:
        assert store.folder(digest) is not None
        store.remove(digest)
    assert store.digests() == []
