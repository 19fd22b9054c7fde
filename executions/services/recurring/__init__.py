"""Runs that come again and again: schedules of tenants, and beginning what is due."""
