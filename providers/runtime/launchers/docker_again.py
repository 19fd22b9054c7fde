"""Taking over a container that a former process of the pool has kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from providers.errors import CreationFailed
from providers.runtime.launchers.docker_engine import Engine, Started
from providers.runtime.launchers.docker_owner import Owner
from providers.runtime.launchers.docker_shape import differences, shape_of, weaknesses


def attach_again(
    engine: Engine,
    owner: Owner,
    name: str,
    container: str,
    runtime: str,
    shape: Mapping[str, Any],
) -> Started:
    """Attach to a container of this pool, by its id, and give it the `name` of its new owner.

    `shape` is how it was made, `runtime` of which class. Raises CreationFailed for one that has
    ended, is not as it was made, or was not made by this pool, and ProviderUnavailable where the
    engine cannot be asked.
    """
    inspected = engine.inspect(container)
    if inspected is None or not inspected["State"]["Running"]:
        raise CreationFailed("It has ended.")
    seen = shape_of(inspected)
    wrong = [*differences(seen, shape), *weaknesses(seen, runtime)]
    if inspected["Id"] != container or not owner.has_made(seen["Labels"] or {}):
        wrong.append("Labels")
    if wrong:
        raise CreationFailed(f"It is not as it was made: {', '.join(dict.fromkeys(wrong))}.")
    if inspected["Name"].lstrip("/") != name:
        engine.rename(container, name)
    return engine.attach(inspected)
