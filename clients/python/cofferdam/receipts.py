"""Check receipts without the service, with the script of examples/receipts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cofferdam import verify_receipt
from cofferdam.shapes import Execution


class NotCheckable(ValueError):
    """The document is not a receipt and has none."""


@dataclass(frozen=True)
class ReceiptCheck:
    """The result of a check.

    `problems` are the differences. `not_bound` are fields that the receipt does not cover, and
    `not_compared` are files that were not given; neither is a problem.
    """

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
    """Check that an answer, or a receipt alone, is unchanged since the service signed it.

    `keys` is an earlier answer of `ledger_keys()` that you saved yourself: keys that arrive with
    the receipt prove nothing. `code` is the text that was sent, or its file; `artifacts` are the
    downloaded files by their names. Raises NotCheckable.
    """
    document = answer.raw if isinstance(answer, Execution) else answer
    source = code.encode() if isinstance(code, str) else code
    try:
        files = list((artifacts or {}).items())
        found = verify_receipt.check(document, keys, source, files)  # type: ignore[no-untyped-call]
    except verify_receipt.CANNOT as error:
        raise NotCheckable(f"It cannot be checked: {error!r}") from error
    return ReceiptCheck(*map(tuple, found))
