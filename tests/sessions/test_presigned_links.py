"""Links into a bucket: signed by us, checked by a service that believes nobody, and ending."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
import requests

from executions.kernel.storage import MOST_LINK_SECONDS, WORKSPACES, file_store
from tests.support.bucket import Swift

CONTENT = b"four and twenty blackbirds"
KEY = "7/ab/abcdef-0123"


def made(**changed: Any) -> str:
    file_store(WORKSPACES).save_stream(KEY, [CONTENT])
    wanted = {"expires_in": 60, "filename": "a/日本.csv", "mime_type": "text/csv", **changed}
    link = file_store(WORKSPACES).link(KEY, **wanted)
    assert link is not None
    return link


def fetch(link: str, **headers: str) -> requests.Response:
    return requests.get(link, headers=headers, timeout=30)


def test_a_link_downloads_the_file_and_shows_it_nowhere(on_swift: Swift) -> None:
    answer = fetch(made())
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["Content-Type"].partition(";")[0] == "text/csv"
    assert answer.headers["Content-Disposition"] == (
        "attachment; filename=\"__.csv\"; filename*=UTF-8''%E6%97%A5%E6%9C%AC.csv"
    )
    assert answer.headers["Cache-Control"] == "private, no-store"


def test_a_link_gives_ranges(on_swift: Swift) -> None:
    answer = fetch(made(), Range="bytes=3-4")
    assert (answer.status_code, answer.content) == (206, CONTENT[3:5])


def test_what_may_be_a_program_is_sent_as_bytes(on_swift: Swift) -> None:
    answer = fetch(made(filename='x"\r\nSet-Cookie: a=b\r\n.html', mime_type="text/html"))
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert "Set-Cookie" not in answer.headers
    assert answer.headers["Content-Disposition"].startswith("attachment;")


@pytest.mark.parametrize(
    "part",
    [
        "path",
        "X-Amz-Expires",
        "X-Amz-Date",
        "X-Amz-Signature",
        "response-content-disposition",
        "response-content-type",
        "response-cache-control",
    ],
)
def test_a_changed_link_is_refused(part: str, on_swift: Swift) -> None:
    link = made()
    neighbour = KEY.replace("abcdef", "bcdefa")
    file_store(WORKSPACES).save_stream(neighbour, [b"another's"])
    if part == "path":
        changed = link.replace(KEY, neighbour)
    else:
        query = dict(parse_qsl(urlsplit(link).query))
        old = query[part]
        another = "1" if old[-2] == "0" else "0"
        new = {"X-Amz-Expires": "604800", "X-Amz-Date": f"{old[:-2]}{another}Z"}
        value = new.get(part, "0" * len(old))
        pairs = ((name, value if name == part else each) for name, each in query.items())
        changed = f"{link.partition('?')[0]}?" + "&".join(
            f"{name}={quote(each, safe='')}" for name, each in pairs
        )
    assert changed != link
    answer = fetch(changed)
    assert answer.status_code == 403
    assert CONTENT not in answer.content
    assert b"another's" not in answer.content


def test_a_link_ends(on_swift: Swift) -> None:
    link = made(expires_in=1)
    deadline = time.monotonic() + 60
    while (answer := fetch(link)).status_code != 403:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert b"expired" in answer.content


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_link_is_for_reading_alone(method: str, on_swift: Swift) -> None:
    answer = requests.request(method, made(), data=b"mine", timeout=30)
    assert answer.status_code == 403
    assert b"".join(file_store(WORKSPACES).open_range(KEY)) == CONTENT


def test_a_link_does_not_tell_the_secret_key(on_swift: Swift) -> None:
    assert on_swift.secret_key not in made()


@pytest.mark.parametrize("seconds", [0, -1, MOST_LINK_SECONDS + 1])
def test_a_link_lasts_seven_days_at_most(seconds: int, on_swift: Swift) -> None:
    with pytest.raises(ValueError, match="a link lasts"):
        made(expires_in=seconds)
    assert "X-Amz-Expires=604800" in made(expires_in=MOST_LINK_SECONDS)
