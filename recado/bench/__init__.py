"""Measures the queue on the server at hand, beside the bare statements that it is made of.

A scenario is a plan for one run (:mod:`~recado.bench.scenarios`): what is in the table, and which processes do
what. Each plan exists twice, for recado and for the bare statements, and the two alternate. Whatever is measured
runs in processes of its own (:mod:`~recado.bench.child`); the one that was called only prepares, waits and counts.
"""
