"""recado: an asyncio-native job queue that lives in the PostgreSQL you already run."""

from recado.app import JobDied, JobHandler, JobType, Recado
from recado.errors import Discard, RecadoError, Retry, Snooze
from recado.queue.models import ClaimedJob, Job, JobStatus, NewJob
from recado.version import VERSION as __version__
from recado.worker import Worker

__all__ = [
    "ClaimedJob",
    "Discard",
    "Job",
    "JobDied",
    "JobHandler",
    "JobStatus",
    "JobType",
    "NewJob",
    "Recado",
    "RecadoError",
    "Retry",
    "Snooze",
    "Worker",
    "__version__",
]
