"""Files that are there whole or not at all: written under a temporary name, fsynced, renamed. Private to their owner.

Links are not followed. What is not said to raise something else raises `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from engine.errors import EngineError

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"  # how the name of a file begins that is not there yet
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe by a file's name is not waited for


class DiskUnusable(EngineError):  # noqa: N818 - a state, as for the errors of the engine
    """Nothing can be kept in a folder; the message names it and the fix."""


def open_private(path: Path, mode: str) -> FileIO:
    """`path`, without a buffer; made for its owner alone."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | _CAREFUL, 0o600))


def write_whole(path: Path, parts: Iterable[bytes | memoryview], *, durable: bool = True) -> int:
    """Put `parts` one after another into `path`, in place of what was there; bytes written.

    A `durable` file survives a loss of power once this has returned; its name only after `sync_folder` of its folder.
    Any survives the process. Where it raises, what was there before still is, and nothing new.
    """
    temporary = path.with_name(TEMPORARY + secrets.token_hex(8))
    try:
        with open_private(temporary, "xb") as file:
            size = sum(_write(file, part) for part in parts)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return size


def _write(file: FileIO, part: bytes | memoryview) -> int:
    rest = memoryview(part)
    while rest:
        done = file.write(rest)
        if not done:  # no error and no progress: not to be tried for ever
            raise OSError(errno.EIO, "nothing could be written")
        rest = rest[done:]
    return len(part)


def private_folder(path: Path) -> None:
    """Make `path` a folder that its owner alone enters, if it is not one. A file or link in its place is an error."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    require_folder(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o700)


def require_folder(path: Path) -> None:
    """Raise `NotADirectoryError` where `path` is a file or a link, `FileNotFoundError` where nothing is there."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def remove(path: Path) -> None:
    """Remove a file or a link, or a folder that is in its place; missing is fine."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # which of them a folder raises depends on the system
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Have what was renamed and removed in a folder survive a loss of power, where the system has a way to say so."""
    if sys.platform != "win32":
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EBADF}:  # some network file systems
                raise
        finally:
            os.close(folder)


def files_below(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Every file and every link in a folder and its folders; what cannot be listed is left out."""
    for entry in entries_of(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path)
        else:
            yield entry


def entries_of(folder: Path | str) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing where it cannot be listed, or is a link."""
    try:
        require_folder(Path(folder))
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("%s is left out: %s", folder, error.strerror)
        return []


def size_below(folder: Path) -> tuple[int, int]:
    """How many files lie in a folder and its folders, and their bytes."""
    files = size = 0
    for entry in files_below(folder):
        with contextlib.suppress(OSError):  # deleted meanwhile
            size += entry.stat(follow_symlinks=False).st_size
            files += 1
    return files, size


def is_of_the_file(error: OSError) -> bool:
    """Whether a failed read says that the file is no good, not that the moment is (no memory, no handle, no right).

    It cannot be read from the disk, or is a link, a folder, in no folder, or a socket.
    """
    return error.errno in {errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}


@contextlib.contextmanager
def opening(root: Path) -> Iterator[None]:
    """Make `root` a folder in which to keep things, and raise `DiskUnusable` for an `OSError`.

    `root` may be a link, and is left as it is when it is there: it is a person's choice, what is below is ours.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DiskUnusable(
            f"cannot keep KV blocks in {error.filename or root} ({error.strerror or error}): make it a folder that can "
            "be written to, choose another, or turn the disk tier off"
        ) from error


def require_writable(path: Path) -> None:
    """Raise where files cannot be made in a folder, without trying: a full disk can still be read from."""
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
