"""What is said over the protocol, version 1: one struct for the parameters and the answer of each method.

The schema that both SDKs are generated from comes from here and nowhere else. Keys are camelCase.
Parameters are strict: an unknown field is an error, with its path. A client ignores what it does not
know in answers and notifications, for adding to them is never a new version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

VERSION = 1
VERSIONS = (1,)

# The largest frame either side takes, in bytes of UTF-8.
FRAME_BYTES_MAX = 32 * 1024 * 1024

# ---- errors ----

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

# The names of JSON-RPC's own codes, as `ErrorData.code` has them.
STANDARD: dict[str, int] = {
    "parse_error": PARSE_ERROR,
    "invalid_request": INVALID_REQUEST,
    "method_not_found": METHOD_NOT_FOUND,
    "invalid_params": INVALID_PARAMS,
    "internal_error": INTERNAL_ERROR,
}

# Ours, from -31000 down. A code is never given another meaning.
CODES: dict[str, int] = {
    "unsupported_version": -31000,
    "not_initialized": -31001,
    "unauthorized": -31002,
    "shutting_down": -31003,
    "frame_too_large": -31004,
    "unknown_session": -31010,
    "session_exists": -31011,
    "not_yours": -31012,
    "input": -31020,
    "invalid_content": -31021,
    "queue_full": -31022,
    "message_conflict": -31023,
    "run_overlap": -31024,
    "not_committed": -31030,
    "commit_uncertain": -31031,
    "store": -31032,
    "config": -31040,
    "unknown_model": -31041,
    "missing_key": -31042,
    "no_model": -31043,
    "not_asked": -31050,
    "error": -31099,
}


class ErrorData(msgspec.Struct, frozen=True, omit_defaults=True):
    """``code`` is the stable name of the error, ``hint`` what to do about it, ``path`` the bad field."""

    code: str
    hint: str | None = None
    path: str | None = None
    versions: tuple[int, ...] = ()


# A seq, a count or a time: what every JSON reader holds exactly.
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}$")]
Core: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
By: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f]{1,200}$")]
Content: TypeAlias = str | list[dict[str, Any]]


class Params(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The parameters of a method, strict."""


class Answer(msgspec.Struct, frozen=True, rename="camel"):
    """The answer of a method, or the parameters of a notification."""


# ---- the connection ----


class Peer(msgspec.Struct, frozen=True):
    name: str
    version: str


class Initialize(Params, frozen=True):
    protocol_version: int
    client: Peer


class Initialized(Answer, frozen=True):
    protocol_version: int
    server: Peer
    capabilities: dict[str, bool]


class Nothing(Params, frozen=True):
    pass


class Done(Answer, frozen=True):
    pass


# ---- sessions ----

Status: TypeAlias = Literal["running", "idle"]


class SessionOpen(Params, frozen=True):
    """Creates or attaches. ``core_id`` and ``cwd`` (an absolute path) are those of a new session.

    ``after``: also subscribes, to events above it. None: it does not.
    """

    session_id: Name | None = None
    core_id: Core | None = None
    cwd: str | None = None
    after: Whole | None = None


class SessionOpened(Answer, frozen=True):
    session_id: str
    created: bool
    head_seq: int
    status: Status
    core_id: str
    subscription: int | None = None


class SessionPrompt(Params, frozen=True):
    """``content`` is a text, or a list of content blocks. ``run`` marks the interval as owned."""

    session_id: Name
    content: Content
    message_id: Name | None = None
    run: Literal["exclusive", "share"] | None = None


class SessionSteer(Params, frozen=True):
    session_id: Name
    content: Content
    message_id: Name | None = None


class Receipt(Answer, frozen=True):
    """The message is on disk as event ``seq``. It says nothing of a result."""

    message_id: str
    seq: int


class SessionCancel(Params, frozen=True):
    session_id: Name
    keep_inbox: bool = False


class SessionRef(Params, frozen=True):
    session_id: Name


class Pending(Answer, frozen=True):
    """``message`` is as in ``inbox/queued``."""

    message: dict[str, Any]
    list: Literal["next_turn", "next_step"]
    wakes: bool
    seq: int


class Inbox(Answer, frozen=True):
    pending: list[Pending]


class InboxReplace(Params, frozen=True):
    session_id: Name
    message_id: Name
    content: Content


class InboxReplaced(Answer, frozen=True):
    """``message_id`` is the new one; None: the old one was not pending any more."""

    message_id: str | None


class InboxRemove(Params, frozen=True):
    session_id: Name
    message_id: Name


class InboxRemoved(Answer, frozen=True):
    removed: bool


class SessionEvents(Params, frozen=True):
    session_id: Name
    after: Whole = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000


class Event(Answer, frozen=True):
    """One durable event. ``at`` is Unix time in milliseconds."""

    session_id: str
    seq: int
    type: str
    at: int
    data: dict[str, Any]


class Events(Answer, frozen=True):
    events: list[Event]
    more: bool


class SessionSubscribe(Params, frozen=True):
    """Events from ``after`` on, then live, without a gap. ``deltas``: live tokens too."""

    session_id: Name
    after: Whole = 0
    types: list[str] | None = None
    deltas: bool = False


class Subscribed(Answer, frozen=True):
    subscription: int
    head_seq: int


class SessionUnsubscribe(Params, frozen=True):
    subscription: Whole


class SessionBind(Params, frozen=True):
    session_id: Name


class Bound(Answer, frozen=True):
    token: str


class SessionUnbind(Params, frozen=True):
    token: Name


