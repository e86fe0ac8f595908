"""Has mkdocstrings show arguments as lists (.mkdocs.yml)."""

from typing import Any

import griffe
from site_hooks import as_markdown


class Arguments(griffe.Extension):
    """Rewrites each docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
