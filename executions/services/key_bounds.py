"""What a key is held to: languages, providers and templates.

Whatever is asked for with a key passes here before anything is recorded. What is asked for in a
session is held to the bounds of the key that asks, and not to those of the one that opened it.
The isolation that a key demands is one of several floors: `services.isolation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executions.models.execution import Execution
from executions.services.record import Caller
from executions.services.routes import Step
from executions.services.routing import PassedOver
from executions.tenants.keys import note_refusal
from executions.tenants.models import ApiKey
from providers import registry
from providers.errors import ErrorCode, InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.hidden_characters import visible
from providers.languages import TABLE, normalize_language
from providers.manager import Lease, manager
from providers.models import ProviderConfig

COMMANDS = ("bash", "command")
# How many of what there is a refusal names.
MOST_NAMED = 30

FORBIDDEN = ErrorCode("forbidden", "Forbidden", "Use a key whose restrictions allow it.", 403)


class BeyondKey(SandboxError):
    """The key is held to something else. Nothing ran, and nothing was recorded."""

    entry = FORBIDDEN


def allowed_steps(caller: Caller, language: str, steps: Sequence[Step]) -> Sequence[Step]:
    """Those of the steps that the caller's key may use for code in this language.

    Raises BeyondKey for another language, and where none of them is left.
    """
    key = caller.api_key
    if key is None:
        return steps
    require_language(key, language, address=caller.client_address)
    if not key.providers:
        return steps
    left = [step for step in steps if key.allows("providers", _provider_of(step))]
    if not left:
        raise _beyond(
            key,
            "provider",
            f"The key may use {key.providers}, which no route of the tenant uses.",
            caller.client_address,
        )
    return left


def require_language(key: ApiKey, *languages: str, address: str = "") -> None:
    """Raises BeyondKey unless one of these is a language of the key."""
    if allowed_languages(key, languages):
        return
    raise _beyond(key, "language", f"The key may run {key.languages}.", address)


def allowed_languages(key: ApiKey, languages: Sequence[str]) -> list[str]:
    return [each for each in languages if key.allows("languages", normalize_language(each))]


def require_template(caller: Caller, template: str) -> None:
    """Raises BeyondKey for a session of another template, or of none."""
    key = caller.api_key
    if key is not None and not key.allows("templates", template):
        raise _beyond(
            key, "template", f"The key may open sessions of {key.templates}.", caller.client_address
        )


def require_lease(execution: Execution, lease: Lease) -> None:
    """Raises PassedOver for a provider that the execution's key may not use.

    Which provider is active may have changed since it was asked for.
    """
    if (key := execution.api_key) is not None and not key.allows("providers", lease.provider_id):
        raise PassedOver(f"The key may not use {lease.provider_id}.", field="provider")


def require_known_key(execution: Execution) -> None:
    """Raises ProviderUnavailable where the key is gone with which something was queued: nobody
    knows any more what it was held to."""
    if execution.api_key_prefix and execution.api_key is None:
        raise ProviderUnavailable("The key of the request was deleted meanwhile.")


def _provider_of(step: Step) -> str:
    if step.session is not None:
        return step.session.provider
    return step.provider_id or manager.in_force() or ""


def _beyond(key: ApiKey, field: str, remedy: str, address: str) -> BeyondKey:
    note_refusal(key, field, detail=remedy, address=address)
    return BeyondKey(f"{field}: The key's restrictions do not allow this. {remedy}", field=field)


def check_languages(words: str, kept: frozenset[str] = frozenset()) -> None:
    """Raise InvalidConfiguration for a language that there is not, and that is not `kept`."""
    # Commands are what sessions run beside code.
    there = {"command", *(known.name for known in TABLE)}
    for word in sorted({normalize_language(word) for word in words.split()} - there - kept):
        # A template may be named as a language, and nobody but its provider knows of it.
        if not Execution.objects.filter(language=word).exists():
            raise InvalidConfiguration(none_of_this_name(word, sorted(there)), field="languages")


def check_providers(words: str, kept: frozenset[str] = frozenset()) -> None:
    """Raise InvalidConfiguration for a provider that there is not, and that is not `kept`."""
    if not (unknown := set(words.split()) - kept):
        return
    rows = ProviderConfig.objects.values_list("provider_id", flat=True)
    there = {*registry.all_providers(), *rows}
    if unknown := unknown - there:
        told = none_of_this_name(min(unknown), sorted(there))
        raise InvalidConfiguration(told, field="providers")


def none_of_this_name(word: str, there: Iterable[str]) -> str:
    """The refusal of a name that there is not, with some of those that there are."""
    names = list(there)
    more = ", …" if len(names) > MOST_NAMED else ""
    told = ", ".join(names[:MOST_NAMED]) or "none"
    return f"{visible(word[:100])}: Unknown name. Available: {told}{more}"
