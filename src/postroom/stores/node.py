"""This process in the database: its identity, its lease, and proof that another one is dead.

A node's row says until when it is believed alive. It is renewed by the store's own thread, by
token. On one machine an operating-system lock on a file named for the node proves more: the lock
is free only when its process is gone, so that a restart after ``kill -9`` waits for no lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from postroom.domain.ids import ClaimToken, NodeId
from postroom.ports.store import Tx


def register_node(tx: Tx, node: NodeId, token: ClaimToken, lease_ms: int, about: str) -> None:
    now = tx.now()
    tx.execute(
        "INSERT INTO node (id, token, expires_at, started_at, about)"
        " VALUES (:id, :token, :expires, :now, :about)"
        " ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at",
        {"id": node, "token": token, "expires": now + lease_ms, "now": now, "about": about},
    )


def renew_node(tx: Tx, node: NodeId, token: ClaimToken, lease_ms: int) -> bool:
    """Whether the lease was still this node's own; a lapsed one is not renewed."""
    now = tx.now()
    renewed = tx.execute(
        "UPDATE node SET expires_at = :expires"
        " WHERE id = :id AND token = :token AND expires_at > :now RETURNING 1",
        {"id": node, "token": token, "now": now, "expires": now + lease_ms},
    )
    return bool(renewed)


def remove_node(tx: Tx, node: NodeId, token: ClaimToken) -> None:
    """A clean goodbye: what the node still held is anybody's from now on."""
    tx.execute("DELETE FROM node WHERE id = :id AND token = :token", {"id": node, "token": token})


def other_nodes(tx: Tx, node: NodeId) -> list[NodeId]:
    rows = tx.execute("SELECT id FROM node WHERE id <> :id AND expires_at > 0", {"id": node})
    return [NodeId(row[0]) for row in rows]


def bury_nodes(tx: Tx, dead: list[NodeId]) -> None:
    """Records that these nodes are proven dead. Their claims have lapsed."""
    for node in dead:
        tx.execute("UPDATE node SET expires_at = 0 WHERE id = :id", {"id": node})


def forget_nodes(tx: Tx, before_ms: int) -> None:
    """Drops rows of nodes long gone that hold nothing any more."""
    tx.execute(
        "DELETE FROM node WHERE expires_at < :before"
        " AND NOT EXISTS (SELECT 1 FROM work WHERE work.owner = node.id)",
        {"before": before_ms},
    )


class NodeLock:
    """The lock file of one node, held as long as its process lives."""

    def __init__(self, folder: Path, node: NodeId) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / node
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def proven_dead(folder: Path, node: NodeId) -> bool:
    """Whether the node's lock is free. A missing file proves nothing: its lease decides."""
    try:
        fd = os.open(folder / node, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
