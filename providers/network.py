"""Which hosts a sandbox may reach: rules, policies, and what became of each attempt.

A `Network` is what a sandbox is given: the policies of all who have a say, each a layer. An attempt
must be allowed by every layer, so an inner one can only narrow what an outer one allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args
from urllib.parse import unquote

from providers.addresses import is_host, literal
from providers.credentials import SANDBOX, Credential

Mode = Literal["none", "allowlist", "open"]
Outcome = Literal["allowed", "refused", "failed"]

PORTS = (443, 80)
MOST_RULES = 500
MOST_CHARACTERS = 1000
_POLICY_KEYS = frozenset(("mode", "allow", "log_only", "headers"))
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_RULE = re.compile(
    r"(?:(?P<methods>[A-Z]+(?:,[A-Z]+)*)\s+)?"
    r"(?:(?P<scheme>https?)://)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]#]+)"
    r"(?::(?P<ports>\d{1,5}(?:,\d{1,5})*))?"
    r"(?P<path>/[^\s#]*)?"
    r"(?:\s+#\s*(?P<reason>.*))?",
)

# The key of a result's metadata that has what its sandbox tried to reach (`Attempts.to_json`).
NETWORK = "network"
# How many attempts a result lists; all of them are counted.
MOST_LISTED = 200
# What is counted of all of them.
FIGURES = ("allowed", "refused", "failed", "sent", "received")


@dataclass(frozen=True)
class Rule:
    """One line of a list: a host or `*.suffix`, its ports, and what is asked of requests.

    A rule with `methods` or a `path` allows only requests that can be read, so TLS to its host is
    opened. `path` is a prefix. Without a `scheme` both are meant.
    """

    host: str
    ports: tuple[int, ...] = PORTS
    scheme: Literal["", "http", "https"] = ""
    methods: tuple[str, ...] = ()
    path: str = ""
    reason: str = ""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From `[METHODS ][scheme://]host[:ports][/path][ # reason]`, as in `pypi.org`,
        `*.example.com:443,8443` or `GET,HEAD https://api.example.com/v1 # prices`.

        Raises ValueError with what is wrong.
        """
        text = text.strip()
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"A rule has at most {MOST_CHARACTERS} characters.")
        found = _RULE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text[:100]!r} is not a rule, such as pypi.org or *.example.com:443."
            )
        scheme = cast("Literal['', 'http', 'https']", found["scheme"] or "")
        methods = (
            tuple(dict.fromkeys((found["methods"] or "").split(","))) if found["methods"] else ()
        )
        if unknown := [each for each in methods if each not in _METHODS]:
            raise ValueError(f"{unknown[0][:20]}: Is not one of {', '.join(_METHODS)}.")
        usual = {"http": (80,), "https": (443,), "": PORTS}[scheme]
        ports = (
            tuple(dict.fromkeys(map(int, found["ports"].split(",")))) if found["ports"] else usual
        )
        if wrong := [each for each in ports if not 0 < each < 65536]:
            raise ValueError(f"{wrong[0]}: Is not a port.")
        path = found["path"] or ""
        if path and path != normalized_path(path):
            raise ValueError(f"{path[:100]}: Must be a plain path, without '..', '//' and escapes.")
        if literal(found["host"]) is not None and re.fullmatch(r"/\d{1,3}", path):
            raise ValueError(f"{text[:100]}: A rule has hosts and no networks.")
        return cls(
            _host_of_rule(found["host"]),
            ports,
            scheme,
            methods,
            "" if path == "/" else path,
            (found["reason"] or "").strip(),
        )

    @property
    def needs_requests(self) -> bool:
        """Whether it can only be held where requests can be read."""
        return bool(self.methods or self.path)

    def covers_host(self, host: str) -> bool:
        """Whether a host, in the form of `normalized_host`, is this rule's."""
        if self.host.startswith("*."):
            return literal(host) is None and host.endswith(self.host[1:])
        return host == self.host

    def covers_https(self, host: str, port: int) -> bool:
        """Whether any request over TLS to it could be this rule's."""
        return self.scheme != "http" and port in self.ports and self.covers_host(host)

    def covers(self, attempt: Target) -> bool:
        """Whether this rule allows an attempt."""
        if not self.covers_host(attempt.host) or attempt.port not in self.ports:
            return False
        if self.scheme and self.scheme != attempt.scheme:
            return False
        if not self.needs_requests:
            return True
        if not attempt.method:
            return False
        if self.methods and attempt.method not in self.methods:
            return False
        return _is_below(attempt.path, self.path)

    def __str__(self) -> str:
        usual = {"http": (80,), "https": (443,), "": PORTS}[self.scheme]
        host = f"[{self.host}]" if ":" in self.host else self.host
        parts = (
            f"{','.join(self.methods)} " if self.methods else "",
            f"{self.scheme}://" if self.scheme else "",
            host,
            "" if self.ports == usual else f":{','.join(map(str, self.ports))}",
            self.path,
            f" # {self.reason}" if self.reason else "",
        )
        return "".join(parts)


