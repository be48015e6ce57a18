"""What can be read out of a blueprint: how full it is, what is too heavy, and which racks could be given up.

The kind is called ``ai_analysis``, as it would be with a model behind it. Here it is arithmetic, and asks nobody.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import BaseModel

from examples.shop import blueprints
from examples.shop.application import app
from recado import Operation, tenant

MAX_WEIGHT = 1_000
"""Kilograms of a rack that a raised floor bears."""

MAX_SUGGESTIONS = 20
"""More of them nobody reads."""

SELECT_RACKS = """
SELECT name, height_units, used_units, weight_kg FROM shop.racks
WHERE organization_id = $1 AND blueprint_id = $2 ORDER BY position
"""


class Load(NamedTuple):
    """How full a rack is."""

    name: str
    height_units: int
    used_units: int
    weight_kg: int

    @property
    def free_units(self) -> int:
        return self.height_units - self.used_units


class Analysis(BaseModel):
    """Names what is to be looked at."""

    blueprint_id: UUID


@app.operation("ai_analysis", backoff=(1.0, 5.0))
async def analyze_blueprint(payload: Analysis, operation: Operation, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Look at a blueprint. It changes nothing, so another attempt is no matter."""
    organization_id = operation.organization_id
    async with tenant(state["pool"], organization_id) as conn:
        blueprint = await blueprints.find(conn, organization_id, payload.blueprint_id)
        rows = await conn.fetch(SELECT_RACKS, organization_id, payload.blueprint_id)
    if blueprint is None:
        await operation.mark_error("There is no such blueprint any more.")
        return None
    await operation.progress(20)
    findings = await asyncio.to_thread(analyze, [Load(**row) for row in rows])
    return {"blueprint_id": str(blueprint.id), "name": blueprint.name, **findings}


def analyze(racks: Sequence[Load]) -> dict[str, Any]:
    """Sums, the heaviest rack, and what to do."""
    height = sum(rack.height_units for rack in racks)
    used = sum(rack.used_units for rack in racks)
    heaviest = max(racks, key=lambda rack: rack.weight_kg, default=None)
    suggestions = [
        f"{rack.name} weighs {rack.weight_kg} kg; move something out until it is {MAX_WEIGHT} kg."
        for rack in racks
        if rack.weight_kg > MAX_WEIGHT
    ]
    suggestions += [
        f"Move the {source.used_units} units of {source.name} into {target.name}, and give {source.name} up."
        for source, target in consolidate(racks)
    ]
    return {
        "racks": len(racks),
        "height_units": height,
        "free_units": height - used,
        "percent_used": round(100 * used / height) if height else 0,
        "heaviest": None if heaviest is None else {"name": heaviest.name, "weight_kg": heaviest.weight_kg},
        "suggestions": suggestions[:MAX_SUGGESTIONS],
    }


def consolidate(racks: Sequence[Load]) -> list[tuple[Load, Load]]:
    """Which racks can be emptied into which others.

    The emptiest go first, each into the rack that it fills best, if that bears the weight. What took something in
    stays where it is.
    """
    # By free units: the tightest fit is the first that is large enough.
    targets = sorted((rack.free_units, number) for number, rack in enumerate(racks) if rack.used_units)
    weights = [rack.weight_kg for rack in racks]
    took: set[int] = set()
    moves: list[tuple[Load, Load]] = []
    for free, number in sorted(targets, key=lambda target: racks[target[1]].used_units):
        source = racks[number]
        if number in took:
            continue
        fits = targets[bisect_left(targets, (source.used_units, -1)) :]
        target = next((entry for entry in fits if entry[1] != number), None)
        if target is None or len(moves) == MAX_SUGGESTIONS:
            break  # what follows needs even more room
        room, into = target
        if weights[into] + source.weight_kg > MAX_WEIGHT:
            continue
        targets.remove((free, number))
        targets.remove(target)
        insort(targets, (room - source.used_units, into))
        weights[into] += source.weight_kg
        took.add(into)
        moves.append((source, racks[into]))
    return moves
