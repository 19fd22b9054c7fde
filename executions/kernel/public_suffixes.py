"""Domains below which anyone can have a host: a rule for all hosts of one allows everyone's.

The list is the Public Suffix List that comes with a package: registries such as `co.uk`, and the
shared domains of clouds such as `github.io`. No network is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import idna
from publicsuffixlist import PSLFILE, PublicSuffixList

from providers.network import Rule


def check_rules(rules: Iterable[Rule]) -> None:
    """Raise ValueError for a rule that covers hosts of anyone."""
    for rule in rules:
        if rule.host.startswith("*.") and is_shared(rule.host[2:]):
            raise ValueError(
                f"{rule.host}: Covers hosts that anyone can have. Name the host itself, or a "
                "domain that belongs to one owner."
            )


def is_shared(domain: str) -> bool:
    """Whether anyone can have a host below this domain. It is ASCII, in lower case."""
    suffixes, above = _known()
    return suffixes.is_public(domain) or domain in above


@cache
def _known() -> tuple[PublicSuffixList, frozenset[str]]:
    """The list, and the domains that have one of its entries below them."""
    return PublicSuffixList(), frozenset(_parents(Path(PSLFILE).read_text(encoding="utf-8")))


def _parents(text: str) -> Iterator[str]:
    for line in text.splitlines():
        entry = line.strip()
        if not entry or entry.startswith(("//", "!")):
            continue
        labels = entry.split(".")
        for start in range(1, len(labels)):
            parent = ".".join(labels[start:])
            yield parent if parent.isascii() else idna.encode(parent, uts46=True).decode()
