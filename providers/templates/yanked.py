"""Files that an index has yanked (PEP 592): out of use, though a pinned version still has them.

No lock says so. The program that resolves asks the index's pages of the locked packages, in its
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from providers.errors import InvalidConfiguration

YANKED = "yanked.json"
_MOST_REASON = 300


def program(lock_file: str, index_url: str) -> str:
    """Return the Python code that writes the reasons by the names of yanked files, once there is a
    lock. It ends with a message where the index cannot be asked."""
    code = _PROGRAM.replace("LOCK_FILE", repr(lock_file)).replace("INDEX", repr(index_url))
    return code.replace("YANKED", repr(f"artifacts/{YANKED}"))


def read(text: str) -> Mapping[str, str]:
    """Return the reasons by file name, as the program has written them. One may be empty.

    Raises InvalidConfiguration with field python.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError):
        raise InvalidConfiguration(
            f"python: {YANKED} of the resolver cannot be read.", field="python"
        ) from None
    return {name: str(reason)[:_MOST_REASON] for name, reason in found.items()}


_PROGRAM = """\
import base64, json, sys, tomllib
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

def file_of(address):
    return unquote(urlsplit(address or "").path.rpartition("/")[2])

class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.yanked = {}

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "a" and "data-yanked" in found:
            self.yanked[file_of(found.get("href"))] = found["data-yanked"] or ""

def in_json(document):
    # True, or the reason. An empty reason is none in this form.
    return {
        file_of(each["url"]): each["yanked"] if isinstance(each["yanked"], str) else ""
        for each in document["files"]
        if each.get("yanked")
    }

index = urlsplit(INDEX)
headers = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.1"}
if index.username:
    user = f"{unquote(index.username)}:{unquote(index.password or '')}"
    headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
place = urlunsplit(index._replace(netloc=index.netloc.rpartition("@")[2])).rstrip("/")

def yanked_of(name):
    try:
        with urlopen(Request(f"{place}/{name}/", headers=headers), timeout=60) as answer:
            kind, content = answer.headers.get_content_type(), answer.read()
        if kind.endswith("json"):
            return in_json(json.loads(content))
        page = Page()
        page.feed(content.decode("utf-8", "replace"))
        return page.yanked
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"The index cannot be asked whether {name} was yanked: {error}")

with open(LOCK_FILE, "rb") as file:
    names = sorted({each["name"] for each in tomllib.load(file).get("packages", [])})
with ThreadPoolExecutor(4) as pool:
    pages = list(pool.map(yanked_of, names))
with open(YANKED, "w") as file:
    json.dump({name: reason for page in pages for name, reason in page.items()}, file)
"""
