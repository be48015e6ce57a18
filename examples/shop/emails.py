"""The e-mails the shop sends, as messages ready for SMTP."""

from __future__ import annotations

from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from uuid import UUID

import asyncpg

from recado.app import JobDied

DOMAIN = "shop.example"

SHOP = Address("The Shop", "hello", DOMAIN)
STAFF = Address("The Staff", "staff", DOMAIN)

RECEIPT = """\
Dear {customer},

thank you for your order of {created_at:%d %B %Y}.

    Order  {id}
    Total  {total} EUR

The Shop
"""

ALERT = """\
Job {job_id} ({job_type}, queue {queue}) died after {attempts} failed attempts: {error_class}.

It moves money, so somebody has to look at it.
"""


def receipt(order: asyncpg.Record, *, message_id: UUID) -> EmailMessage:
    """The receipt for a row of ``shop.orders``."""
    message = _message(Address(order["customer"], addr_spec=order["email"]), "Your order", message_id)
    message["Date"] = format_datetime(order["created_at"])
    message["X-Order-Id"] = str(order["id"])
    euros, cents = divmod(order["total_cents"], 100)
    message.set_content(RECEIPT.format(**order, total=f"{euros}.{cents:02}"))
    return message


def alert(died: JobDied, *, message_id: UUID) -> EmailMessage:
    """What the staff gets to read when a critical job died."""
    message = _message(STAFF, f"{died.job_type} died", message_id)
    message["X-Job-Id"] = str(died.job_id)
    message.set_content(ALERT.format(**died.model_dump()))
    return message


def _message(to: Address, subject: str, message_id: UUID) -> EmailMessage:
    message = EmailMessage()
    message["From"] = SHOP
    message["To"] = to
    message["Subject"] = subject
    message["Message-ID"] = f"<{message_id}@{DOMAIN}>"
    return message
