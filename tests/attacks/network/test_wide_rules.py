"""Rules that would allow more than whoever writes them may know."""

from __future__ import annotations

import pytest

from providers.network import NetworkPolicy, Rule


@pytest.mark.parametrize("text", [
    "*", "*.", "*.com", "*.com.", "*.COM", "*.*", "*.*.com", "**.example.com", "a*.example.com",
    "*example.com", "a.*.com", "*.127.0.0.1", "*.0x7f.1", "*.[::1]", "*.1", "0.0.0.0/0", "10.0.0.0/8", "[::]/0",
    "http://*", "*:443", "", "ftp://a.example", "a.example:0", "a.example:70000",
    "a.example:1-9", "user@a.example", "a.example/../x", "a.example//x", "a.example/%2e",
    "BREW a.example", "a b.example", "a.example\nb.example", "a.example # x\n*.com", "0x7f.1", "127.1",
    "a.example/x?y=/../z#",
])  # fmt: skip
def test_what_covers_too_much_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ValueError):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [("*.Example.COM.", "*.example.com"), ("B\u00fccher.example", "xn--bcher-kva.example"),
     ("*.b\u00fccher.example", "*.xn--bcher-kva.example"), ("[::0001]", "::1"),
     ("\uff47ood.example", "good.example")],
)  # fmt: skip
def test_what_remains_has_one_form(text: str, host: str) -> None:
    assert Rule.parse(text).host == host


def test_a_suffix_has_no_addresses_and_not_itself() -> None:
    rule = Rule.parse("*.example.com")
    assert rule.covers_host("a.example.com")
    assert rule.covers_host("a.b.example.com")
    for host in ("example.com", "badexample.com", "example.com.evil.example", "10.0.0.1"):
        assert not rule.covers_host(host)


def test_one_bad_line_refuses_the_list() -> None:
    with pytest.raises(ValueError, match=r"\*\.com"):
        NetworkPolicy.parse("allowlist", ["good.example", "*.com"])
