"""Reads and writes the keys folder: this node's pair and the keys that it trusts.

    ~/.config/fsl-async/     mode 0700; or $XDG_CONFIG_HOME/fsl-async, $FSL_KEYS or --keys DIR
        node.key             mode 0600: the pair. A process that has this file is this node
        allowed.txt          the allow-list (`allow_list.py`)
        site.toml            what may leave this site (`site_policy`)
        sites.txt            keys of the other sites of secure runs, lines as in allowed.txt
        privacy/             what this site has spent in private runs (`learn/tune/privacy.py`)

A file that other users can read (the secret) or change (the list, the folder) is refused with the
command that repairs it. A person decides whether a key that was readable for a while may be used.

In site.toml a site's administrator lists what may leave the site:

        allow = ["deltas", "metrics"]
        accept_rollback = false

`--allow` at a client may narrow that list and never widen it. Without the file the command line
decides, and without either only deltas leave. With `accept_rollback = false` a client without
`--accept-rollback` ends when its run goes back to an older version. A file that other users can
change is refused, like the allow-list. The table `audit` limits what `fsl-node audit` may find:

        [audit]
        words = 5
        auc = 0.6
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from fsl_async.config.site_policy import AuditLimits, SitePolicy, listed, parse_kinds
from fsl_async.errors import KeysError, UsageError, program
from fsl_async.files.files import locked_folder, replace_bytes
from fsl_async.keys import allow_list
from fsl_async.keys.allow_list import AllowList, Entry
from fsl_transport.errors import LocalError
from fsl_transport.zmq.curve import KeyPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


SECRET, ALLOWED, SITES = "node.key", "allowed.txt", "sites.txt"
_SITES_HEAD = """\
# Keys of the other sites of runs with secure sums, one a line: KEY  NAME
# Compare them with what their administrators read to you; a site with another key is refused.
"""
VARIABLE = "FSL_KEYS"
_MAX_SECRET_BYTES = 4096
_HEAD = (
    "# The key pair of a node of fsl-async. Any holder of this file is this node: mode 0600, never"
    " in a mail.\n"
)


def default_directory() -> Path:
    """Return the default keys folder, by $FSL_KEYS or the XDG base directory specification."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
    return base / "fsl-async"


