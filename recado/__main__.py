"""``python -m recado`` is ``recado``."""

from __future__ import annotations

from recado.cli import main

if __name__ == "__main__":
    main()
