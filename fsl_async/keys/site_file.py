"""Reads the site file, in which a site's administrator lists what may leave the site.

    ~/.config/fsl-async/site.toml        in the keys folder: FSL_KEYS, XDG_CONFIG_HOME, --keys
        allow = ["deltas", "metrics"]
        accept_rollback = false

`--allow` at a client may narrow that list and never widen it. Without the file the command line
decides, and without either only deltas leave. With `accept_rollback = false` a client without
`--accept-rollback` ends when its run goes back to an older version. A file that other users can
change is refused, like the allow-list.
"""

from __future__ import annotations

import stat
import tomllib
from typing import TYPE_CHECKING

from fsl_async.config.site_policy import SitePolicy, listed, parse_kinds
from fsl_async.errors import KeysError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fsl_async.keys.folder import KeysFolder

FILE = "site.toml"
MAX_BYTES = 1 << 16


def site_policy(
    folder: KeysFolder, asked: str | Iterable[str] | None, option: str = "--allow"
) -> SitePolicy:
    """Return this site's policy: site.toml in `folder`, narrowed by the command line's `asked`.

    option: name of the caller's option, for messages. Raises UsageError (an unknown kind, or more
    than the file allows) and KeysError (a file that cannot be read, is no such TOML, or can be
    changed by other users).
    """
    wanted = None if asked is None else parse_kinds(asked, option)
    path = folder.path / FILE
    text = folder.read_shared(FILE, MAX_BYTES)
    target = path.resolve().parent
    if text is not None and target != folder.path.resolve():
        _check_folder(target)
    if text is None:
        fix = f"to allow that, start this client with {option} {{kinds}}"
        return SitePolicy(fix=fix) if wanted is None else SitePolicy(wanted, fix)
    allowed, accepts = _parse(text, str(path))
    if wanted is None:
        wanted = allowed
    beyond = [kind for kind in wanted if not SitePolicy(allowed).lets(kind)]
    if beyond:
        raise UsageError(
            f"{option} {listed(wanted)}: {path} allows {listed(allowed)} only; {option} may narrow"
            " that and not widen it"
        )
    fix = f"to allow that, {path} and {option} must list {{kinds}}"
    return SitePolicy(wanted, fix, refuses_rollback=not accepts)


def _check_folder(path: Path) -> None:
    """Raise KeysError where other users can replace files in the target folder of a link."""
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise KeysError(
            f"{path}, where {FILE} leads to, can be changed by others; run chmod go-w on it"
        )


def _parse(text: str, where: str) -> tuple[frozenset[str], bool]:
    try:
        found = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise KeysError(f"{where}: not valid TOML: {error}") from None
    unknown = sorted(found.keys() - {"allow", "accept_rollback"})
    if unknown:
        known = "there are allow and accept_rollback"
        raise KeysError(f"{where}: unknown key {unknown[0][:40]!r}; {known}")
    allow, accepts = found.get("allow"), found.get("accept_rollback", True)
    if not isinstance(accepts, bool):
        raise KeysError(f"{where}: accept_rollback is true or false")
    if not isinstance(allow, list):
        raise KeysError(f'{where}: write allow as a list, like allow = ["deltas", "metrics"]')
    return parse_kinds(allow, where), accepts
