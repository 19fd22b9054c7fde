"""Rules, lists, layers and budgets of a network."""

from __future__ import annotations

import json

import pytest

from providers.network import (
    MOST_LISTED,
    MOST_RULES,
    Attempt,
    Attempts,
    Budget,
    Layer,
    Network,
    NetworkPolicy,
    Rule,
    Target,
    normalized_host,
    normalized_path,
)

HTTPS = Target("good.example", 443, "https")


def layers(**policies: NetworkPolicy) -> Network:
    return Network(tuple(Layer(name, policy) for name, policy in policies.items()))


def allow(*lines: str, log_only: bool = False) -> NetworkPolicy:
    return NetworkPolicy.parse("allowlist", lines, log_only=log_only)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("good.example", Rule("good.example")),
        ("*.good.example:443,8443", Rule("*.good.example", (443, 8443))),
        ("http://good.example", Rule("good.example", (80,), "http")),
        ("https://good.example", Rule("good.example", (443,), "https")),
        ("[2606:4700::1]:53", Rule("2606:4700::1", (53,))),
        (
            "GET,HEAD http://api.example/v1 # prices",
            Rule("api.example", (80,), "http", ("GET", "HEAD"), "/v1", "prices"),
        ),
        ("good.example/ # all", Rule("good.example", reason="all")),
    ],
)
def test_a_rule_is_read_and_written(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("rule", "target", "is_covered"),
    [
        ("good.example", HTTPS, True),
        ("good.example", Target("good.example", 8443, "https"), False),
        ("good.example", Target("a.good.example", 443), False),
        ("http://good.example:443", HTTPS, False),
        ("GET good.example", HTTPS, False),
        ("GET good.example", Target("good.example", 80, "http", "GET", "/"), True),
        ("GET good.example", Target("good.example", 80, "http", "POST", "/"), False),
        ("good.example/v1", HTTPS, False),
        ("good.example/v1", Target("good.example", 80, "http", "GET", "/v1/x?y"), True),
        ("good.example/v1/", Target("good.example", 80, "http", "GET", "/v1/x"), True),
        ("good.example/v1", Target("good.example", 80, "http", "GET", "/v10"), False),
        ("1.1.1.1", Target("1.1.1.1", 443), True),
    ],
)
def test_a_rule_covers_what_it_names(rule: str, target: Target, is_covered: bool) -> None:
    assert Rule.parse(rule).covers(target) == is_covered


def test_an_inner_layer_only_narrows() -> None:
    network = layers(tenant=allow("good.example", "other.example"), run=allow("good.example"))
    assert network.judge(HTTPS).is_allowed
    assert network.judge(HTTPS).rule == "good.example"
    assert network.judge(Target("other.example", 443)).layer == "run"
    assert network.judge(Target("evil.example", 443)).layer == "tenant"
    wider = layers(tenant=allow("good.example"), run=NetworkPolicy.parse("open"))
    assert not wider.judge(Target("evil.example", 443)).is_allowed
    assert (
        not layers(tenant=NetworkPolicy(), run=NetworkPolicy.parse("open")).judge(HTTPS).is_allowed
    )


def test_no_layer_allows_nothing() -> None:
    assert Network(()).is_closed
    assert not Network(()).judge(HTTPS).is_allowed
    assert not Network(()).may_allow("good.example", 443).is_allowed


def test_a_list_that_only_notes_refuses_nothing_and_lifts_nothing() -> None:
    noting = layers(
        installation=allow("other.example", log_only=True), tenant=allow("good.example")
    )
    found = noting.judge(HTTPS)
    assert (found.is_allowed, found.noted, found.layer) == (True, True, "installation")
    assert noting.judge(Target("evil.example", 443)).layer == "tenant"
    assert not noting.judge(Target("other.example", 443)).is_allowed
    assert not noting.is_closed


