"""The form of names: of runs, clients, parameter servers and files. Pure."""

from __future__ import annotations

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Letters, digits, dots, dashes and underscores. "." and ".." match and must be refused where a file is named so."""
