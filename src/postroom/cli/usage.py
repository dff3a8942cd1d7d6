"""`postroom usage`: what was spent, in tokens and, where prices are known, in dollars."""

from __future__ import annotations

import datetime
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from postroom.cli.options import (
    Database,
    Output,
    OutputOption,
    database_of,
    print_table,
    with_store,
)

if TYPE_CHECKING:
    from postroom.ports.store import Store
    from postroom.scripts.usage import UsageRow

_EPOCH = datetime.date(1970, 1, 1)


class By(StrEnum):
    day = "day"
    session = "session"
    core = "core"
    model = "model"


def usage_command(
    by: Annotated[By, typer.Option(help="Add up by day, session, core or model.")] = By.day,
    days: Annotated[int, typer.Option(min=1, help="The last so many days (UTC).")] = 30,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Show tokens and cost. Costs are list prices; a model of unknown price shows none."""
    from postroom.scripts.usage import usage_table

    today = (datetime.datetime.now(datetime.UTC).date() - _EPOCH).days

    async def work(store: Store) -> list[UsageRow]:
        return await store.read(usage_table, since_day=today - days + 1)

    groups = _grouped(with_store(database_of(db), work), by)
    if output is Output.json:
        print(json.dumps([{by.value: name, **sums} for name, sums in groups.items()]))
        return
    if not groups:
        print("Nothing was used.", file=sys.stderr)
        return
    print_table(
        [by.value, "requests", "input", "cached", "output", "cost"],
        [
            [
                name,
                f"{sums['requests']:,}",
                f"{sums['inputTokens']:,}",
                f"{sums['cachedTokens']:,}",
                f"{sums['outputTokens']:,}",
                _dollars(sums["costUsd"], sums["unpriced"]),
            ]
            for name, sums in groups.items()
        ],
    )


def _grouped(rows: list[UsageRow], by: By) -> dict[str, dict[str, float | None]]:
    from postroom.upkeep import facts

    out: dict[str, dict[str, float | None]] = {}
    for row in rows:
        name = {
            By.day: str(_EPOCH + datetime.timedelta(days=row.day or 0)),
            By.session: str(row.session_id),
            By.core: str(row.core_id),
            By.model: row.model,
        }[by]
        sums = out.setdefault(
            name,
            {
                "requests": 0,
                "inputTokens": 0,
                "cachedTokens": 0,
                "outputTokens": 0,
                "costUsd": None,
                "unpriced": 0,
            },
        )
        price = facts(row.model).price
        sums["requests"] = (sums["requests"] or 0) + row.requests
        sums["inputTokens"] = (sums["inputTokens"] or 0) + row.input_tokens
        sums["cachedTokens"] = (sums["cachedTokens"] or 0) + row.cached_tokens
        sums["outputTokens"] = (sums["outputTokens"] or 0) + row.output_tokens
        if price is None:
            sums["unpriced"] = (sums["unpriced"] or 0) + row.requests
        else:
            cost = price.cost_of(row.input_tokens, row.cached_tokens, row.output_tokens)
            sums["costUsd"] = (sums["costUsd"] or 0.0) + cost
    return out


def _dollars(cost: float | None, unpriced: float | None) -> str:
    if cost is None:
        return "unknown"
    return f"${cost:.4f}" + (" and more" if unpriced else "")
