"""The short form of a fail-over; ``make chaos`` runs the full one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from recado.queue.connections import Connector
from tests.chaos.scenarios.failover import SHORT, fail_over

RECOVERY = 10.0
"""Seconds from the kill, promotion included; the longest wait between two tries is five."""


async def test_nothing_acknowledged_is_lost_with_the_primary_and_workers_go_on_with_the_standby(
    schema: str, tmp_path: Path
) -> None:
    outcome = await fail_over(tmp_path, schema, SHORT)
    print(f"the first job after the kill was completed {outcome.recovered:.1f} s later")
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
    assert outcome.recovered is not None
    assert outcome.recovered < RECOVERY


@pytest.fixture
def beside(dsn: str) -> str:
    """The test's URL with room for another host and port before its own."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    host = query["host"][0] if "host" in query else parts.hostname
    port = query["port"][0] if "port" in query else parts.port
    user = parts.netloc.rpartition("@")[0]
    return f"postgresql://{user}@{parts.path}?host={{host}},{host}&port={{port}},{port}&target_session_attrs=read-write"


async def test_a_first_host_that_is_silent_leaves_time_for_the_second(beside: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never says a word
        url = beside.format(host="127.0.0.1", port=silent.getsockname()[1])
        async with asyncio.timeout(10):
            conn = await Connector((url,), {"timeout": 2.0}).connect("claims")
    await conn.close()


async def test_a_first_host_that_refuses_is_passed_over(beside: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = beside.format(host="127.0.0.1", port=unused.getsockname()[1])
        conn = await Connector((url,), {}).connect("claims")
    await conn.close()


async def test_of_several_hosts_the_last_ones_trouble_is_told() -> None:
    with socket.socket() as unused, socket.create_server(("127.0.0.1", 0)) as silent:
        unused.bind(("127.0.0.1", 0))
        ports = f"{unused.getsockname()[1]},{silent.getsockname()[1]}"
        connector = Connector((f"postgresql://ann@/shop?host=127.0.0.1,127.0.0.1&port={ports}",), {"timeout": 0.2})
        with pytest.raises(TimeoutError):
            await connector.connect("claims")
