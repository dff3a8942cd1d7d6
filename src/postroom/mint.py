"""Makes ids. The one place that joins the clock and the system's randomness to an id's shape."""

from __future__ import annotations

import os
import random
import time

from postroom.domain.ids import (
    ApprovalId,
    CallId,
    ClaimToken,
    DeliveryId,
    MessageId,
    NodeId,
    SessionId,
    ulid,
)

# Ids must be unique, not secret: a generator seeded by the system spares a system call an id.
_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def _ulid() -> str:
    return ulid(time.time_ns() // 1_000_000, _random.getrandbits(80))


def session_id() -> SessionId:
    return SessionId("session_" + _ulid())


def child_session_id() -> SessionId:
    return SessionId("session_child_" + _ulid())


def message_id() -> MessageId:
    return MessageId("msg_" + _ulid())


def reply_id() -> str:
    """The id of an assistant message."""
    return "reply_" + _ulid()


def call_id() -> CallId:
    return CallId("call_" + _ulid())


def delivery_id() -> DeliveryId:
    return DeliveryId("dlv_" + _ulid())


def approval_id() -> ApprovalId:
    """Unguessable: 128 random bits, no time in it."""
    return ApprovalId("apr_" + os.urandom(16).hex())


def node_id() -> NodeId:
    return NodeId("node_" + _ulid())


def claim_token() -> ClaimToken:
    return ClaimToken(f"{_random.getrandbits(96):024x}")
