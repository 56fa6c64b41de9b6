"""The disk tier: one file per block, in folders per model. The files are the truth, and none is believed unverified."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.cache.block_file import (
    FORMAT_VERSION,
    KEY_BYTES,
    BlockHeader,
    BlockUnreadable,
    BlockWriteFailed,
    read_block,
    read_head,
    reading,
    write_block,
    writing,
)
from engine.cache.files import (
    TEMPORARY,
    entries_of,
    files_below,
    opening,
    private_folder,
    remove,
    require_folder,
    require_writable,
    size_below,
    sync_folder,
)
from engine.cache.store import Progress, Stored, StoredBlock

log = logging.getLogger(__name__)

SUFFIX = ".kv"
_SCANNERS = 4  # threads that read headers: more is no faster where they are cached, and fewer slower where not
_MAX_FINGERPRINT = 64  # bytes; its name in hex fits every file system
_HEX_NAME = re.compile(r"(?:[0-9a-f]{2})+")


class BlockFiles:
    """Blocks under `root/blocks-<format>/<fingerprint>/<two digits of the key>/<key>.kv`, all names in hex.

    One owner at a time: opening removes the temporary files of a process that was killed, and counts them as
    `leftovers`. Blocks of different keys are written, read and deleted from any threads at once, without a lock. Of
    one key the caller orders its calls: a delete that comes before a write has returned may be undone by it. A read
    beside a write or a delete of its key gets all of the old, all of the new, or "missing".

    What was written or deleted outlives the process at once, and a loss of power after `sync`: making every folder
    safe after every block would cost as much again as the block. Before `sync` such a loss brings deleted blocks back.

    All of it may be removed at any time: the next write makes the folders again, but not what `root` lies in.

    `quarantined` counts the files removed because they could not be read. Raises `DiskUnusable` at the start, which
    names the folder and the fix; later errors are of one block each.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.leftovers = self.quarantined = 0
        self._folder = root / f"blocks-{FORMAT_VERSION}"
        self._old = root / "old"
        self._lock = threading.Lock()  # of the counter and of what follows
        self._unsynced: set[Path] = set()
        self._made_again = False
        with opening(root):
            private_folder(self._folder)
            require_writable(self._folder)
            for entry in files_below(self._folder):
                if entry.name.startswith(TEMPORARY):
                    remove(Path(entry.path))
                    self.leftovers += 1

    # --- one block --------------------------------------------------------------------------------------------------

    def write(self, header: BlockHeader, image: memoryview) -> int:
        """Keep a block, in place of what was there by its key; bytes on disk.

        Raises `DiskFull` or `BlockWriteFailed`; then nothing is left of it. `ValueError` for a wrong length of key,
        fingerprint or image.
        """
        path = self._path(header.fingerprint, header.key)
        with writing(path):
            self._make(path.parent)
        size = write_block(path, header, image)
        self._changed(path.parent, path.parent.parent, self._folder)
        return size

    def read(self, fingerprint: bytes, key: bytes, into: memoryview) -> BlockHeader:
        """Read a block into memory of exactly its image's size; what the caller asked for is compared by the caller.

        Raises `BlockUnreadable` when anything of it is not as it was written; then the memory may hold anything.
        """
        path = self._path(fingerprint, key)
        with reading(path):
            require_folder(path.parent.parent)
            require_folder(path.parent)
        return read_block(path, fingerprint, key, into)

    def delete(self, fingerprint: bytes, key: bytes) -> None:
        """Remove a block; missing is fine. Raises `BlockWriteFailed` when it is still there."""
        path = self._path(fingerprint, key)
        with writing(path, "delete"):
            try:
                require_folder(path.parent.parent)
                require_folder(path.parent)
            except FileNotFoundError:
                return
            remove(path)
        self._changed(path.parent)

    def has(self, fingerprint: bytes, key: bytes) -> bool:
        """Whether a block's file is there, or may be."""
        try:
            self._path(fingerprint, key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    def quarantine(self, fingerprint: bytes, key: bytes, reason: str) -> None:
        """Never read this block again: it is deleted, since kept aside it would fill the disk. Does not raise.

        What cannot even be deleted fails its check again when it is read again.
        """
        log.warning("block %s is removed: %s", key.hex(), reason)
        with self._lock:
            self.quarantined += 1
        try:
            self.delete(fingerprint, key)
        except BlockWriteFailed as error:
            log.error("%s", error)

    # --- one model --------------------------------------------------------------------------------------------------

    def scan(self, fingerprint: bytes, progress: Progress | None = None) -> list[StoredBlock]:
        """Every block of a model, by its header; images are checked when they are read.

        Files that are not what their names say are quarantined; what cannot be read at this moment is left out and
        left alone. `progress(done, total)` counts files. Does not raise for what it finds.
        """
        shards = [(name, self._keys(fingerprint, name)) for name in _folders(self._model(fingerprint))]
        total, done = sum(len(keys) for _, keys in shards), 0
        found: list[StoredBlock] = []
        with ThreadPoolExecutor(_SCANNERS, "scan") as threads:
            for blocks, count in threads.map(lambda shard: (self._heads(fingerprint, shard[1]), len(shard[1])), shards):
                found += blocks
                done += count
                if progress is not None:
                    progress(done, total)
        return found

    def forget(self, fingerprint: bytes) -> Stored:
        """Delete all blocks of a model; what they were. Raises `BlockWriteFailed` when something is still there."""
        folder = self._model(fingerprint)
        gone = _stored(folder)
        with writing(folder, "delete"):
            remove(folder)
        self._changed(self._folder)
        return gone

    def _keys(self, fingerprint: bytes, shard: str) -> list[bytes]:
        names = (entry.name for entry in entries_of(self._model(fingerprint) / shard))
        stems = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return [bytes.fromhex(stem) for stem in stems if len(stem) == 2 * KEY_BYTES and _is_hex(stem)]

    def _heads(self, fingerprint: bytes, keys: list[bytes]) -> list[StoredBlock]:
        found = []
        for key in keys:
            try:
                head = read_head(self._path(fingerprint, key), fingerprint, key)
            except BlockUnreadable as error:
                if error.fault == "io_error":
                    log.warning("a block is left out: %s", error)
                elif error.fault != "missing":
                    self.quarantine(fingerprint, key, str(error))
            else:
                found.append(StoredBlock(head.header, head.size))
        return found

    # --- everything -------------------------------------------------------------------------------------------------

    def usage(self) -> dict[bytes, Stored]:
        """What lies on disk by fingerprint, other models' blocks and strangers' files included; nothing is read."""
        return {bytes.fromhex(name): _stored(self._folder / name) for name in _folders(self._folder)}

    def sync(self) -> None:
        """Have everything so far survive a loss of power. Some milliseconds a folder: after a batch, not a block."""
        with self._lock:
            folders, self._unsynced = self._unsynced, set()
        for folder in folders:
            try:
                sync_folder(folder)
            except FileNotFoundError:  # it was deleted as a whole
                continue
            except OSError as error:
                log.warning("%s may not survive a loss of power: %s", folder, error)

    def set_aside(self) -> Stored | None:
        """Move the folders of other formats to `root/old`, where nothing is read; what was moved, None: nothing.

        Raises `DiskUnusable`.
        """
        with opening(self.root):
            others = [path for path in sorted(self.root.glob("blocks-*")) if path != self._folder]
            others = [path for path in others if path.is_dir() and not path.is_symlink()]
            if not others:
                return None
            private_folder(self._old)
            moved = [_stored(path) for path in others]
            for path in others:
                taken = sum(1 for _ in self._old.glob(f"{path.name}*"))
                path.rename(self._old / (f"{path.name}.{taken}" if taken else path.name))
        self._changed(self.root, self._old)
        return Stored(sum(part.files for part in moved), sum(part.bytes for part in moved))

    def old_usage(self) -> Stored:
        """What `discard_old` would delete."""
        return _stored(self._old)

    def discard_old(self) -> Stored:
        """Delete what was set aside; what that was. Whose it is cannot be told: deleting any chat deletes all of it.

        Raises `BlockWriteFailed` when something is still there.
        """
        gone = self.old_usage()
        with writing(self._old, "delete"):
            remove(self._old)
        self._changed(self.root)
        return gone

    def was_removed(self) -> bool:
        """Whether somebody else has removed all blocks since this was asked last; later ones may be there again."""
        with self._lock:
            removed, self._made_again = self._made_again, False
        return removed or not self._folder.is_dir()

    def _make(self, folder: Path) -> None:
        try:
            private_folder(folder.parent)
        except FileNotFoundError:
            self.root.mkdir(mode=0o700, exist_ok=True)
            private_folder(self._folder)
            with self._lock:
                self._made_again = True
            private_folder(folder.parent)
        private_folder(folder)

    def _changed(self, *folders: Path) -> None:
        with self._lock:
            self._unsynced.update(folders)

    def _model(self, fingerprint: bytes) -> Path:
        if not 0 < len(fingerprint) <= _MAX_FINGERPRINT:
            raise ValueError(f"a fingerprint has 1 to {_MAX_FINGERPRINT} bytes, not {len(fingerprint)}")
        return self._folder / fingerprint.hex()

    def _path(self, fingerprint: bytes, key: bytes) -> Path:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        name = key.hex()
        return self._model(fingerprint) / name[:2] / (name + SUFFIX)


def _is_hex(name: str) -> bool:
    return _HEX_NAME.fullmatch(name) is not None


def _folders(folder: Path) -> list[str]:
    """The names of the folders in one that are hex; links are none."""
    entries = entries_of(folder)
    return [entry.name for entry in entries if _is_hex(entry.name) and entry.is_dir(follow_symlinks=False)]


def _stored(folder: Path) -> Stored:
    return Stored(*size_below(folder))
