"""Reports for auditors: what ran, and what the ledger says of it, as signed files."""

from __future__ import annotations
