"""The scenario that the crash sweep plays: a little of everything, and what must come of it.

Follow-ups behind one another, a step of three calls with one that runs alone, a steer and an
inject while it runs, a model's retry, a cancel that keeps the inbox and one that does not, a
message replaced and one removed, a turn that fails and one cut by the token limit. Played again
after a crash it goes on with what is missing: it sends the same message ids, and a cancel is
sent only if the log has none.
"""

from __future__ import annotations

from typing import Any

from postroom.domain.event import TurnCancel
from tests.crash.log_rules import terminals
from tests.crash.reading import Record

ACTIONS: list[list[Any]] = [
    ["queue", "msg_01", "hello"],
    ["queue", "msg_02", "[[calls:note a|alone steer b|note c]] please"],
    ["queue", "msg_03", "behind the tools"],
    ["entered", "msg_02"],
    ["queue", "msg_04", "~ steer", "steer"],
    ["queue", "msg_05", "~ inject", "inject"],
    ["go"],
    ["queue", "msg_06", "[[flaky]] model"],
    ["queue", "msg_07", "[[wait]] until cancelled"],
    ["entered", "msg_07"],
    ["queue", "msg_08", "kept"],
    ["queue", "msg_09", "~ kept inject", "inject"],
    ["queue", "msg_10", "replaced"],
    ["replace", "msg_10", "a replacement"],
    ["queue", "msg_11", "removed"],
    ["remove", "msg_11"],
    ["cancel", "msg_07", True],
    ["queue", "msg_12", "[[fail]] for good"],
    ["queue", "msg_13", "[[cut]] by the limit"],
    ["queue", "msg_14", "[[wait]] until cancelled, nothing kept"],
    ["entered", "msg_14"],
    ["queue", "msg_15", "never runs"],
    ["cancel", "msg_14", False],
    ["queue", "msg_16", "last"],
    ["idle"],
]

MESSAGES = [f"msg_{number:02}" for number in range(1, 17)]
NOT_ENTERED = {"msg_10": "inbox/replaced", "msg_11": "inbox/cancelled", "msg_15": "inbox/cancelled"}
ENDS = {"msg_07": "cancelled", "msg_12": "error", "msg_13": "max_tokens", "msg_14": "cancelled"}


def check_outcome(record: Record) -> None:
    """What the scenario must have led to, with or without crashes."""
    terminal = terminals(record.events)
    for name in MESSAGES:
        assert terminal[name] == [NOT_ENTERED.get(name, "user/message")], name
    ends = {end.turn: end.reason for end in record.of("turn/end")}
    recovered = {start.turn for start in record.of("turn/start") if start.recovery}
    cancelled = {cancel.turn for cancel in record.of(TurnCancel.TYPE)}
    for user in record.of("user/message"):
        turn = user.turn
        while ends[turn].kind == "interrupted" and turn + 1 in recovered:
            turn += 1
        kind = "cancelled" if turn in cancelled else ends[turn].kind
        # What steers, injects and ends with another's turn has no ending of its own.
        if user.message.id not in ("msg_04", "msg_05", "msg_09"):
            assert kind == ENDS.get(user.message.id, "completed"), user.message.id
    outcomes = [result.outcome for result in record.of("tool/result")]
    assert outcomes == ["ok"] * 3 or set(outcomes) <= {"ok", "unknown", "not_started"}
