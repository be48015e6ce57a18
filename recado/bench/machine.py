"""What the figures were measured on."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from recado.version import VERSION

CPU_INFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """The machine that this process runs on, and what runs it; the server may be on another."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "event_loop": _event_loop(),
        "asyncpg": importlib.metadata.version("asyncpg"),
        "recado": VERSION,
    }


def _cpu_model() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _event_loop() -> str:
    try:
        return f"uvloop {importlib.metadata.version('uvloop')}"
    except importlib.metadata.PackageNotFoundError:  # Windows
        return asyncio.DefaultEventLoopPolicy.__name__