@frozen
class KeysFolder:
    """One node's keys. Every method may raise KeysError."""

    path: Path = field(factory=default_directory)

    @property
    def secret_path(self) -> Path:
        """The file of the pair."""
        return self.path / SECRET

    @property
    def allowed_path(self) -> Path:
        """The file of the allow-list."""
        return self.path / ALLOWED

    def command(self, words: str) -> str:
        """Return the `fsl-node keys` command for this folder."""
        is_default = self.path == default_directory()
        elsewhere = "" if is_default else f" --keys {shlex.quote(str(self.path))}"
        return f"{program()} keys {words}{elsewhere}"

    def pair(self) -> KeyPair:
        """Return this node's pair. A KeysError without one has the command that makes it."""
        text = self._read_guarded(self.secret_path, stat.S_IRWXG | stat.S_IRWXO, _MAX_SECRET_BYTES)
        if text is None:
            raise KeysError(f"no key in {self.path}: run {self.command('new')}")
        damaged = KeysError(
            f"{self.secret_path}: damaged; restore it, or remove it and run {self.command('new')}"
        )
        words = [line.split() for line in text.splitlines() if line and not line.startswith("# ")]
        if [line[:1] for line in words] != [["public"], ["secret"]]:
            raise damaged
        try:
            pair = KeyPair.of_secret(" ".join(words[1][1:]))
        except LocalError:
            raise damaged from None
        if [pair.public] != words[0][1:]:
            raise damaged
        return pair

    def has_pair(self) -> bool:
        """Whether the file of the pair exists; it may be damaged."""
        return self.secret_path.exists()

    def make_pair(self) -> KeyPair:
        """Make this node's pair, durably. Raises KeysError where there is one."""
        pair = KeyPair.new()
        # "-..." would be an option, "#..." looks like a comment.
        while not pair.public[:1].isalnum():
            pair = KeyPair.new()
        with self._changing():
            try:
                text = f"{_HEAD}public {pair.public}\nsecret {pair.secret}\n"
                replace_bytes(self.secret_path, text.encode(), is_new=True)
            except FileExistsError:
                raise KeysError(
                    f"{self.secret_path} exists already: {self.command('pub')} prints its public"
                    " half; move the file away for a new key, which every server must then trust"
                ) from None
        return pair

    def allowed(self) -> AllowList | None:
        """Return the present allow-list; None where there is no file."""
        text = self.read_shared(ALLOWED, allow_list.MAX_BYTES)
        return None if text is None else allow_list.parse(text, str(self.allowed_path))

    def know_sites(self, found: Mapping[str, str]) -> list[str]:
        """Note the public keys of other sites, by name. Returns the names that are new.

        KeysError: a site had another key before; nothing is noted then.
        """
        with self._changing():
            text = self.read_shared(SITES, allow_list.MAX_BYTES)
            known = allow_list.parse(_SITES_HEAD if text is None else text, SITES)
            new = []
            for name, key in found.items():
                before = known.labeled(name)
                if before is not None and before.key != key:
                    raise KeysError(
                        f"{name} has another key than in {self.path / SITES}: ask its"
                        " administrator; if it has a new one, remove that line"
                    )
                if before is None:
                    known = known.with_entry(Entry(key, name))
                    new.append(name)
            if new:
                replace_bytes(self.path / SITES, known.text().encode())
        return new

    def read_shared(self, name: str, most: int) -> str | None:
        """Return the text of a file that other users may read and not change; None without a file.

        most: bytes.
        """
        return self._read_guarded(self.path / name, stat.S_IWGRP | stat.S_IWOTH, most)

    def change_allowed(self, change: Callable[[AllowList], AllowList]) -> AllowList:
        """Replace the list by `change(list)`, atomically, under a lock between processes."""
        with self._changing():
            before = self.allowed()
            if before is None:
                before = allow_list.parse(allow_list.HEADER, ALLOWED)
            made = change(before)
            replace_bytes(self.allowed_path, made.text().encode())
        return made

    def _read_guarded(self, path: Path, forbidden: int, most: int) -> str | None:
        try:
            folder = self.path.stat()
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise KeysError(
                    f"{path} is a link to a missing file: restore that, or remove the link"
                ) from None
            return None
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror}") from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise KeysError(f"{path} is no file")
        with os.fdopen(descriptor, "rb") as file:
            if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise KeysError(
                    f"{self.path} can be changed by others;"
                    f" run chmod 700 {shlex.quote(str(self.path))}"
                )
            if found.st_mode & forbidden:
                what = "read" if forbidden & stat.S_IRGRP else "changed"
                mode = "600" if forbidden & stat.S_IRGRP else "go-w"
                raise KeysError(
                    f"{path} can be {what} by others; run chmod {mode} {shlex.quote(str(path))}"
                )
            data = file.read(most + 1)
        if len(data) > most:
            raise KeysError(f"{path}: longer than {most:,} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise KeysError(f"{path}: not text") from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            with locked_folder(self.path):
                yield
        except OSError as error:
            raise KeysError(f"cannot write in {self.path}: {error.strerror}") from None


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


def audit_limits(folder: KeysFolder) -> AuditLimits:
    """Return the limits of site.toml's table `audit`: words (percent) and auc. Raises KeysError."""
    text, path = folder.read_shared(FILE, MAX_BYTES), folder.path / FILE
    found = {} if text is None else _tables(text, str(path)).get("audit", {})
    limits = {"words": (0, 100), "auc": (0.5, 1)}
    if not isinstance(found, dict) or found.keys() - limits.keys():
        raise KeysError(f"{path}: the table audit has words, in percent, and auc")
    for name, value in found.items():
        least, most = limits[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise KeysError(f"{path}: audit.{name} is a number from {least} to {most}")
    return AuditLimits(found.get("words"), found.get("auc"))


def _check_folder(path: Path) -> None:
    """Raise KeysError where other users can replace files in the target folder of a link."""
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise KeysError(
            f"{path}, where {FILE} leads to, can be changed by others; run chmod go-w on it"
        )


def _tables(text: str, where: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise KeysError(f"{where}: not valid TOML: {error}") from None
    unknown = sorted(found.keys() - {"allow", "accept_rollback", "audit"})
    if unknown:
        known = "there are allow, accept_rollback and the table audit"
        raise KeysError(f"{where}: unknown key {unknown[0][:40]!r}; {known}")
    return found


def _parse(text: str, where: str) -> tuple[frozenset[str], bool]:
    found = _tables(text, where)
    allow, accepts = found.get("allow"), found.get("accept_rollback", True)
    if not isinstance(accepts, bool):
        raise KeysError(f"{where}: accept_rollback is true or false")
    if not isinstance(allow, list):
        raise KeysError(f'{where}: write allow as a list, like allow = ["deltas", "metrics"]')
    return parse_kinds(allow, where), accepts
