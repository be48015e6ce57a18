"""How the queue is doing, for dashboards and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.authentication import requires
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from recado.api.auth import ADMIN, METRICS
from recado.queue.counts import Depths, counts, queue_depths

DATABASE_TIMEOUT = 5.0
"""Seconds to wait for a connection, and as many for the answer: together what Prometheus waits for a scrape by
default. The pool grants as many again for a statement that was cancelled to end."""


@requires(ADMIN)
async def metricas(request: Request) -> JSONResponse:
    """Three numbers. The path and the keys are a contract with running dashboards and stay as they are."""
    state = request.app.state
    async with state.pool.acquire(timeout=DATABASE_TIMEOUT) as conn, asyncio.timeout(DATABASE_TIMEOUT):
        now = await counts(conn, schema=state.schema)
    return JSONResponse(
        {
            "pendientes": now.pending,
            "fallidos": now.dead,
            "antiguedad_mas_viejo_segundos": now.oldest_pending,
        }
    )


async def metrics(request: Request) -> Response:
    """The gauges of :class:`DepthsCollector` in Prometheus' text format."""
    # Starlette's requires demands all of its scopes; here either will do.
    if not {ADMIN, METRICS}.intersection(request.auth.scopes):
        raise HTTPException(403)
    state = request.app.state
    async with state.pool.acquire(timeout=DATABASE_TIMEOUT) as conn, asyncio.timeout(DATABASE_TIMEOUT):
        depths = await queue_depths(conn, schema=state.schema)
    registry = CollectorRegistry()
    registry.register(DepthsCollector(depths))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class DepthsCollector(Collector):
    """What was read for one scrape.

    Metric families rather than ``Gauge`` objects: those keep their values in files when the process runs with
    ``PROMETHEUS_MULTIPROC_DIR``, and each scrape would leave some behind.
    """

    def __init__(self, depths: Depths) -> None:
        self._depths = depths

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families, each with its samples."""
        jobs = GaugeMetricFamily(
            "recado_jobs",
            "Jobs that are not over: ready to run, scheduled for later, running, dead.",
            labels=("queue", "job_type", "state"),
        )
        oldest = GaugeMetricFamily(
            "recado_oldest_ready_job_age_seconds",
            "Seconds since the oldest job that is ready could have run.",
            labels=("queue", "job_type"),
        )
        for depth in self._depths.depths:
            labels = (depth.queue, depth.job_type)
            jobs.add_metric((*labels, "ready"), depth.ready)
            jobs.add_metric((*labels, "scheduled"), depth.scheduled)
            jobs.add_metric((*labels, "running"), depth.running)
            jobs.add_metric((*labels, "dead"), depth.dead)
            if depth.oldest_ready is not None:
                oldest.add_metric(labels, depth.oldest_ready)
        yield jobs
        yield oldest
        yield GaugeMetricFamily(
            "recado_workers", "Worker processes with a fresh heartbeat.", value=self._depths.workers
        )
        yield GaugeMetricFamily(
            "recado_notification_queue_usage_ratio",
            "How full the server's NOTIFY queue is; at 1 every commit that notifies fails.",
            value=self._depths.notification_queue_usage,
        )
