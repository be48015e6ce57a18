"""What can go wrong with a peer."""

from __future__ import annotations


class PeerError(Exception):
    """A peer cannot be installed, or cannot be measured; the message is one sentence that says why."""
