"""Signed webhooks, in Stripe's scheme: ``Stripe-Signature: t=<unix time>,v1=<signature>``.

The signature is the HMAC-SHA256 of ``<time>.<body>``, in hexadecimal. There may be several ``v1``, as while a
secret is being replaced. See https://docs.stripe.com/webhooks/signature.
"""

from __future__ import annotations

import hashlib
import hmac
import time

HEADER = "Stripe-Signature"

TOLERANCE = 300
"""Seconds between a signature's time and ours, lest somebody plays an old request again; Stripe's own default."""


class InvalidSignature(ValueError):
    """The request is not the payment provider's, or is too old."""


def sign(body: bytes, secret: str, timestamp: int | None = None) -> str:
    """The header for ``body``, as the provider makes it; ``timestamp`` is in Unix seconds, ``None`` is now."""
    time_text = str(int(time.time()) if timestamp is None else timestamp)
    return f"t={time_text},v1={_signature(body, secret, time_text)}"


def verify(body: bytes, header: str, secret: str) -> None:
    """Let only a body pass that was signed with ``secret`` within the last :data:`TOLERANCE` seconds.

    Raises:
        InvalidSignature: for any other.
    """
    fields = [field.partition("=")[::2] for field in header.split(",")]
    time_text = next((value for name, value in fields if name == "t"), "")
    if not time_text.isdecimal() or len(time_text) > 15:
        raise InvalidSignature("cannot accept the event: its signature has no time; send t=<unix time>,v1=<signature>")
    expected = _signature(body, secret, time_text).encode()
    # Bytes, since compare_digest refuses text that is not ASCII.
    if not any(hmac.compare_digest(expected, value.encode()) for name, value in fields if name == "v1"):
        raise InvalidSignature("cannot accept the event: its signature is not ours; sign it with the webhook's secret")
    if abs(time.time() - int(time_text)) > TOLERANCE:
        raise InvalidSignature(f"cannot accept the event: it was not signed within {TOLERANCE} s; send it anew")


def _signature(body: bytes, secret: str, time_text: str) -> str:
    return hmac.new(secret.encode(), time_text.encode() + b"." + body, hashlib.sha256).hexdigest()
