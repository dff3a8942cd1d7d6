"""The one HTTP server of a process: the routes of its channels, ``/healthz`` and ``/metrics``.

It knows no channel: their routes come in as they are, and each checks for itself whom it believes.
Health and metrics hold counts, names of channels and what failed last there, and no text of anybody's
conversation. Everything asks the store anew: what is shown is what is on disk.

``/healthz`` answers 200 while this process can do its work, else 503: the database cannot be read,
a channel does not run, or it is about to stop. What is in doubt or has failed is counted and makes the
``status`` ``attention``, but is no reason to start the process again.

Draining, it still answers: 503 for everything but these two, so that a sender comes again later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from aiohttp import web

from postroom.errors import ConfigError, StoreError
from postroom.flow.channels import Channels
from postroom.flow.outbox import DeliveryRuntime
from postroom.ports.store import Store
from postroom.scripts.health import Standing, standing

log = logging.getLogger("postroom.http")

HEALTH = "/healthz"
METRICS = "/metrics"
RETRY_AFTER_S = 5

_LOOK_S = 5.0
_CLOSE_S = 2.0
_STATUSES = ("queued", "sending", "unknown", "failed", "unrouted")


class Watched(msgspec.Struct, frozen=True):
    """What is looked at. ``faults``: the channels that are not run here, and what is wrong."""

    store: Store
    channels: Channels
    outbox: DeliveryRuntime
    faults: Mapping[str, str] = {}


class _ChannelHealth(msgspec.Struct, frozen=True):
    state: str
    failures: int = 0
    error: str | None = None


class _Deliveries(msgspec.Struct, frozen=True):
    unknown: int
    failed: int
    unrouted: int
    queued: int


class _Health(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    database: str
    channels: dict[str, _ChannelHealth]
    deliveries: _Deliveries | None
    pending: int | None
    oldest_pending_ms: int | None


class HttpServer:
    """Made, started on a listening socket, drained, closed."""

    def __init__(self, watched: Watched, routes: Sequence[web.AbstractRouteDef]) -> None:
        self._watched = watched
        self._draining = False
        application = web.Application(middlewares=[self._gate])
        application.add_routes(
            [web.get(HEALTH, self._health), web.get(METRICS, self._metrics), *routes]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_CLOSE_S)

    async def start(self, listening: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    def drain(self) -> None:
        """Takes nothing more in. What is being taken in is finished."""
        self._draining = True

    async def aclose(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _gate(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if self._draining and request.path not in (HEALTH, METRICS):
            response = _json(503, {"error": {"code": "unavailable", "message": "shutting down"}})
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            response.force_close()
            return response
        try:
            return await handler(request)
        except web.HTTPException as error:  # nothing there, or not with this method
            said = {"code": "not_found" if error.status == 404 else "http", "message": error.reason}
            return _json(error.status, {"error": said})

    async def _health(self, request: web.Request) -> web.Response:
        found = await self._standing()
        channels = self._channels()
        works = found is not None and not self._draining
        works = works and all(c.state == "running" for c in channels.values())
        counts = found.deliveries if found is not None else {}
        troubled = bool(counts.get("unknown") or counts.get("failed"))
        status = "attention" if troubled else "ok"
        if not works:
            status = "draining" if self._draining else "failing"
        health = _Health(
            status=status,
            database="ok" if found is not None else "unreachable",
            channels=channels,
            deliveries=_Deliveries(
                unknown=counts.get("unknown", 0),
                failed=counts.get("failed", 0),
                unrouted=counts.get("unrouted", 0),
                queued=counts.get("queued", 0) + counts.get("sending", 0),
            )
            if found is not None
            else None,
            pending=found.pending if found is not None else None,
            oldest_pending_ms=found.oldest_pending_ms if found is not None else None,
        )
        return _json(200 if works else 503, health)

    async def _metrics(self, request: web.Request) -> web.Response:
        found = await self._standing()
        if found is None:
            return web.Response(status=503, text="the database cannot be read\n")
        lines = metrics(found, self._channels(), self._watched.outbox)
        return web.Response(
            body="".join(lines).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _standing(self) -> Standing | None:
        """None: the database cannot be read now."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self._watched.store.read(standing)
        except (StoreError, TimeoutError) as error:
            log.warning("the database could not be read: %s", error or type(error).__name__)
            return None

    def _channels(self) -> dict[str, _ChannelHealth]:
        running = {
            name: _ChannelHealth(h.state, h.failures, h.error if h.state != "running" else None)
            for name, h in self._watched.channels.health.items()
        }
        faulty = {
            name: _ChannelHealth("misconfigured", 0, text)
            for name, text in self._watched.faults.items()
        }
        return running | faulty


def metrics(
    found: Standing, channels: Mapping[str, _ChannelHealth], outbox: DeliveryRuntime
) -> list[str]:
    """The lines of a scrape, in the text format of Prometheus."""
    counts = outbox.counts
    return [
        *_metric("pending_messages", "gauge", "Messages queued and not entered.", found.pending),
        *_metric(
            "oldest_pending_seconds",
            "gauge",
            "Age of the oldest pending message; 0 if nothing is pending.",
            (found.oldest_pending_ms or 0) / 1000,
        ),
        *_family(
            "deliveries",
            "gauge",
            "Deliveries that are not sent, by status.",
            {f'status="{s}"': found.deliveries.get(s, 0) for s in _STATUSES},
        ),
        *_metric(
            "deliveries_for_operator",
            "gauge",
            "Deliveries in doubt that only an operator can settle.",
            found.operators,
        ),
        *_metric("turns_running", "gauge", "Sessions being driven, by any process.", found.turns),
        *_family(
            "channel_up",
            "gauge",
            "1 where a channel runs in this process.",
            {
                f'channel="{_escaped(name)}"': int(c.state == "running")
                for name, c in sorted(channels.items())
            },
        ),
        *_family(
            "delivery_calls_total",
            "counter",
            "Calls of channels by this process, by what came of them.",
            {
                'outcome="sent"': counts.sent,
                'outcome="unknown"': counts.unknown,
                'outcome="refused"': counts.refused,
            },
        ),
        *_metric(
            "delivery_questions_total",
            "counter",
            "Questions of this process about deliveries in doubt.",
            counts.asked,
        ),
    ]


def _metric(name: str, kind: str, text: str, value: float) -> list[str]:
    return _family(name, kind, text, {"": value})


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    full = f"postroom_{name}"
    return [
        f"# HELP {full} {text}\n",
        f"# TYPE {full} {kind}\n",
        *[f"{full}{'{' + labels + '}' if labels else ''} {v}\n" for labels, v in values.items()],
    ]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _json(status: int, value: object) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ``port`` 0: any that is free.

    Raises:
        ConfigError: the address cannot be used, or another process has it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {reason}",
            hint="another `postroom serve` may run there; --port and --host name another address",
        ) from None
