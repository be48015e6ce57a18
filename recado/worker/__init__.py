"""The daemon that claims jobs and runs them."""

from recado.worker.events import Event, EventKind
from recado.worker.operations import Operation
from recado.worker.worker import Worker

__all__ = ["Event", "EventKind", "Operation", "Worker"]
