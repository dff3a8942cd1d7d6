"""`postroom outbox`: what is on its way, what is in doubt and why, and what an operator decides.

Only `resolve --again`, and `redeliver` of what somebody settled by hand, can make something arrive
twice: both say so and ask first.
"""

from __future__ import annotations

import getpass
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from postroom.cli.options import (
    Database,
    Output,
    OutputOption,
    complete_session,
    database_of,
    print_table,
    when,
    with_store,
)
from postroom.errors import InputError, UsageError
from postroom.home import default_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.text import Text

    from postroom.domain.outbox import Resolution
    from postroom.ports.store import Store
    from postroom.scripts.outbox import DeliveryView, PartView

app = typer.Typer(
    help="""See what goes out, and settle what is in doubt.

    A delivery is queued, then sending, then sent. One is `unknown` when a call may have begun and no
    answer was recorded: it is never sent again by itself. Where the platform can be asked it is
    asked; where it cannot, or does not know, you look there and say what you found:
    `postroom outbox resolve`.
    """,
    no_args_is_help=True,
)


class Status(StrEnum):
    queued = "queued"
    sending = "sending"
    sent = "sent"
    unknown = "unknown"
    failed = "failed"
    unrouted = "unrouted"


_COLOURS = {
    "sent": "green",
    "queued": "cyan",
    "sending": "cyan",
    "unknown": "bold yellow",
    "failed": "red",
    "unrouted": "magenta",
}
_SHOWN = 60


def _completing(*statuses: str) -> Callable[[str], list[str]]:
    """Ids of the default database's deliveries, the newest first, for the shell's completion."""

    def complete(incomplete: str) -> list[str]:
        path = default_database()
        if not Path(path).exists():
            return []
        from postroom.scripts.outbox import list_deliveries

        async def ids(store: Store) -> list[str]:
            found = await store.read(list_deliveries, status=statuses, limit=100)
            return [d.delivery_id for d in found]

        try:
            return [i for i in with_store(path, ids) if i.startswith(incomplete)]
        except Exception:
            return []

    return complete