class SessionList(Params, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    before: Whole | None = None


class SessionInfo(Answer, frozen=True):
    session_id: str
    core_id: str
    owner: str
    cwd: str | None
    parent: str | None
    title: str | None
    status: Status
    head_seq: int
    turns: int
    pending: int
    created_at: int
    updated_at: int


class Sessions(Answer, frozen=True):
    sessions: list[SessionInfo]


class SessionFork(Params, frozen=True):
    session_id: Name
    at_seq: Whole | None = None
    fork_id: Name | None = None


class Forked(Answer, frozen=True):
    session_id: str
    head_seq: int


# ---- approvals ----


class ApprovalDecide(Params, frozen=True):
    approval_id: Name
    decision: Literal["allow", "deny"]


class Approval(Answer, frozen=True):
    approval_id: str
    session_id: str
    kind: str
    subject: str
    expires_at: int


class ApprovalList(Params, frozen=True):
    session_id: Name | None = None


class Approvals(Answer, frozen=True):
    approvals: list[Approval]


# ---- the outbox ----


class OutboxList(Params, frozen=True):
    session_id: Name | None = None
    status: list[Name] = []
    open: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50


class Part(Answer, frozen=True):
    index: int
    kind: str
    status: str
    attempts: int
    reference: str | None
    note: str | None
    error: str | None
    text: str
    artifact: str | None


class Delivery(Answer, frozen=True):
    delivery_id: str
    session_id: str
    kind: str
    status: str
    claim: str
    claimed_by: str | None
    handed_over: bool
    address: str | None
    owner_turn_id: int | None
    policy: str
    decided_by: str | None
    due: int
    created_at: int
    updated_at: int
    expires_at: int
    parts: list[Part]


class Deliveries(Answer, frozen=True):
    deliveries: list[Delivery]


class OutboxResolve(Params, frozen=True):
    """``by`` names the operator. ``queued`` sends what is in doubt again: it may arrive twice."""

    delivery_id: Name
    decision: Literal["sent", "failed", "queued"]
    by: By


class OutboxDecide(Params, frozen=True):
    delivery_id: Name
    by: By


# ---- what the server says by itself ----


class SessionStatus(Answer, frozen=True):
    """What the whole agent does, as of event ``seq``; ``pending`` counts all pending messages then.

    Told to whoever is subscribed to the session: once when its stream has caught up, then right
    after each ``agent/running`` and ``agent/idle``.
    """

    session_id: str
    status: Status
    seq: int
    pending: int


class SessionDelta(Answer, frozen=True):
    """Live tokens: never durable, dropped under pressure.

    ``kind``: text, reasoning, call, progress; reset: what was streamed of this step is void.
    """

    session_id: str
    turn: int
    step: int
    kind: str
    text: str
    name: str | None = None
    call_id: str | None = None


class Lagged(Answer, frozen=True):
    """The client read too slowly: events from ``from_seq`` on were not sent.

    The subscription is over. The client subscribes again, after ``from_seq`` - 1.
    """

    session_id: str
    subscription: int
    from_seq: int


class EventNote(Answer, frozen=True):
    subscription: int
    event: Event


class DeliveryNote(Answer, frozen=True):
    """One part of a delivery, for the connection that is the session's route.

    ``key`` is the part's own and the same in every attempt: who shows it knows a repeat by it.
    ``artifact`` is the file of a media part, ``text`` its caption then.
    """

    session_id: str
    delivery_id: str
    index: int
    count: int
    kind: str
    key: str
    text: str
    artifact: str | None = None
    media_type: str | None = None
    name: str | None = None


# ---- what the server asks ----


class UserPrompt(Answer, frozen=True):
    id: str
    session_id: str
    text: str
    choices: list[str]


class UserAnswer(Answer, frozen=True):
    """``answer`` None: there is none."""

    answer: str | None


class ApprovalRequest(Answer, frozen=True):
    approval_id: str
    session_id: str
    subject: str


class ApprovalAnswer(Answer, frozen=True):
    """``allow`` None: not decided here; somebody may decide later, by its id."""

    allow: bool | None


# Methods of the server, then of the client, then notifications: name -> (parameters, answer).
METHODS: dict[str, tuple[type[Params], type[Answer]]] = {
    "initialize": (Initialize, Initialized),
    "shutdown": (Nothing, Done),
    "session/open": (SessionOpen, SessionOpened),
    "session/prompt": (SessionPrompt, Receipt),
    "session/steer": (SessionSteer, Receipt),
    "session/inject": (SessionSteer, Receipt),
    "session/cancel": (SessionCancel, Done),
    "session/inbox": (SessionRef, Inbox),
    "session/inbox/replace": (InboxReplace, InboxReplaced),
    "session/inbox/remove": (InboxRemove, InboxRemoved),
    "session/events": (SessionEvents, Events),
    "session/subscribe": (SessionSubscribe, Subscribed),
    "session/unsubscribe": (SessionUnsubscribe, Done),
    "session/bind": (SessionBind, Bound),
    "session/unbind": (SessionUnbind, Done),
    "session/list": (SessionList, Sessions),
    "session/fork": (SessionFork, Forked),
    "session/close": (SessionRef, Done),
    "approval/list": (ApprovalList, Approvals),
    "approval/decide": (ApprovalDecide, Done),
    "outbox/list": (OutboxList, Deliveries),
    "outbox/resolve": (OutboxResolve, Delivery),
    "outbox/redeliver": (OutboxDecide, Delivery),
    "outbox/abandon": (OutboxDecide, Delivery),
}
CLIENT_METHODS: dict[str, tuple[type[Answer], type[Answer]]] = {
    "user/prompt": (UserPrompt, UserAnswer),
    "approval/request": (ApprovalRequest, ApprovalAnswer),
}
NOTIFICATIONS: dict[str, type[Answer]] = {
    "session.event": EventNote,
    "session.status": SessionStatus,
    "session.delta": SessionDelta,
    "session.lagged": Lagged,
    "session.delivery": DeliveryNote,
}
