"""From every schema version there was to the newest, on every engine, with what was in it kept.

A database of an old version is made by that version's own migrations. What it holds is copied from a
database that the scripts of today filled, column by column as far as the old version had them; a
table that came later holds one row of made-up values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from postroom.scripts.log import list_sessions, session_info
from postroom.stores import postgres_schema, schema, sqlite
from tests.contract.store_world import SESSION, Engine, Hand, SqliteEngine

pytestmark = pytest.mark.contract("STO-04")

# Filled by the engine itself, or by hand in no useful way.
OWN = {"meta", "node"}
# Their numbers are given by the database.
GIVEN = {("event", "id"), ("session", "sid")}

Rows = dict[str, list[tuple[Any, ...]]]


def columns(engine: Engine) -> dict[str, dict[str, bool]]:
    """Every table of ours with its columns; whether each holds numbers."""
    found: dict[str, dict[str, bool]] = {}
    if isinstance(engine, SqliteEngine):
        listed = engine.rows(
            "SELECT t.name, c.name, c.type FROM sqlite_schema AS t, pragma_table_info(t.name) AS c"
            " WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"
        )
    else:
        listed = engine.rows(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = current_schema()"
        )
    for table, column, kind in listed:
        found.setdefault(table, {})[column] = "INT" in kind.upper()
    return {table: found[table] for table in sorted(found)}


def held(engine: Engine, tables: dict[str, dict[str, bool]]) -> Rows:
    """All rows of these columns of these tables, in an order of their own."""
    return {
        table: sorted(engine.rows(f"SELECT {', '.join(names)} FROM {table}"), key=repr)
        for table, names in tables.items()
        if table not in OWN
    }


def literal(value: object) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def insert(engine: Engine, table: str, row: dict[str, object]) -> None:
    values = ", ".join(map(literal, row.values()))
    engine.rows(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})")


async def fill(engine: Engine) -> None:
    """A session with a turn done and a message pending, by the scripts."""
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("it's the first", name="one")
    await hand.queue("pending", name="two")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    await hand.finish(drive.fence, 1, "é ☃ done")
    await store.aclose()


def copy(source: Engine, old: Engine) -> None:
    """What the source holds, in the columns that the old database has."""
    newest = columns(source)
    for table, names in columns(old).items():
        if table in OWN:
            continue
        common = [c for c in names if c in newest.get(table, {}) and (table, c) not in GIVEN]
        order = "id" if table == "event" else common[0]
        for row in source.rows(f"SELECT {', '.join(common)} FROM {table} ORDER BY {order}"):
            insert(old, table, dict(zip(common, row, strict=True)))
        if not old.rows(f"SELECT 1 FROM {table}"):
            number = 100
            insert(old, table, {c: number if names[c] else f"{table}-{c}" for c in names})


@pytest.mark.parametrize("version", range(1, schema.VERSION))
async def test_a_database_of_any_earlier_version_is_brought_up_to_date_with_all_in_it(
    engine: Engine,
    another: Callable[[], Engine],
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    source = another()
    await fill(source)
    expected = columns(source)
    with monkeypatch.context() as then:
        for home in (sqlite, postgres_schema):
            then.setattr(home, "MIGRATIONS", schema.MIGRATIONS[:version])
            then.setattr(home, "VERSION", version)
        await (await engine.open()).aclose()
    assert columns(engine) != expected
    copy(source, engine)
    old = columns(engine)
    before = held(engine, old)
    assert all(before[table] for table in old if table not in OWN)

    hand = Hand(await engine.open())
    assert columns(engine) == expected
    assert held(engine, old) == before

    # It is the same session to everyone, and goes on where it was.
    log = await hand.log()
    assert [e.seq for e in log] == list(range(1, len(log) + 1))
    assert await hand.pending() == ["pending"]
    assert (await hand.store.read(session_info, SESSION)).turns == 1
    assert SESSION in [each.session_id for each in await hand.store.read(list_sessions)]
    await hand.one_turn(2)
    assert await hand.pending() == []
    assert (await hand.types())[-1] == "agent/idle"


async def test_a_database_that_is_up_to_date_is_left_as_it_is(engine: Engine) -> None:
    await fill(engine)
    before = held(engine, columns(engine))
    await (await engine.open()).aclose()
    assert held(engine, columns(engine)) == before


async def test_an_old_and_a_new_database_have_the_same_indexes(
    engine: Engine, another: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made step by step, one at once."""
    for version in range(1, schema.VERSION):
        with monkeypatch.context() as then:
            for home in (sqlite, postgres_schema):
                then.setattr(home, "MIGRATIONS", schema.MIGRATIONS[:version])
                then.setattr(home, "VERSION", version)
            await (await engine.open()).aclose()
    await (await engine.open()).aclose()
    new = another()
    await (await new.open()).aclose()

    def indexes(of: Engine) -> list[tuple[Any, ...]]:
        if isinstance(of, SqliteEngine):
            return of.rows("SELECT name, sql FROM sqlite_schema ORDER BY type, name")
        return of.rows(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()"
            " ORDER BY indexname"
        )

    assert indexes(engine) == indexes(new)