@dataclass(frozen=True)
class Target:
    """What a program asks for. `host` has the form of `normalized_host`.

    `method` and `path` are empty of a tunnel, and `scheme` of one for what is neither.
    """

    host: str
    port: int
    scheme: str = ""
    method: str = ""
    path: str = ""


@dataclass(frozen=True)
class SetHeader:
    """A header that is set in requests over TLS to a host, with the value of a credential of the
    placement `sandbox`. In `text` the value stands for HERE."""

    host: str
    name: str
    text: str
    credential: str


@dataclass(frozen=True)
class NetworkPolicy:
    """One list: nothing, the hosts of the rules, or all that is public.

    With `log_only` it refuses nothing, and notes what it would have refused. The innermost list may
    have `headers`.
    """

    mode: Mode = "none"
    rules: tuple[Rule, ...] = ()
    log_only: bool = False
    headers: tuple[SetHeader, ...] = ()

    @classmethod
    def parse(
        cls, mode: str, lines: Iterable[str] = (), *, log_only: bool = False
    ) -> NetworkPolicy:
        """Raises ValueError with what is wrong."""
        if mode not in get_args(Mode):
            raise ValueError(f"Must be one of {', '.join(get_args(Mode))}.")
        rules = tuple(dict.fromkeys(Rule.parse(line) for line in lines if line.strip()))
        if len(rules) > MOST_RULES:
            raise ValueError(f"A list has at most {MOST_RULES} rules.")
        if rules and mode != "allowlist":
            raise ValueError(f"Only an allowlist has rules, and the mode is {mode}.")
        return cls(cast("Mode", mode), rules, log_only)

    def rule_for(self, target: Target) -> Rule | None:
        """The rule that allows it, None where none does."""
        return next((rule for rule in self.rules if rule.covers(target)), None)

    def allows(self, target: Target) -> bool:
        if self.mode == "allowlist":
            return self.rule_for(target) is not None
        return self.mode == "open"

    def may_allow(self, host: str, port: int) -> bool:
        """Whether any request to it could be allowed."""
        if self.mode != "allowlist":
            return self.mode == "open"
        return any(rule.covers_host(host) and port in rule.ports for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "mode": self.mode,
            "allow": [str(rule) for rule in self.rules],
            "log_only": self.log_only,
        }
        if self.headers:
            said["headers"] = [asdict(each) for each in self.headers]
        return said

    @classmethod
    def from_json(cls, value: Any) -> NetworkPolicy:
        """Raises ValueError."""
        if not isinstance(value, Mapping) or set(value) - _POLICY_KEYS:
            raise ValueError("Must be an object with mode, allow, log_only and headers.")
        allow = value.get("allow", [])
        if not isinstance(allow, list) or not all(isinstance(line, str) for line in allow):
            raise ValueError("allow: Must be a list of rules.")
        mode = str(value.get("mode", "allowlist" if allow else "none"))
        found = cls.parse(mode, allow, log_only=value.get("log_only") is True)
        return replace(found, headers=_headers(value.get("headers", ())))


