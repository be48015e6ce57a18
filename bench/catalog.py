"""The queues that are compared: where they come from, and how to see that they are through with their jobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class System:
    """A queue.

    Args:
        name: as its registry has it.
        module: its adapter in :mod:`bench.peers`.
        unfinished: SQL that counts the jobs that are neither done nor removed.
        requirements: what pip, or for a queue on Node npm, installs for it; nothing for what runs beside the
            benchmark itself. Pinned, for figures of another version are other figures.
        most_jobs: the most that are given to it in a run: what takes it some ten seconds to drain.
        bulk: whether it has an enqueue of many jobs at once.
        analyze: whether the filled tables are analyzed before a drain, as autovacuum would have done by then.
        python: the oldest version it runs on.
        node: whether it is a package for Node.
    """

    name: str
    module: str
    unfinished: str
    requirements: tuple[str, ...] = ()
    most_jobs: int = 1_000_000
    bulk: bool = True
    analyze: bool = True
    python: tuple[int, int] = (3, 11)
    node: bool = False


RECADO = System(
    "recado",
    "recado",
    unfinished="SELECT count(*) FROM recado.jobs WHERE status <> 'completed'",
)

PEERS = {
    peer.name: peer
    for peer in (
        System(
            "pgqueuer",
            "pgqueuer",
            unfinished="SELECT count(*) FROM pgqueuer",
            requirements=("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        ),
        System(
            "graphile-worker",
            "graphile_worker",
            unfinished="SELECT count(*) FROM graphile_worker._private_jobs",
            requirements=("graphile-worker@0.17.3",),
            node=True,
        ),
        System(
            "procrastinate",
            "procrastinate",
            unfinished="SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
            requirements=("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9", "uvloop==0.23.0"),
            most_jobs=5_000,
        ),
        System(
            "saq",
            "saq",
            unfinished="SELECT count(*) FROM saq_jobs WHERE status IN ('new', 'queued', 'active', 'aborting')",
            requirements=("saq[postgres]==0.26.4", "psycopg[binary,pool]==3.3.9", "uvloop==0.23.0"),
            most_jobs=5_000,
            bulk=False,
        ),
        System(
            "chancy",
            "chancy",
            unfinished="SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'starting', 'running', 'retrying')",
            requirements=("chancy==0.26.0", "psycopg[binary,pool]==3.3.9", "uvloop==0.23.0"),
            most_jobs=10_000,
        ),
        System(
            "awa-pg",
            "awa",
            unfinished="SELECT count(*) FROM awa.jobs WHERE state <> 'completed'",
            requirements=("awa-pg==0.6.9", "asyncpg==0.32.0", "uvloop==0.23.0"),
            most_jobs=20_000,
        ),
        System(
            "oban",
            "oban",
            unfinished="SELECT count(*) FROM oban_jobs"
            " WHERE state IN ('available', 'scheduled', 'executing', 'retryable')",
            requirements=("oban==0.7.0", "psycopg[binary,pool]==3.3.9", "uvloop==0.23.0"),
            most_jobs=10_000,
            # Faster without in a first trial; later ones did not settle it, so it gets the benefit of the doubt.
            analyze=False,
            python=(3, 12),
        ),
    )
}
"""The fastest first."""
