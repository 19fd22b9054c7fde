"""Checking receipts, without the service: by the script of examples/receipts itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cofferdam import verify_receipt
from cofferdam.shapes import Execution


class NotCheckable(ValueError):
    """It has no receipt, or is none."""


@dataclass(frozen=True)
class ReceiptCheck:
    """`problems` say what does not fit. Neither `not_bound`, which a receipt does not speak of, nor
    `not_compared`, which was not given, is a problem."""

    problems: tuple[str, ...]
    not_bound: tuple[str, ...]
    not_compared: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.problems


def check_receipt(
    answer: Execution | Mapping[str, Any],
    keys: Mapping[str, Any],
    *,
    code: str | bytes | Path | None = None,
    artifacts: Mapping[str, bytes | Path] | None = None,
) -> ReceiptCheck:
    """Whether an answer, or a receipt alone, is what the service has signed.

    `keys` is what `ledger_keys()` answered once, kept by yourself: keys that come with the receipt
    prove nothing. `code` is the text that was sent, or its file; `artifacts` are what was
    downloaded, by their names. Raises NotCheckable.
    """
    document = answer.raw if isinstance(answer, Execution) else answer
    source = code.encode() if isinstance(code, str) else code
    try:
        files = list((artifacts or {}).items())
        found = verify_receipt.check(document, keys, source, files)  # type: ignore[no-untyped-call]
    except verify_receipt.CANNOT as error:
        raise NotCheckable(f"It cannot be checked: {error!r}") from error
    return ReceiptCheck(*map(tuple, found))
