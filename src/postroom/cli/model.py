"""`postroom model`: what there is to ask, and weights for this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from postroom.cli.options import Output, OutputOption, print_table
from postroom.home import environment, home

if TYPE_CHECKING:
    from postroom.upkeep import Progress

app = typer.Typer(help="See what can be asked; install a local model.", no_args_is_help=True)


def _complete(incomplete: str) -> list[str]:
    from postroom.upkeep import CATALOGUE

    return [name for name in CATALOGUE if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="A model's name.", autocompletion=_complete)]


@app.command("list")
def list_(output: OutputOption = Output.text) -> None:
    """List providers and local models as the environment has them. Asks no network."""
    from postroom.cores import CoreFile, models_of, register_extras
    from postroom.errors import NoModel
    from postroom.upkeep import CATALOGUE, installed, offers

    environ = environment()
    register_extras(environ)
    here = {w.name for w in installed(home(environ) / "models")}
    try:
        default = models_of(CoreFile(), None, environ)[0]
    except NoModel:
        default = None
    rows = [
        {
            "provider": o.provider,
            "ready": o.ready,
            "example": o.default,
            "needs": None if o.ready else o.key_variable,
            "baseUrl": o.base_url,
        }
        for o in offers(environ)
    ]
    weights = [
        {"model": f"local:{name}", "installed": name in here, "bytes": w.size}
        for name, w in CATALOGUE.items()
    ]
    if output is Output.json:
        print(json.dumps({"default": default, "providers": rows, "local": weights}))
        return
    print_table(
        ["provider", "ready", "for example", "where"],
        [
            [
                str(r["provider"]),
                "yes" if r["ready"] else f"set {r['needs']}",
                str(r["example"] or f"{r['provider']}:NAME"),
                str(r["baseUrl"] or ""),
            ]
            for r in rows
        ],
    )
    print()
    print_table(
        ["on this machine", "installed", "size"],
        [
            [
                str(w["model"]),
                "yes" if w["installed"] else f"postroom model install {str(w['model'])[6:]}",
                f"{int(w['bytes']) / 1e6:,.0f} MB",
            ]
            for w in weights
        ],
    )
    print(f"\nTaken when nothing else is named: {default or 'none'}")


@app.command()
def install(
    name: Annotated[
        str | None,
        typer.Argument(help="Which.", autocompletion=_complete, show_default="a small one"),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="A file or URL to take the weights from.")
    ] = None,
) -> None:
    """Fetch weights once, check them, and keep them. Interrupted, it goes on where it stopped."""
    import asyncio

    from postroom import upkeep as weights

    chosen = name or weights.DEFAULT
    plan = weights.plan(chosen)
    print(
        f"{plan.name}: {plan.title}, {plan.size / 1e6:,.0f} MB, licence {plan.licence}\n"
        f"from {source or plan.source}, into {home(environment()) / 'models'}",
        file=sys.stderr,
    )
    with _Bar() as bar:
        asyncio.run(
            weights.install(
                chosen,
                source=source,
                dest=home(environment()) / "models",
                progress=bar.show,
            )
        )
    print(f'Installed. Try: postroom run --model local:{chosen} "Hello!"', file=sys.stderr)


@app.command()
def remove(name: Name) -> None:
    """Delete a local model's weights."""
    from postroom import upkeep as weights

    weights.remove(name, home(environment()) / "models")


class _Bar:
    """Progress: a bar in a terminal, a line each tenth elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._tenth = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=self._plain,
        )
        self._task = self._bar.add_task("weights", total=None)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=progress.stage,
            completed=progress.done,
            total=progress.total,
        )
        tenth = 10 * progress.done // max(progress.total, 1)
        if self._plain and tenth != self._tenth:
            self._tenth = tenth
            print(f"{progress.stage}: {10 * tenth} %", file=sys.stderr, flush=True)
