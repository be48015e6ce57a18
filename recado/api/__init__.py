"""The HTTP side of the queue: health, metrics, operations, and who may see them."""

from __future__ import annotations

from recado.api.app import create_app
from recado.api.auth import TokenBackend, User
from recado.api.events import Hub
from recado.api.operations import accepted, operation_routes

__all__ = ["Hub", "TokenBackend", "User", "accepted", "create_app", "operation_routes"]
