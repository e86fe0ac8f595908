"""Numbered folders: each appears complete in one step, or not at all.

    checkpoints/v00000012/          files of the server
    checkpoints/v00000012/manifest.json    one JSON object with a checksum, written last
    checkpoints/tmp-v00000012/      it is being written, or removed

The parameter server has a folder per version (fsl_async.store.versions.checkpoint), the split
server one per checkpoint (fsl_async.learn.split.server_disk). Order of a commit: write the files
and manifest.json into a temporary folder and sync each; sync the folder; rename it, which is the
commit point; sync the directory. A folder is renamed to a temporary name before it is removed, for
the same reason. Names that begin with "tmp-" are left over from a crash and are removed at a start.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.store.errors import Damage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from fsl_async.files.files import Files

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_TEMPORARY = "tmp-"
_PIECE_BYTES = 1024 * 1024


class NumberedFolders:
    """The folders of one directory. Methods raise OSError unchanged.

    prefix: of their names, a letter. form: of manifest.json.
    """

    def __init__(self, files: Files, directory: Path, prefix: str, form: int) -> None:
        self._files = files
        self._prefix = prefix
        self._form = form
        self.directory = directory

    def path(self, number: int) -> Path:
        """Return the folder of a number, existing or not."""
        return self.directory / f"{self._prefix}{number:08d}"

    def temporary(self, name: str) -> Path:
        """Return the path of a temporary folder, which a start removes."""
        return self.directory / f"{_TEMPORARY}{name}"

    def numbers(self) -> list[int]:
        """Return the numbers of all folders, oldest first."""
        form = re.compile(self._prefix + r"(\d{8,})")
        found = map(form.fullmatch, self._files.names(self.directory))
        return sorted(int(match[1]) for match in found if match)

    def remove_leftovers(self) -> list[str]:
        """Remove temporary folders of crashed commits; return their names."""
        left = [name for name in self._files.names(self.directory) if name.startswith(_TEMPORARY)]
        for name in left:
            self._files.remove_tree(self.directory / name)
        return left

    def begin(self, name: str) -> Path:
        """Create an empty temporary folder; return its path."""
        folder = self.temporary(name)
        self._files.remove_tree(folder)
        self._files.make_directory(folder)
        return folder

    def write_manifest(self, folder: Path, members: Mapping[str, Any]) -> None:
        """Write manifest.json into a folder, and sync it."""
        line = to_checksummed({"format": self._form, **members}) + b"\n"
        self._files.write_whole(folder / MANIFEST, line)

    def read_manifest(self, number: int) -> dict[str, Any]:
        """Return the members of a folder's manifest.json. Damage: it is missing or altered."""
        path = self.path(number) / MANIFEST
        try:
            members = from_checksummed(self._files.read_whole(path, MAX_MANIFEST_BYTES).rstrip())
        except FileNotFoundError:
            raise Damage(MANIFEST, "is missing") from None
        if members is None:
            raise Damage(MANIFEST, "does not match its checksum")
        if members.get("format") != self._form:
            found = members.get("format")
            raise Damage(MANIFEST, f"has format {found!r}, this release reads {self._form}")
        return members

    def seal(self, folder: Path, names: Iterable[str], members: Mapping[str, Any]) -> None:
        """Sync these files of a folder, and write manifest.json with their digests as "files"."""
        digests = {}
        for name in names:
            with self._files.opened(folder / name, writable=True) as descriptor:
                self._files.sync(descriptor)
            digests[name] = digest_at(self._files, folder / name)
        self.write_manifest(folder, {**members, "files": digests})

    def read_intact(self, number: int) -> dict[str, Any]:
        """Return what `seal` wrote. Damage: a file is missing, or has another digest."""
        members = self.read_manifest(number)
        for name, digest in members["files"].items():
            if digest_at(self._files, self.path(number) / name) != digest:
                raise Damage(name, "does not match its digest")
        return members

    def publish(self, number: int, temporary: Path) -> None:
        """Rename the finished folder to its final name, durably.

        OSError may come after the rename: then call `retract`.
        """
        self._files.sync_directory(temporary)
        self._files.rename(temporary, self.path(number))
        self._files.sync_directory(self.directory)

    def retract(self, number: int) -> None:
        """Remove, durably, a folder whose commit did not finish. Absent ones are ignored."""
        temporary = self.temporary(self.path(number).name)
        self._files.remove_tree(temporary)
        if self._files.is_directory(self.path(number)):
            self._files.rename(self.path(number), temporary)
            self._files.sync_directory(self.directory)
            self._files.remove_tree(temporary)

    def retire(self, oldest_kept: int) -> list[Path]:
        """Rename the folders below `oldest_kept` to temporary names; return these, to remove."""
        leaving = []
        for number in self.numbers():
            if number < oldest_kept:
                folder = self.temporary(f"pruned-{self.path(number).name}")
                self._files.remove_tree(folder)
                self._files.rename(self.path(number), folder)
                leaving.append(folder)
        if leaving:
            # Without this sync a power cut may undo a rename but not the removals, and leave a
            # folder with half of its files.
            self._files.sync_directory(self.directory)
        return leaving

    def prune(self, kept: int) -> None:
        """Remove all but the newest folders. One that cannot be removed now does no harm."""
        with suppress(OSError):
            for old in self.retire(self.numbers()[-kept:][0]):
                self._files.remove_tree(old)


def digest_at(files: Files, path: Path) -> str:
    """Return the BLAKE3 of a file, 64 hex characters, read piece by piece."""
    size, found = 0, blake3()
    with files.opened(path) as descriptor:
        while piece := files.read(descriptor, _PIECE_BYTES, size):
            found.update(piece)
            size += len(piece)
    return found.hexdigest()


def make_durable_folder(files: Files, folder: Path) -> None:
    """Create `folder` and its parents, and make their names durable.

    An existing folder is synced too: its creator may have been a shell, or died before the sync.
    """
    missing = [one for one in folder.parents if not files.exists(one)]
    for one in (*reversed(missing), folder):
        files.make_directory(one)
    for one in (folder, *missing):
        with suppress(PermissionError):  # a parent that this user may pass, but not read
            files.sync_directory(one.parent)