@dataclass(frozen=True)
class Layer:
    """A policy, and whose it is: `installation`, `tenant`, `template`, `session` or `run`."""

    name: str
    policy: NetworkPolicy


@dataclass(frozen=True)
class Verdict:
    """Whether every layer allows an attempt.

    `layer` is the first that does not, or that only notes it (`noted`); `rule` is the innermost
    rule that allows it, "" where an open layer does.
    """

    is_allowed: bool
    layer: str = ""
    rule: str = ""
    noted: bool = False


@dataclass(frozen=True)
class Budget:
    """What a sandbox may use of the network. `bytes` are those of both ways together."""

    connections: int = 64
    connections_per_minute: int = 1200
    bytes: int = 2 * 1024**3

    @classmethod
    def from_json(cls, value: Any) -> Budget:
        """Raises ValueError."""
        names = {each.name for each in fields(cls)}
        if not isinstance(value, Mapping) or set(value) - names:
            raise ValueError(f"budget: Must be an object with {', '.join(sorted(names))}.")
        for name, number in value.items():
            if type(number) is not int or not 0 <= number < 1 << 53:
                raise ValueError(f"budget: {name} must be a whole number.")
        return cls(**value)


@dataclass(frozen=True)
class Network:
    """What a sandbox may reach: all layers, from the outermost to the innermost, and a budget.

    `credentials` are put into the requests that they are bound to, as far as the layers allow
    those. Of two for one place the first is.
    """

    layers: tuple[Layer, ...]
    budget: Budget = field(default_factory=Budget)
    credentials: tuple[Credential, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be reached, whatever is asked for."""
        return not self.layers or any(
            not layer.policy.log_only
            and (
                layer.policy.mode == "none"
                or (layer.policy.mode == "allowlist" and not layer.policy.rules)
            )
            for layer in self.layers
        )

    def judge(self, target: Target) -> Verdict:
        """Hold an attempt against every layer."""
        noted = rule = ""
        for layer in self.layers:
            if not layer.policy.allows(target):
                if not layer.policy.log_only:
                    return Verdict(False, layer.name)
                noted = noted or layer.name
            elif found := layer.policy.rule_for(target):
                rule = str(found)
        return Verdict(bool(self.layers), noted, rule, noted=bool(noted))

    def opens_tls(self, host: str, port: int) -> bool:
        """Whether its requests must be read: a rule needs that, or a credential is bound to it."""
        if any(rule.covers_https(host, port) for rules in self._bound.values() for rule in rules):
            return True
        tunnel = Target(host, port, "https")
        return not self.judge(tunnel).is_allowed and self.may_allow(host, port).is_allowed

    @property
    def may_open_tls(self) -> bool:
        """Whether there is a host to which requests must be read."""
        rules = (rule for layer in self.layers for rule in layer.policy.rules)
        return bool(self.credentials) or any(
            rule.needs_requests and rule.scheme != "http" for rule in rules
        )

    @cached_property
    def _bound(self) -> Mapping[Credential, tuple[Rule, ...]]:
        return {each: tuple(map(Rule.parse, each.rules)) for each in self.credentials}

    def credentials_for(self, target: Target) -> list[Credential]:
        """Those that are bound to a request. None is to one without TLS."""
        if target.scheme != "https" or target.method not in _METHODS:
            return []
        return [
            each
            for each in self.credentials
            if any(rule.covers(target) for rule in self._bound[each])
        ]

    def upstream_credential(self, host: str) -> Credential | None:
        """The credential whose upstream programs reach under this name, None for none."""
        return next(
            (each for each in self.credentials if each.upstream and host == each.name + SANDBOX),
            None,
        )

    def credentials_of(self, host: str) -> list[Credential]:
        """Those that are bound to any request to a host."""
        return [
            each
            for each in self.credentials
            if any(rule.covers_host(host) for rule in self._bound[each])
        ]

    def may_allow(self, host: str, port: int) -> Verdict:
        """Hold a host against every layer, before a request to it is known."""
        for layer in self.layers:
            if not layer.policy.log_only and not layer.policy.may_allow(host, port):
                return Verdict(False, layer.name)
        return Verdict(bool(self.layers))

    def to_json(self) -> dict[str, Any]:
        """With the values of its credentials: for the process that holds it, and nothing else."""
        layers = [{"name": layer.name, **layer.policy.to_json()} for layer in self.layers]
        said: dict[str, Any] = {"layers": layers, "budget": asdict(self.budget)}
        if self.credentials:
            said["credentials"] = [each.to_json() for each in self.credentials]
        return said

    @classmethod
    def from_json(cls, value: Any) -> Network:
        """Raises ValueError."""
        if not isinstance(value, Mapping) or set(value) - {"layers", "budget", "credentials"}:
            raise ValueError("Must be an object with layers, budget and credentials.")
        credentials = value.get("credentials", [])
        if not isinstance(credentials, list):
            raise ValueError("credentials: Must be a list of objects.")
        layers = value.get("layers")
        if not isinstance(layers, list) or not all(isinstance(each, Mapping) for each in layers):
            raise ValueError("layers: Must be a list of objects.")
        found = cls(
            tuple(
                Layer(
                    str(each.get("name", "")),
                    NetworkPolicy.from_json({k: v for k, v in each.items() if k != "name"}),
                )
                for each in layers
            ),
            Budget.from_json(value.get("budget", {})),
            tuple(map(Credential.from_json, credentials)),
        )
        for rules in found._bound.values():
            check_bound(rules)
        return found


@dataclass(frozen=True)
class Attempt:
    """What became of one connection or request that a sandbox asked for.

    `at` is seconds since 1970, `seconds` how long it lasted. `sent` and `received` are bytes as the
    program sees them. `why` says in a word why it was refused or failed, `layer` whose list refused
    it, `rule` which rule allowed it; with `noted` a list would have refused it that only notes.
    `credential` has the name and version of what was put in (`Credential.label`).
    """

    at: float
    host: str
    port: int
    outcome: Outcome
    why: str = ""
    method: str = ""
    path: str = ""
    layer: str = ""
    rule: str = ""
    noted: bool = False
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    credential: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Attempt:
        return cls(**{each.name: value[each.name] for each in fields(cls) if each.name in value})


@dataclass
class Attempts:
    """The attempts of a run or of a sandbox: the first of them, and figures of all."""

    listed: list[Attempt] = field(default_factory=list)
    allowed: int = 0
    refused: int = 0
    failed: int = 0
    sent: int = 0
    received: int = 0

    def add(self, attempt: Attempt) -> bool:
        """Count it. Return whether it is listed."""
        is_listed = len(self.listed) < MOST_LISTED
        if is_listed:
            self.listed.append(attempt)
        setattr(self, attempt.outcome, getattr(self, attempt.outcome) + 1)
        self.sent += attempt.sent
        self.received += attempt.received
        return is_listed

    def to_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in FIGURES}
        return {**figures, "attempts": [each.to_json() for each in self.listed]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Attempts:
        listed = [Attempt.from_json(each) for each in value.get("attempts", ())]
        return cls(listed, **{name: value[name] for name in FIGURES if name in value})


def _headers(value: Any) -> tuple[SetHeader, ...]:
    names = {each.name for each in fields(SetHeader)}
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, Mapping)
        and set(each) == names
        and all(isinstance(text, str) for text in each.values())
        for each in value
    ):
        raise ValueError(f"headers: Must be a list of objects with {', '.join(sorted(names))}.")
    return tuple(SetHeader(**each) for each in value)


def check_bound(rules: Iterable[Rule]) -> None:
    """Raise ValueError for a rule that no credential can be bound to."""
    for rule in rules:
        if rule.scheme != "https":
            raise ValueError(f"{rule.host}: A credential needs https:// in its rules.")


def with_credentials(network: Network, changes: Mapping[str, Credential | None]) -> Network:
    """Return it with other versions of its credentials, by id; None takes one away."""
    kept = (_changed(each, changes.get(each.id, each)) for each in network.credentials)
    return replace(network, credentials=tuple(each for each in kept if each is not None))


def _changed(former: Credential, now: Credential | None) -> Credential | None:
    """Another version of a credential. What a sandbox's own list has bound stays where it is."""
    if now is not None and now.version < former.version:
        # Of two changes at the same time, the former can come last.
        return former
    if now is None or not former.template or now is former:
        return now
    if now.placement != "sandbox":
        return None
    return replace(former, version=now.version, value=now.value)


def normalized_host(text: str) -> str:
    """The one form of a host that a program names: lower case, without a dot at its end; of an
    address its shortest form. Raises ValueError for what is neither a name in ASCII nor an address,
    such as 0x7f.1, 127.1 or user@host.
    """
    host = text.lower().rstrip(".") if not text.endswith("..") else text
    # A zone is of this machine's interfaces, and hides an address from comparison.
    address = literal(host) if "%" not in host else None
    if address is not None:
        return str(address)
    if not is_host(host) or "_" in host.rpartition(".")[2]:
        raise ValueError(f"{text[:100]!r} is not a host name in ASCII and not an address.")
    return host


def normalized_path(path: str) -> str:
    """A path as servers may read it: escapes resolved, without query, `.`, `..` and empty parts."""
    plain = unquote(path.partition("?")[0].partition("#")[0]).replace("\\", "/")
    parts: list[str] = []
    for part in plain.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    end = "/" if plain.endswith(("/", "/.", "/..")) and parts else ""
    return "/" + "/".join(parts) + end


def _is_below(path: str, prefix: str) -> bool:
    """Whether every way to read a path lies below a prefix of whole parts."""
    if not prefix:
        return True
    raw = path.partition("?")[0]
    plain = unquote(raw)
    # Servers differ in whether they resolve "..", "//", "\\" and what is escaped twice or wrongly.
    if plain != normalized_path(raw) or "%" in plain or "\ufffd" in plain:
        return False
    # Some drop parameters first, so that "..;" is "..".
    if not plain.isprintable() or any(
        part.partition(";")[0] in (".", "..") for part in plain.split("/")
    ):
        return False
    # An escaped slash parts for some servers only.
    whole = prefix.strip("/").split("/")
    return [unquote(part) for part in raw.split("/")[1 : len(whole) + 1]] == whole


def _host_of_rule(text: str) -> str:
    host = text.strip("[]")
    suffix = host.removeprefix("*.")
    if "*" in suffix:
        raise ValueError(f"{text[:100]}: Only a first part may be *, as in *.example.com.")
    if not suffix.isascii():
        import idna

        try:
            suffix = idna.encode(suffix, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"{text[:100]}: {error}") from None
    try:
        normal = normalized_host(suffix)
    except ValueError:
        raise ValueError(
            f"{text[:100]}: Is not a host, such as pypi.org or *.example.com."
        ) from None
    if host.startswith("*."):
        if literal(normal) is not None or "." not in normal:
            raise ValueError(f"{text[:100]}: Covers too much. Name a domain, as in *.example.com.")
        return f"*.{normal}"
    return normal


PRESETS: Mapping[str, Sequence[str]] = {
    "packages": (
        "pypi.org # Python packages",
        "files.pythonhosted.org # Python packages",
        "*.npmjs.org # npm packages",
        "*.yarnpkg.com # npm packages",
    ),
}
