"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field

# A ledger that was exchanged as a whole has one for every entry.
KEPT = 1000


@dataclass(frozen=True)
class Finding:
    """What is wrong, at which entry. `kind` is what was probably done."""

    kind: str
    sequence: int
    detail: str

    def __str__(self) -> str:
        return f"entry {self.sequence}: {self.kind}: {self.detail}"


@dataclass
class Verification:
    """What was read, and what was found wrong with it, in the order of the entries.

    `rows` are those beside executions that were compared; `unproven` were never entered, and the
    ledger never took stock of them. Of more than a thousand findings the first thousand are kept,
    and `omitted` counts the others.
    """

    entries: int = 0
    executions: int = 0
    rows: int = 0
    unproven: int = 0
    head: str = ""
    checkpoints: int = 0
    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0

    @property
    def is_intact(self) -> bool:
        return not self.findings

    def add(self, finding: Finding) -> None:
        if len(self.findings) < KEPT:
            self.findings.append(finding)
        else:
            self.omitted += 1

    def sort(self) -> None:
        self.findings.sort(key=lambda finding: finding.sequence)
