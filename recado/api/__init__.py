"""The HTTP side of the queue: health, metrics, and who may see them."""

from __future__ import annotations

from recado.api.app import create_app
from recado.api.auth import TokenBackend, User

__all__ = ["TokenBackend", "User", "create_app"]
