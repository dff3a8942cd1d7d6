"""The tables, as forward migrations.

Each migration is a list of statements run in one transaction; version *n* is the n-th. A released
migration is never edited. Three words differ between engines and are filled in by them:
``{identity}`` (a growing integer primary key), ``{lasting_identity}`` (one whose numbers are never
given twice, even after the newest was deleted) and ``{without_rowid}``.

The session row holds the fold of its log (``state``), so that a decision reads one row and not
the log. ``event`` is a rowid table with a unique index: measured at twice the rate of a clustered
one. The partial index over history events lets a session open by its active context, however
long its log is.
"""

from __future__ import annotations

MIGRATIONS: list[list[str]] = [
    [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        """CREATE TABLE session (
            sid {lasting_identity},
            id TEXT NOT NULL UNIQUE,
            core_id TEXT NOT NULL,
            owner TEXT NOT NULL,
            cwd TEXT,
            parent TEXT,
            title TEXT,
            status TEXT NOT NULL,
            head BIGINT NOT NULL,
            state TEXT NOT NULL,
            header_hash TEXT,
            history BIGINT NOT NULL DEFAULT 0,
            pending BIGINT NOT NULL DEFAULT 0,
            context_from BIGINT NOT NULL DEFAULT 1,
            created_at BIGINT NOT NULL,
            updated_at BIGINT NOT NULL
        )""",
        """CREATE TABLE event (
            id {identity},
            sid BIGINT NOT NULL,
            seq BIGINT NOT NULL,
            type TEXT NOT NULL,
            at BIGINT NOT NULL,
            data TEXT NOT NULL
        )""",
        "CREATE UNIQUE INDEX event_seq ON event (sid, seq)",
        """CREATE INDEX event_history ON event (sid, seq) WHERE type IN
            ('user/message', 'assistant/message', 'tool/result', 'history/compacted')""",
        """CREATE TABLE message (
            id TEXT PRIMARY KEY,
            sid BIGINT NOT NULL,
            seq BIGINT NOT NULL,
            hash TEXT NOT NULL
        ) {without_rowid}""",
        """CREATE TABLE inbox (
            sid BIGINT NOT NULL,
            lane SMALLINT NOT NULL,
            pos BIGINT NOT NULL,
            id TEXT NOT NULL,
            wakes SMALLINT NOT NULL,
            message TEXT NOT NULL,
            PRIMARY KEY (sid, lane, pos)
        ) {without_rowid}""",
        """CREATE TABLE run (
            sid BIGINT NOT NULL,
            message_id TEXT NOT NULL,
            exclusive SMALLINT NOT NULL,
            PRIMARY KEY (sid, message_id)
        ) {without_rowid}""",
        """CREATE TABLE work (
            kind TEXT NOT NULL,
            key TEXT NOT NULL,
            status TEXT NOT NULL,
            epoch BIGINT NOT NULL,
            token TEXT,
            owner TEXT,
            PRIMARY KEY (kind, key)
        ) {without_rowid}""",
        "CREATE INDEX work_open ON work (kind, status, key, owner) WHERE status <> 'none'",
        """CREATE TABLE node (
            id TEXT PRIMARY KEY,
            token TEXT NOT NULL,
            expires_at BIGINT NOT NULL,
            started_at BIGINT NOT NULL,
            about TEXT NOT NULL
        ) {without_rowid}""",
        "INSERT INTO meta (key, value) VALUES ('scrub', '0')",
    ],
    [
        """CREATE TABLE usage (
            sid BIGINT NOT NULL,
            day BIGINT NOT NULL,
            model TEXT NOT NULL,
            requests BIGINT NOT NULL,
            input_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            PRIMARY KEY (sid, day, model)
        ) {without_rowid}""",
        "CREATE INDEX usage_day ON usage (day)",
    ],
    [
        # The log's index of history takes in what else was said, and what of it was replaced.
        "DROP INDEX event_history",
        """CREATE INDEX event_history ON event (sid, seq) WHERE type IN
            ('user/message', 'assistant/message', 'tool/result', 'history/compacted',
            'delivery/queued', 'history/replaced')""",
        "ALTER TABLE session ADD COLUMN deliveries BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE session ADD COLUMN turn_route TEXT",
        "ALTER TABLE session ADD COLUMN turn_reply_to TEXT",
        "ALTER TABLE session ADD COLUMN target TEXT",
        """CREATE TABLE delivery (
            id TEXT PRIMARY KEY,
            sid BIGINT NOT NULL,
            ord BIGINT NOT NULL,
            kind TEXT NOT NULL,
            policy TEXT NOT NULL,
            owner_turn BIGINT,
            seq BIGINT,
            status TEXT NOT NULL,
            blocks SMALLINT NOT NULL,
            handed_over SMALLINT NOT NULL DEFAULT 0,
            due BIGINT NOT NULL,
            ask_at BIGINT,
            unknown_at BIGINT,
            deferrals BIGINT NOT NULL DEFAULT 0,
            reconciles BIGINT NOT NULL DEFAULT 0,
            route TEXT,
            address TEXT,
            ref TEXT,
            failure_text TEXT,
            reply_to TEXT,
            decided_by TEXT,
            created_at BIGINT NOT NULL,
            updated_at BIGINT NOT NULL,
            expires_at BIGINT NOT NULL
        ) {without_rowid}""",
        "CREATE UNIQUE INDEX delivery_order ON delivery (sid, ord)",
        "CREATE INDEX delivery_lane ON delivery (sid, ord) WHERE blocks = 1",
        "CREATE INDEX delivery_made ON delivery (created_at)",
        """CREATE INDEX delivery_open ON delivery (status, created_at)
            WHERE status <> 'sent'""",
        """CREATE TABLE part (
            delivery TEXT NOT NULL,
            idx BIGINT NOT NULL,
            kind TEXT NOT NULL,
            text TEXT,
            media TEXT,
            status TEXT NOT NULL,
            attempts BIGINT NOT NULL DEFAULT 0,
            first_attempt_at BIGINT,
            until BIGINT,
            reference TEXT,
            note TEXT,
            error TEXT,
            PRIMARY KEY (delivery, idx)
        ) {without_rowid}""",
        """CREATE TABLE route (
            id {identity},
            sid BIGINT NOT NULL,
            token TEXT NOT NULL,
            channel TEXT NOT NULL,
            conversation TEXT,
            node TEXT,
            bound_at BIGINT NOT NULL
        )""",
        "CREATE UNIQUE INDEX route_token ON route (token)",
        "CREATE INDEX route_session ON route (sid)",
        """CREATE INDEX route_conversation ON route (channel, conversation)
            WHERE conversation IS NOT NULL""",
        """CREATE TABLE binding (
            core_id TEXT NOT NULL,
            channel TEXT NOT NULL,
            conversation TEXT NOT NULL,
            sid BIGINT NOT NULL,
            bound_at BIGINT NOT NULL,
            PRIMARY KEY (core_id, channel, conversation)
        ) {without_rowid}""",
        "CREATE INDEX binding_session ON binding (sid)",
        # Every session a conversation ever had: what it may list and resume.
        """CREATE TABLE conversation (
            core_id TEXT NOT NULL,
            channel TEXT NOT NULL,
            conversation TEXT NOT NULL,
            sid BIGINT NOT NULL,
            since BIGINT NOT NULL,
            PRIMARY KEY (core_id, channel, conversation, sid)
        ) {without_rowid}""",
        """CREATE TABLE cursor (
            channel TEXT NOT NULL,
            name TEXT NOT NULL,
            value TEXT NOT NULL,
            updated_at BIGINT NOT NULL,
            PRIMARY KEY (channel, name)
        ) {without_rowid}""",
        """CREATE TABLE dedupe (
            channel TEXT NOT NULL,
            key TEXT NOT NULL,
            at BIGINT NOT NULL,
            outcome TEXT NOT NULL,
            ref TEXT NOT NULL,
            session TEXT,
            message TEXT,
            PRIMARY KEY (channel, key)
        ) {without_rowid}""",
        "CREATE INDEX dedupe_age ON dedupe (at)",
        """CREATE TABLE quarantine (
            channel TEXT NOT NULL,
            key TEXT NOT NULL,
            raw TEXT NOT NULL,
            error TEXT NOT NULL,
            at BIGINT NOT NULL,
            PRIMARY KEY (channel, key)
        ) {without_rowid}""",
        """CREATE TABLE approval (
            id TEXT PRIMARY KEY,
            sid BIGINT NOT NULL,
            kind TEXT NOT NULL,
            subject TEXT NOT NULL,
            status TEXT NOT NULL,
            decision TEXT,
            decided_by TEXT,
            ref TEXT,
            created_at BIGINT NOT NULL,
            expires_at BIGINT NOT NULL
        ) {without_rowid}""",
        "CREATE INDEX approval_open ON approval (sid, status) WHERE status = 'open'",
    ],
    [
        # Whose the bytes of the artifact store are. The first put of a session is the owner turn's.
        """CREATE TABLE artifact (
            sid BIGINT NOT NULL,
            hash TEXT NOT NULL,
            turn BIGINT,
            media_type TEXT NOT NULL,
            size BIGINT NOT NULL,
            name TEXT,
            summary TEXT,
            at BIGINT NOT NULL,
            PRIMARY KEY (sid, hash)
        ) {without_rowid}""",
    ],
]

VERSION = len(MIGRATIONS)
