"""Settings: their defaults, their units, and where they come from.

Every limit is one line here with the unit in its name. Values come from the command line, then
the environment, then the core, then these defaults.
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of everything that could grow or wait."""

    pending_messages_max: int = 1000
    content_bytes_max: int = 16 * 1024 * 1024
    frame_bytes_max: int = 32 * 1024 * 1024
    turn_steps_max: int = 200
    tools_at_once_max: int = 8
    tool_timeout_ms: int = 600_000
    tool_text_bytes_max: int = 32 * 1024
    tool_grace_ms: int = 5_000
    policy_timeout_ms: int = 30_000
    model_retries_max: int = 5
    model_retry_first_ms: int = 500
    model_retry_longest_ms: int = 30_000
    model_retry_after_longest_ms: int = 300_000
    model_idle_stream_ms: int = 120_000
    lease_sqlite_ms: int = 90_000
    lease_postgres_ms: int = 30_000
    lock_wait_ms: int = 30_000
    recovery_attempts_max: int = 3
    drain_ms: int = 20_000
    context_cache_bytes_max: int = 64 * 1024 * 1024
    delivery_attempts_max: int = 8
    delivery_retry_first_ms: int = 2_000
    delivery_retry_longest_ms: int = 900_000
    delivery_expiry_ms: int = 86_400_000
    reconciles_max: int = 6
    reconcile_first_ms: int = 2_000
    reconcile_longest_ms: int = 900_000
    reconcile_wait_ms: int = 60_000
    approval_wait_ms: int = 1_800_000
    dedupe_kept_ms: int = 14 * 86_400_000
