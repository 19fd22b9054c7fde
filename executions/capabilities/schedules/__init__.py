"""Schedules of tenants: runs that are repeated, and begun when they are due."""

from __future__ import annotations