_HELP = "Delivery id, as `outbox list` shows it."
By = Annotated[
    str | None,
    typer.Option(help="Who decides; it is recorded.", show_default="your login name"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_(
    status: Annotated[
        list[Status] | None, typer.Option(help="Only these; may be repeated.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", "-s", help="Only this one's.", autocompletion=complete_session),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Only what is not sent.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest first.")] = 50,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """List deliveries, the newest first: where each stands, and why.

    The column `claim` says who works on it: `none`, `ready` (whoever can may take it), `claimed` (a
    process sends it now), `lapsed` (that process is gone: the next look makes it unknown).
    """
    from postroom.domain.ids import session_id
    from postroom.scripts.outbox import list_deliveries

    async def work(store: Store) -> list[DeliveryView]:
        return await store.read(
            list_deliveries,
            session_id=session_id(session) if session is not None else None,
            status=tuple(s.value for s in status or ()),
            open_only=open_,
            limit=limit,
        )

    found = with_store(database_of(db), work)
    if output is Output.json:
        print(msgspec.json.encode(found).decode())
        return
    if not found:
        print("Nothing there.", file=sys.stderr)
        return
    now = time.time_ns() // 1_000_000
    print_table(
        ["delivery", "session", "status", "claim", "tries", "made", "why"],
        [
            [
                d.delivery_id,
                d.session_id,
                _coloured(d.status),
                d.claim,
                str(sum(p.attempts for p in d.parts)),
                _age(now - d.created_at),
                why(d, now),
            ]
            for d in found
        ],
    )
    doubtful = sum(d.status == "unknown" and d.handed_over for d in found)
    if doubtful:
        print(f"{doubtful} in doubt: `postroom outbox resolve` settles one.", file=sys.stderr)


@app.command()
def show(
    delivery: Annotated[str, typer.Argument(help=_HELP, autocompletion=_completing())],
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Show one delivery with its parts: what each says, its tries, and what the platform said."""
    _print(_read(database_of(db), delivery), output)


@app.command()
def resolve(
    delivery: Annotated[str, typer.Argument(help=_HELP, autocompletion=_completing("unknown"))],
    sent: Annotated[
        bool, typer.Option("--sent", help="It arrived: record that, send nothing.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="It did not arrive: give it up, send nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Send it again. It may arrive twice.")
    ] = False,
    by: By = None,
    yes: Yes = False,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Settle a delivery in doubt, after you looked at the platform.

    --sent and --failed only record what you found. --again may deliver it twice: nobody knows whether
    the first call arrived, so it asks you first. Your name is recorded with the decision.
    """
    from postroom import mint
    from postroom.domain.ids import DeliveryId
    from postroom.scripts.outbox import resolve_delivery

    named: list[tuple[bool, Resolution]] = [(sent, "sent"), (failed, "failed"), (again, "queued")]
    chosen: list[Resolution] = [word for said, word in named if said]
    if len(chosen) != 1:
        raise UsageError(
            "say one of --sent, --failed, --again",
            hint="--sent: it arrived; --failed: it did not, give it up; --again: may arrive twice",
        )
    name, database = _name(by), database_of(db)
    if again and not yes:
        view = _read(database, delivery)
        if view.status == "unknown":
            _ask_first(view, [p for p in view.parts if p.status == "unknown"])

    async def work(store: Store) -> DeliveryView:
        return await store.write(
            resolve_delivery, DeliveryId(delivery), chosen[0], name, mint.claim_token()
        )

    _print(with_store(database, work), output)


@app.command()
def redeliver(
    delivery: Annotated[
        str, typer.Argument(help=_HELP, autocompletion=_completing("failed", "unrouted"))
    ],
    by: By = None,
    yes: Yes = False,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Send again what failed, or had no route. Parts that were sent stay sent.

    What failed was refused, so it cannot arrive twice; only where somebody settled a doubt as failed
    it may, and you are asked first.
    """
    from postroom import mint
    from postroom.config import Limits
    from postroom.domain.ids import DeliveryId
    from postroom.flow.outbox import rules_of
    from postroom.scripts.outbox import redeliver as again

    name, database = _name(by), database_of(db)
    if not yes:
        view = _read(database, delivery)
        doubted = [p for p in view.parts if p.status == "failed" and _by_hand(p)]
        if view.status == "failed" and doubted:
            _ask_first(view, doubted)

    async def work(store: Store) -> DeliveryView:
        return await store.write(
            again, DeliveryId(delivery), name, mint.claim_token(), rules_of(Limits())
        )

    _print(with_store(database, work), output)


@app.command()
def abandon(
    delivery: Annotated[
        str, typer.Argument(help=_HELP, autocompletion=_completing("queued", "unrouted"))
    ],
    by: By = None,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Give up what is queued, or has no route: it becomes failed, and nothing is sent.

    `postroom outbox redeliver` takes that back. What is being sent, or in doubt, is not touched.
    """
    from postroom import mint
    from postroom.domain.ids import DeliveryId
    from postroom.scripts.outbox import abandon as give_up

    name = _name(by)

    async def work(store: Store) -> DeliveryView:
        return await store.write(give_up, DeliveryId(delivery), name, mint.claim_token())

    _print(with_store(database_of(db), work), output)


def why(view: DeliveryView, now: int) -> str:
    """One line: what holds a delivery, or how it ended."""
    errors = [p.error for p in view.parts if p.error and p.status == view.status]
    error = _line(errors[0] if errors else next((p.error for p in view.parts if p.error), None))
    if view.status == "unknown":
        whose = "yours to settle" if view.handed_over else "the platform is asked"
        return f"{error or 'a call may have begun'}; {whose}"
    if view.claim == "lapsed":
        return "its process is gone: the next look makes it unknown"
    if view.status == "unrouted":
        return "nothing is attached to its session"
    if view.status == "queued":
        again = f", again in {_age(view.due - now)}" if view.due > now else ""
        return f"{error}{again}" if error else f"waits for its turn{again}"
    if view.status == "failed":
        return error or "refused"
    return ""


def _by_hand(part: PartView) -> bool:
    return (part.error or "").startswith("settled by ")


def _ask_first(view: DeliveryView, parts: list[PartView]) -> None:
    for part in parts:
        print(f"  part {part.index + 1}: {_line(part.text)[:_SHOWN]}", file=sys.stderr)
    question = f"Nobody knows whether this arrived. Send {view.delivery_id} again, perhaps twice?"
    typer.confirm(question, abort=True, err=True)


def _read(database: str, delivery: str) -> DeliveryView:
    from postroom.domain.ids import DeliveryId
    from postroom.scripts.outbox import show_delivery

    async def work(store: Store) -> DeliveryView:
        return await store.read(show_delivery, DeliveryId(delivery))

    return with_store(database, work)


def _name(by: str | None) -> str:
    """Who decides, in one short line."""
    if by is None:
        try:
            by = getpass.getuser()
        except (OSError, KeyError):
            raise UsageError(
                "your login name is not known", hint="say who you are: --by NAME"
            ) from None
    name = _line(by)
    if not name or len(name) > 80:
        raise InputError("--by needs a name", hint="at most 80 characters")
    return name


def _print(view: DeliveryView, output: Output) -> None:
    if output is Output.json:
        print(msgspec.json.encode(view).decode())
        return
    now = time.time_ns() // 1_000_000
    rows = [
        ("delivery", view.delivery_id),
        ("session", view.session_id),
        ("kind", view.kind),
        ("status", view.status),
        ("claim", view.claim + (f" by {view.claimed_by}" if view.claimed_by else "")),
        ("why", why(view, now)),
        ("to", _address(view.address)),
        ("turn", str(view.owner_turn_id) if view.owner_turn_id is not None else ""),
        ("made", when(view.created_at)),
        ("changed", when(view.updated_at)),
        ("expires", when(view.expires_at) if view.status in ("queued", "sending") else ""),
        ("decided by", view.decided_by or ""),
    ]
    for name, value in rows:
        if value:
            print(f"{name:<12} {value}")
    for part in view.parts:
        tries = f"{part.attempts} {'try' if part.attempts == 1 else 'tries'}"
        known = f", there as {_line(part.reference)}" if part.reference else ""
        print(f"part {part.index + 1:<7} {part.kind}, {part.status}, {tries}{known}")
        for line in (part.note, part.error):
            if line:
                print(f"{'':<12} {_line(line)}")
        if part.artifact:
            print(f"{'':<12} file {part.artifact}")
        for line in part.text.splitlines():
            print(f"{'':<12} | {_line(line)}")


def _address(address: str | None) -> str:
    kind, _, rest = (address or "").partition(" ")
    return rest if kind == "conv" else "a connection" if kind == "live" else ""


def _line(text: str | None) -> str:
    """In one line that can do nothing to a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text or "").split())


def _age(ms: int) -> str:
    seconds = max(0, ms) // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _coloured(status: str) -> Text:
    from rich.text import Text

    return Text(status, style=_COLOURS.get(status, ""))
