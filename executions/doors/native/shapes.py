"""The shapes of errors, languages, usage and the keys of the ledger, as answers have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

from executions.kernel.shapes import Choices, JsonObject, Time
from executions.tenants.quotas import Quota


class ErrorBodyShape(TypedDict):
    code: Annotated[
        str,
        "SB001 to SB009, or a name such as `not_found`. SB002 is the code of an invalid request.",
    ]
    message: str
    field: str | None
    ran: NotRequired[
        Annotated[
            bool | None,
            "Only if the database cannot be used: whether any code ran; null if unknown.",
        ]
    ]


class ErrorShape(TypedDict):
    error: ErrorBodyShape
    id: Annotated[str | None, "The id of the execution, if one was recorded."]
    receipt: NotRequired[Annotated[JsonObject, "The receipt of the failed execution."]]


class PackagesShape(TypedDict):
    state: Annotated[str, Choices.of(("ready", "preparing", "failed"))]
    reason: Annotated[str, "Why the packages could not be installed; else empty."]
    versions: Annotated[dict[str, str], "The version of each package, by name."]


class LanguagesShape(TypedDict):
    languages: list[str]
    packages: Annotated[
        dict[str, PackagesShape],
        "The packages that Python code can import, by provider id. Providers that "
        "do not know theirs are missing.",
    ]


class LedgerKeyShape(TypedDict):
    key_id: str
    algorithm: str
    public_key: Annotated[str, "The key: 32 bytes in base64."]


class LedgerKeysShape(TypedDict):
    domain: Annotated[str, "The signed text starts with this domain and a line feed."]
    keys: list[LedgerKeyShape]


class QuotaShape(TypedDict):
    limit: Annotated[float | None, "Null if no budget is set."]
    used: Annotated[float, "Includes the amounts that are reserved for work that has not ended."]
    resets_at: Annotated[
        Time | None, "Null if the use decreases by itself, for example when executions end."
    ]


if TYPE_CHECKING:
    QuotasShape = dict[str, QuotaShape]
else:
    QuotasShape = TypedDict("QuotasShape", {quota.value: QuotaShape for quota in Quota})


class UsageShape(TypedDict):
    tenant: str
    quotas: QuotasShape