@pytest.mark.parametrize(
    ("policy", "is_closed"),
    [
        (NetworkPolicy(), True),
        (NetworkPolicy("allowlist"), True),
        (NetworkPolicy("none", log_only=True), False),
        (NetworkPolicy("open"), False),
        (allow("good.example"), False),
    ],
)
def test_what_reaches_nothing_is_closed(policy: NetworkPolicy, is_closed: bool) -> None:
    assert layers(tenant=policy).is_closed == is_closed


def test_a_host_may_be_allowed_before_its_request_is_known() -> None:
    network = layers(tenant=allow("GET good.example/v1"))
    assert network.may_allow("good.example", 443).is_allowed
    assert not network.judge(HTTPS).is_allowed
    assert not network.may_allow("good.example", 22).is_allowed
    assert network.may_allow("evil.example", 443).layer == "tenant"


def test_a_network_is_the_same_after_json() -> None:
    network = Network(
        (
            Layer("installation", NetworkPolicy.parse("open", log_only=True)),
            Layer("tenant", allow("GET http://api.example/v1 # prices", "[::1]:53")),
            Layer("run", NetworkPolicy()),
        ),
        Budget(connections=1, connections_per_minute=2, bytes=3),
    )
    assert Network.from_json(json.loads(json.dumps(network.to_json()))) == network


@pytest.mark.parametrize(
    "value",
    [
        None, [], "open", {"layers": {}}, {"layers": [1]}, {"layers": [], "more": 1}, {},
        {"layers": [{"mode": "all"}]}, {"layers": [{"mode": "open", "allow": ["a.example"]}]},
        {"layers": [{"allow": "a.example"}]}, {"layers": [{"allow": ["*.com"]}]},
        {"layers": [], "budget": {"bytes": -1}}, {"layers": [], "budget": {"bytes": True}},
        {"layers": [], "budget": {"bytes": 1.5}}, {"layers": [], "budget": {"speed": 1}},
        {"layers": [{"allow": ["a.example"] * 2, "deny": []}]}, {"layers": [], "budget": None},
    ],
)  # fmt: skip
def test_what_is_no_network_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        Network.from_json(value)


def test_what_is_left_out_is_closed() -> None:
    assert NetworkPolicy.from_json({}) == NetworkPolicy("none")
    assert NetworkPolicy.from_json({"mode": "open", "log_only": "true"}).log_only is False
    assert NetworkPolicy.from_json({"allow": ["a.example"]}).mode == "allowlist"
    with pytest.raises(ValueError):
        NetworkPolicy.parse("allowlist", [f"a{each}.example" for each in range(MOST_RULES + 1)])


@pytest.mark.parametrize(
    ("text", "host"),
    [("Good.Example.", "good.example"), ("[::0:1]", "::1"), ("1.1.1.1", "1.1.1.1"),
     ("a_b.example", "a_b.example")],
)  # fmt: skip
def test_a_host_has_one_form(text: str, host: str) -> None:
    assert normalized_host(text) == host


@pytest.mark.parametrize(
    ("path", "normal"),
    [("/", "/"), ("/a/./b/../c", "/a/c"), ("//a", "/a"), ("/a/", "/a/"), ("/%61?x#y", "/a"),
     ("/../..", "/"), ("\\a\\b", "/a/b"), ("/a/..", "/")],
)  # fmt: skip
def test_a_path_has_one_form(path: str, normal: str) -> None:
    assert normalized_path(path) == normal


def test_all_attempts_are_counted_and_the_first_are_listed() -> None:
    attempts = Attempts()
    for number in range(MOST_LISTED + 1):
        attempts.add(Attempt(0.0, "a.example", number, "refused", sent=1, received=2))
    attempts.add(Attempt(0.0, "a.example", 443, "allowed"))
    assert (attempts.refused, attempts.allowed, attempts.sent) == (201, 1, 201)
    assert len(attempts.listed) == MOST_LISTED
    assert Attempts.from_json(json.loads(json.dumps(attempts.to_json()))) == attempts
