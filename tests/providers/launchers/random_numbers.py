"""Programs that draw random numbers."""

from __future__ import annotations

# Every source of random numbers that a process may have seeded before it was forked.
DRAW = """
import json, multiprocessing.process, os, random, secrets, ssl, sys, tempfile, uuid
import numpy
print(json.dumps({
    "random": random.random(),
    "numpy": numpy.random.random(),
    "numpy, normal": numpy.random.standard_normal(),
    "numpy, generator": numpy.random.default_rng().random(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "secrets": secrets.token_hex(8),
    "openssl": ssl.RAND_bytes(8).hex(),
    "tempfile": next(tempfile._get_candidate_names()),
    "multiprocessing": multiprocessing.process.current_process().authkey.hex(),
    **{name: value() for name, value in getattr(sys, "more", {}).items()},
}))
"""
PRELOADED = ("numpy", "uuid", "ssl", "tempfile", "multiprocessing.process", "random")


def assert_all_different(drawn: list[dict[str, object]]) -> None:
    same = [name for name in drawn[0] if len({one[name] for one in drawn}) < len(drawn)]
    assert same == []
