"""The exceptions of Postroom, one tree.

::

    PostroomError
    ├── UsageError                 the call or the configuration is wrong; nothing was tried
    │   ├── ConfigError            a setting, file or flag cannot be used
    │   ├── UnknownModel           no such provider or model
    │   ├── DuplicateTool          two tools of one name
    │   ├── MissingKey             the provider's key is not in the environment
    │   └── NoModel                nothing names a model
    ├── InputError                 a message or id was refused; nothing was queued
    │   ├── InvalidContent         content is empty, too large, or has an unknown block
    │   ├── QueueFull              the session's inbox is at its cap
    │   ├── MessageConflict        the message id was used before with other content
    │   ├── UnknownSession         no such session, or not yours
    │   ├── SessionExists          an id that is already taken
    │   └── RunOverlap             another exclusive run owns the session's interval
    ├── StoreError
    │   ├── NotCommitted           certainly not written
    │   │   ├── StoreLocked        another process held the write lock past the limit
    │   │   ├── StoreFull          the disk or the quota is full
    │   │   ├── StoreReadOnly      the file or its folder cannot be written
    │   │   ├── StoreClosed        shutting down: no new writes
    │   │   └── DeadlinePassed     the script waited past its own deadline and never ran
    │   ├── CommitUncertain        the commit's answer was lost; send the same id again
    │   ├── SchemaMismatch         the database is newer than this program, or not ours
    │   ├── Corrupt                the database file is damaged
    │   ├── ArtifactMissing        the artifact store holds no such bytes
    │   ├── ArtifactCorrupt        an artifact's bytes no longer match its hash
    │   └── StaleClaim             the claim was taken over; its holder may write nothing
    ├── ModelError                 the model's server refused, failed or answered nonsense
    ├── ToolFailure                a tool could not do what it was asked
    │   └── UnknownTool            no tool has that name
    ├── RunTimeout                 ``run(timeout=)`` ran out; carries the partial result
    └── Disconnected               the runtime or the connection is gone

Every error has a stable ``code`` (snake case), a message for people, and where there is
something to do about it, a ``hint`` that says what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from postroom.domain.run import RunResult


class PostroomError(Exception):
    """The root: catch this to catch whatever Postroom raises on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(PostroomError):
    code = "usage"


class ConfigError(UsageError):
    code = "config"


class UnknownModel(UsageError):
    code = "unknown_model"


class DuplicateTool(UsageError):
    code = "duplicate_tool"


class MissingKey(UsageError):
    code = "missing_key"


class NoModel(UsageError):
    code = "no_model"


class InputError(PostroomError):
    code = "input"


class InvalidContent(InputError):
    """``path`` names the field, as ``content[0].text``."""

    code = "invalid_content"

    def __init__(self, message: str, *, path: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}", hint=hint)
        self.path = path


class QueueFull(InputError):
    code = "queue_full"


class MessageConflict(InputError):
    code = "message_conflict"


class UnknownSession(InputError):
    code = "unknown_session"


class SessionExists(InputError):
    code = "session_exists"


class RunOverlap(InputError):
    code = "run_overlap"


class StoreError(PostroomError):
    code = "store"


class NotCommitted(StoreError):
    code = "not_committed"


class StoreLocked(NotCommitted):
    code = "store_locked"


class StoreFull(NotCommitted):
    code = "store_full"


class StoreReadOnly(NotCommitted):
    code = "store_read_only"


class StoreClosed(NotCommitted):
    code = "store_closed"


class DeadlinePassed(NotCommitted):
    code = "deadline_passed"


class CommitUncertain(StoreError):
    code = "commit_uncertain"


class SchemaMismatch(StoreError):
    code = "schema_mismatch"


class Corrupt(StoreError):
    code = "corrupt"


class ArtifactMissing(StoreError):
    code = "artifact_missing"


class ArtifactCorrupt(StoreError):
    code = "artifact_corrupt"


class StaleClaim(StoreError):
    code = "stale_claim"


ModelErrorKind = Literal[
    "rate_limit",
    "server",
    "timeout",
    "transport",
    "empty",
    "auth",
    "bad_request",
    "quota",
    "context_overflow",
    "refused",
]

RETRYABLE: frozenset[ModelErrorKind] = frozenset(
    {"rate_limit", "server", "timeout", "transport", "empty"}
)


class ModelError(PostroomError):
    """A model request that gave no usable reply.

    ``kind`` decides what the turn does: rate_limit, server, timeout, transport and empty
    are retried within the step; the others end the turn at once. ``status`` is the HTTP
    status (None: no answer came). ``retry_after_ms`` is the provider's own word (None:
    it gave none). The message holds no secret and no request body.
    """

    code = "model"

    def __init__(
        self,
        message: str,
        *,
        kind: ModelErrorKind,
        status: int | None = None,
        retry_after_ms: int | None = None,
        request_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind: ModelErrorKind = kind
        self.status = status
        self.retry_after_ms = retry_after_ms
        self.request_id = request_id

    @property
    def retryable(self) -> bool:
        return self.kind in RETRYABLE


class ToolFailure(PostroomError):
    """Raised by a tool to answer the model with an error it can act on."""

    code = "tool"


class UnknownTool(ToolFailure):
    code = "unknown_tool"


class RunTimeout(PostroomError):
    """The run's time is over. The agent goes on; ``partial`` is what there is so far."""

    code = "run_timeout"

    def __init__(self, message: str, *, partial: RunResult) -> None:
        super().__init__(message)
        self.partial = partial


class Disconnected(PostroomError):
    """``exit_code`` and ``stderr_tail`` are those of a runtime that died (None: unknown)."""

    code = "disconnected"

    def __init__(
        self, message: str, *, exit_code: int | None = None, stderr_tail: str | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stderr_tail = stderr_tail
