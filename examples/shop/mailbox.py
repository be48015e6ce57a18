"""A mail server for the shop to send to: it accepts everything and keeps it as ``.eml`` files."""

from __future__ import annotations

import asyncio
import email
import email.policy
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiosmtpd.smtp import SMTP, Envelope, Session

HOST = "127.0.0.1"


class Mailbox:
    """Handles aiosmtpd's DATA command.

    A message goes into a file named after its Message-ID, as mail servers do that suppress duplicates: one that is
    sent again, since the answer to the first was lost, takes its own place.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        """Keep the message; accepted is what is in the file."""
        content = envelope.original_content or b""
        message_id = email.message_from_bytes(content, policy=email.policy.default)["Message-ID"]
        if message_id is None:
            return "554 cannot keep the message: it has no Message-ID; add one"
        name = re.sub(r"[^\w@.-]", "_", message_id.strip("<>"))
        await asyncio.to_thread((self._folder / f"{name}.eml").write_bytes, content)
        return "250 Message accepted for delivery"


@asynccontextmanager
async def mail_server(folder: Path) -> AsyncIterator[int]:
    """Serve SMTP until the block ends.

    Args:
        folder: where the messages go; created if it is missing.

    Yields:
        The port, which is any that is free.
    """
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    mailbox = Mailbox(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(mailbox, hostname=HOST, loop=loop), HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
