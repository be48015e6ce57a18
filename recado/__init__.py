"""recado: an asyncio-native job queue that lives in the PostgreSQL you already run."""

from recado.api import accepted
from recado.app import JobDied, JobHandler, JobType, OperationHandler, Recado
from recado.errors import Discard, RecadoError, Retry, Snooze
from recado.queue.models import ClaimedJob, Job, JobStatus, NewJob
from recado.queue.operations import tenant
from recado.version import VERSION as __version__
from recado.worker import Operation, Worker

__all__ = [
    "ClaimedJob",
    "Discard",
    "Job",
    "JobDied",
    "JobHandler",
    "JobStatus",
    "JobType",
    "NewJob",
    "Operation",
    "OperationHandler",
    "Recado",
    "RecadoError",
    "Retry",
    "Snooze",
    "Worker",
    "__version__",
    "accepted",
    "tenant",
]
