"""Why a file was not fetched."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    URL = "url"  # it cannot be read, or asks for what is not done
    HOST = "host"  # not found, or not one to connect to
    CONNECTION = "connection"
    CERTIFICATE = "certificate"
    REDIRECTS = "redirects"
    ANSWER = "answer"  # another status, no HTTP, cut short, encoded
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    NO_ROOM = "no_room"  # here


class FetchError(Exception):
    """`text` is for whoever gave the URL. It tells nothing of this network, and no URL."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
