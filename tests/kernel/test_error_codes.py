"""The table of error codes, which clients are written against."""

from __future__ import annotations

import copy

import pytest

from providers import errors
from providers.errors import CODES, SandboxError

DOCUMENTED = {
    "SB001": ("Provider not initialized", 503, False, True),
    "SB002": ("Invalid configuration", 400, False, False),
    "SB003": ("Connection failed", 502, True, True),
    "SB004": ("Instance creation failed", 503, True, True),
    "SB005": ("Execution timeout", 504, False, False),
    "SB006": ("Out of memory", 507, False, False),
    "SB007": ("Code blocked by security policy", 403, False, False),
    "SB008": ("Rate limit exceeded", 429, True, False),
    "SB009": ("Provider unavailable", 503, True, True),
}

EXCEPTIONS = {
    errors.NotInitialized: "SB001",
    errors.InvalidConfiguration: "SB002",
    errors.ConnectionFailed: "SB003",
    errors.CreationFailed: "SB004",
    errors.BlockedByPolicy: "SB007",
    errors.RateLimited: "SB008",
    errors.ProviderUnavailable: "SB009",
}


def test_the_table_is_the_documented_one() -> None:
    found = {
        code: (entry.title, entry.http_status, entry.retry, entry.fallback)
        for code, entry in CODES.items()
    }
    assert found == DOCUMENTED


def test_every_code_says_what_to_do() -> None:
    assert all(entry.remedy.endswith(".") for entry in CODES.values())


@pytest.mark.parametrize(("exception", "code"), EXCEPTIONS.items())
def test_an_exception_carries_its_code_and_status(exception: type[SandboxError], code: str) -> None:
    error = exception("No luck.", field="endpoint")
    assert (error.code, error.http_status) == (code, DOCUMENTED[code][1])
    assert (str(error), error.field) == ("No luck.", "endpoint")


def test_nothing_is_tried_again_once_code_may_have_run() -> None:
    before = errors.ConnectionFailed("No answer.")
    after = errors.ConnectionFailed("No answer.", started=True)
    assert (before.may_retry, before.may_fall_back) == (True, True)
    assert (after.may_retry, after.may_fall_back) == (False, False)


def test_a_refused_configuration_names_every_field() -> None:
    error = errors.InvalidConfiguration("a: bad", field="a", errors={"a": "bad", "b": "worse"})
    assert error.errors == {"a": "bad", "b": "worse"}
    assert errors.InvalidConfiguration("bad", field="a").errors == {"a": "bad"}
    assert errors.InvalidConfiguration("bad").errors == {}


def test_an_error_survives_copying() -> None:
    error = copy.copy(errors.RateLimited("Too many.", retry_after=2.5))
    assert (error.code, error.message, error.retry_after) == ("SB008", "Too many.", 2.5)
