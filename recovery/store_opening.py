"""The index brought level with the journal, or built anew where it cannot be used.

Owns what happens between a start and the first question; what the index answers is ``store``'s.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from recovery.index_file import StoreDamaged, StoreError
from recovery.journal import Journal
from recovery.store import Store

log = logging.getLogger(__name__)


def open_store(path: Path, journal: Journal) -> Store:
    """Return the index at ``path``, level with the journal; what it takes to get there is logged.

    Raises:
        StoreError: the file can neither be used now nor replaced.
    """
    try:
        store = Store(path)
        behind = journal.last_seq() - store.last_seq()
        if behind < 0:
            store.close()
            raise StoreDamaged(f"{path} knows events that the journal does not have")
        if behind:
            store.follow(journal)
        return store
    except StoreDamaged as error:
        return rebuild(path, journal, str(error))


def rebuild(path: Path, journal: Journal, why: str) -> Store:
    """Move the index at ``path`` aside and return a new one made from the journal.

    Records come back from the archive with the inbox's next passes, since the archive may be on
    a file system that does not answer now.

    Raises:
        StoreError: the new file cannot be made either.
    """
    aside = path.with_name(f"{path.name}.aside")
    log.warning("the index is built anew from the journal and the archive: %s", why)
    try:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise StoreError(f"{path}: cannot be moved aside: {error.strerror}") from error
    store = Store(path)
    store.put_meta("restoring", "yes")
    store.follow(journal)
    return store
