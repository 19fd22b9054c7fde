"""Commands that do something to one account, named as it signs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction


class AccountCommand(BaseCommand, ABC):
    """Looks the account up, and has `change` do its work in one transaction."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the name the account signs in with")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["name"]
        user = get_user_model()._default_manager.filter(username=name).first()
        if user is None:
            raise CommandError(f"There is no account {name!r}.")
        with transaction.atomic():
            done = self.change(user)
        self.stdout.write(done)

    @abstractmethod
    def change(self, user: User) -> str:
        """Do it, and say in one line what was done. Raises CommandError."""
