"""Which bucket files go to: said by STORAGE_URL, by the variables S3_..., or by both alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.storage import storages

from executions.kernel.storage import MOST_LINK_SECONDS, WORKSPACES, file_store
from sandbox_site import storage_settings
from sandbox_site.environment import StrictEnv, declaration
from tests.support.bucket import BUCKET, Swift
from tests.support.processes import ROOT, clean_environment

S3 = {
    "S3_ENDPOINT_URL": "https://s3.example:9000",
    "S3_ACCESS_KEY_ID": "somebody",
    "S3_SECRET_ACCESS_KEY": "something secret",
    "S3_BUCKET": "sandbox",
}
SAME = "s3://sandbox/sandboxes?endpoint=https://s3.example:9000/"


def read(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    for name in (*S3, "S3_REGION", "S3_PREFIX_ROOT", "STORAGE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return storage_settings.storages(StrictEnv())


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    with pytest.raises(ImproperlyConfigured) as refused:
        read(monkeypatch, **environment)
    assert S3["S3_SECRET_ACCESS_KEY"] not in str(refused.value)
    return str(refused.value)


def test_the_variables_of_agent_sandbox_name_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = read(monkeypatch, **S3)
    assert kinds["workspaces"]["BACKEND"] == "executions.kernel.bucket.Bucket"
    options = kinds["workspaces"]["OPTIONS"]
    assert options["location"] == "sandboxes/workspaces"
    assert options["bucket_name"] == "sandbox"
    assert options["region_name"] == "us-east-1"
    assert options["endpoint_url"] == "https://s3.example:9000"
    assert (options["access_key"], options["secret_key"]) == ("somebody", "something secret")
    options = read(monkeypatch, **S3, S3_REGION="eu-1", S3_PREFIX_ROOT="/a/b/")["queue"]["OPTIONS"]
    assert (options["location"], options["region_name"]) == ("a/b/queue", "eu-1")


def test_a_secret_of_s3_may_lie_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from a file\n")
    given = {**S3, "S3_SECRET_ACCESS_KEY_FILE": str(tmp_path / "key")}
    del given["S3_SECRET_ACCESS_KEY"]
    options = read(monkeypatch, **given)["workspaces"]["OPTIONS"]
    assert options["secret_key"] == "from a file"


@pytest.mark.parametrize("left_out", S3)
def test_half_of_them_is_refused_naming_what_is_missing(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refusal(monkeypatch, **{name: S3[name] for name in S3 if name != left_out})
    assert told.startswith(f"{left_out}: not set")


@pytest.mark.parametrize("name", ["S3_REGION", "S3_PREFIX_ROOT"])
def test_a_detail_without_the_rest_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(monkeypatch, **{name: "a"})
    assert all(needed in told.partition(":")[0] for needed in S3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("S3_ENDPOINT_URL", "s3.example"),
        ("S3_ENDPOINT_URL", "https://key:secret@s3.example"),
        ("S3_ENDPOINT_URL", "http://s3.example"),
        ("S3_BUCKET", "bucket/folder"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(monkeypatch, **{**S3, name: value}).startswith(name)


@pytest.mark.parametrize(
    ("url", "other"),
    [
        (SAME.replace("sandbox/", "another/"), "S3_BUCKET"),
        (SAME.replace("/sandboxes", ""), "S3_PREFIX_ROOT"),
        (SAME.replace(":9000", ":9001"), "S3_ENDPOINT_URL"),
        (SAME + "&region=eu-1", "S3_REGION"),
        ("s3://sandbox/sandboxes", "S3_ENDPOINT_URL"),
        ("/srv/cofferdam", "S3_BUCKET"),
    ],
)
def test_two_storages_are_refused_naming_both(
    url: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refusal(monkeypatch, **S3, STORAGE_URL=url)
    assert "STORAGE_URL" in told
    assert other in told


def test_keys_of_two_owners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_ACCESS_KEY", "somebody")
    monkeypatch.setenv("STORAGE_SECRET_KEY", "another secret")
    told = refusal(monkeypatch, **S3, STORAGE_URL=SAME)
    assert "S3_SECRET_ACCESS_KEY" in told
    assert "S3_ACCESS_KEY_ID" not in told
    assert "another secret" not in told


def test_the_same_storage_may_be_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read(monkeypatch, **S3, STORAGE_URL=f"{SAME}&addressing=path")["queue"]["OPTIONS"]
    assert options["addressing_style"] == "path"
    assert (options["access_key"], options["region_name"]) == ("somebody", "us-east-1")


def test_a_process_does_not_start_with_two_storages(tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, **S3, STORAGE_URL="/srv/cofferdam")
    ended = subprocess.run(
        [sys.executable, ROOT / "manage.py", "check"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "STORAGE_URL names a directory and S3_BUCKET a bucket" in ended.stderr
    assert S3["S3_SECRET_ACCESS_KEY"] not in ended.stdout + ended.stderr


def test_files_go_to_the_bucket_of_the_variables(
    on_swift: Swift, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.STORAGES = read(
        monkeypatch,
        S3_ENDPOINT_URL=on_swift.endpoint,
        S3_ACCESS_KEY_ID=on_swift.access_key,
        S3_SECRET_ACCESS_KEY=on_swift.secret_key,
        S3_BUCKET=BUCKET,
        S3_PREFIX_ROOT=on_swift.prefix,
    )
    file_store(WORKSPACES).save_stream("7/ab/cd", [b"content"])
    assert f"{on_swift.prefix}/workspaces/7/ab/cd" in on_swift.names()
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    settings.STORAGES = storage_settings.storages(StrictEnv())
    with pytest.raises(OSError, match="S3_ENDPOINT_URL does not answer"):
        file_store(WORKSPACES).open_range("7/ab/cd")


@pytest.mark.parametrize(
    ("links", "found"),
    [("", "s3.inside"), ("&links=https://files.example", "files.example"), ("&links=no", None)],
)
def test_links_lead_where_clients_find_the_bucket(
    links: str, found: str | None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_ACCESS_KEY", "somebody")
    monkeypatch.setenv("STORAGE_SECRET_KEY", "something")
    url = f"s3://bucket?endpoint=https://s3.inside&addressing=path{links}"
    settings.STORAGES = read(monkeypatch, STORAGE_URL=url)
    link = storages[WORKSPACES].link("7/ab/cd", expires_in=1, filename="a", mime_type="")
    assert (link and urlsplit(link).hostname) == found


@pytest.mark.parametrize("links", ["http://files.example", "files.example", "yes"])
def test_links_to_no_address_are_refused(links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(monkeypatch, STORAGE_URL=f"s3://bucket?links={links}")
    assert told.startswith("STORAGE_URL: links")


def test_a_link_lasts_at_most_as_long_as_its_signature() -> None:
    assert declaration("PRESIGN_EXPIRES_SECONDS").high == MOST_LINK_SECONDS
