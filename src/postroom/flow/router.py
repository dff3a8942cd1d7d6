"""Finds where a session's deliveries go in this process, by the session's id and nothing else.

It knows nothing of parents, children, conversation keys, context variables, or a current channel.
Live routes are registered here and, as rows, in the store: only there a transaction can see that
nothing could deliver. A conversation of a channel needs no registration: a route to it is made when
it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from postroom import mint
from postroom.domain.conversation import ConversationKey
from postroom.domain.ids import ClaimToken, SessionId
from postroom.domain.outbox import NotStarted, SendOutcome
from postroom.errors import StoreClosed, StoreError, UnknownSession
from postroom.ports.channel import Channel, Profile
from postroom.ports.route import InteractionOutbound, Question, Route, RouteError
from postroom.ports.store import Store
from postroom.scripts.routes import (
    Address,
    ToConnection,
    bind_route,
    session_address,
    unbind_route,
)

log = logging.getLogger("postroom.router")

T = TypeVar("T")


class _Bound:
    """A live route; ``gone`` is set when it is unbound."""

    __slots__ = ("gone", "route", "session_id")

    def __init__(self, session_id: SessionId, route: Route) -> None:
        self.session_id = session_id
        self.route = route
        self.gone = asyncio.Event()


class ConversationRoute:
    """A session's conversation on a channel of this process."""

    def __init__(
        self,
        session_id: SessionId,
        channel: Channel,
        conversation: ConversationKey,
    ) -> None:
        self._session_id = session_id
        self._channel = channel
        self._conversation = conversation

    @property
    def session_id(self) -> SessionId:
        return self._session_id

    @property
    def channel(self) -> str:
        return self._channel.name

    @property
    def profile(self) -> Profile:
        return self._channel.profile

    async def deliver(self, outbound: InteractionOutbound) -> SendOutcome:
        (item,) = outbound.items
        if outbound.session_id != self._session_id or item.part.conversation != self._conversation:
            raise RouteError(f"this route belongs to {self._session_id}, not {outbound.session_id}")
        return await self._channel.send(item.part)

    async def prompt_user(self, prompt: Question) -> str | None:
        return None  # a chat is asked through the outbox, and answers with a message

    async def request_approval(self, request: Question) -> bool | None:
        return None  # shown through the outbox, decided later by its id


class SessionInteractionRouter:
    """``channels`` are those this process runs, by name."""

    def __init__(self, store: Store, channels: Mapping[str, Channel]) -> None:
        self._store = store
        self._channels = channels
        self._live: dict[ClaimToken, _Bound] = {}
        self._left: set[ClaimToken] = set()
        self._rebinding: asyncio.Task[None] | None = None
        self._subscription = store.on_lease_lost(self._on_lease_lost)

    @property
    def channels(self) -> Mapping[str, Channel]:
        return self._channels

    @property
    def connections(self) -> frozenset[str]:
        """The tokens of the live routes that this process holds."""
        return frozenset(self._live)

    async def bind(self, session_id: SessionId, route: Route) -> ClaimToken:
        """Makes a connection the session's primary route, until it is unbound or another binds.

        Raises:
            RouteError: the route is another session's.
            UnknownSession: there is no such session.
        """
        if route.session_id != session_id:
            raise RouteError(f"this route belongs to {route.session_id}, not {session_id}")
        await self._forget_left()
        token = mint.claim_token()
        self._live[token] = _Bound(session_id, route)
        writing = asyncio.ensure_future(self._write_bound(token))
        try:
            await asyncio.shield(writing)
        except BaseException:
            # Bound or not, nobody holds the token: its row must not be taken for a route.
            self._drop(token)
            with contextlib.suppress(StoreError, UnknownSession):
                await asyncio.shield(self._taken_back(token, writing))
            raise
        return token

    async def unbind(self, token: ClaimToken) -> None:
        """Takes a route away; the one bound before it is primary again. Again, it does nothing.

        Raises:
            StoreError: it is not taken away on disk yet; here it is. Unbinding again settles it.
        """
        if self._drop(token):
            self._left.add(token)
        await self._forget_left()

    async def rebind(self) -> None:
        """After the lease was lost every live route is valid again, each in its old place."""
        for token in list(self._live):
            try:
                await self._write_bound(token)
            except UnknownSession:
                self._drop(token)
        await self._forget_left()

    def close(self) -> None:
        """Hears of nothing more. The rows of its routes end with the store's lease."""
        self._subscription.close()
        if self._rebinding is not None:
            self._rebinding.cancel()

    def _on_lease_lost(self) -> None:
        if self._live and (self._rebinding is None or self._rebinding.done()):
            self._rebinding = asyncio.ensure_future(self._rebind_at_last())

    async def _rebind_at_last(self) -> None:
        """Tries until it is done, for the name the process has then; bounded."""
        for wait_s in (0.1, 1.0, 5.0, 15.0, 15.0, 15.0):
            node = self._store.node
            try:
                await self.rebind()
            except StoreClosed:
                return
            except StoreError as error:
                log.warning("live routes could not be bound again, next in %g s: %s", wait_s, error)
                await asyncio.sleep(wait_s)
            else:
                if self._store.node == node:
                    return
        log.error("live routes could not be bound again; who is attached must bind anew")

    async def _write_bound(self, token: ClaimToken) -> None:
        bound = self._live.get(token)
        if bound is not None:
            await self._store.write(
                bind_route,
                bound.session_id,
                token,
                channel=bound.route.channel,
                node=self._store.node,
            )

    async def _taken_back(self, token: ClaimToken, writing: asyncio.Future[None]) -> None:
        with contextlib.suppress(StoreError, UnknownSession):
            await writing
        self._left.add(token)
        await self._forget_left()

    def _drop(self, token: ClaimToken) -> bool:
        bound = self._live.pop(token, None)
        if bound is not None:
            bound.gone.set()
        return bound is not None

    async def _forget_left(self) -> None:
        for token in list(self._left):
            await self._store.write(unbind_route, token)
            self._left.discard(token)

    def route_to(self, session_id: SessionId, address: Address) -> Route | None:
        """The route to an address that a session's delivery was claimed for; None: not from here."""
        if isinstance(address, ToConnection):
            bound = self._live.get(address.token)
            return bound.route if bound is not None and bound.session_id == session_id else None
        channel = self._channels.get(address.channel)
        if channel is None:
            return None
        return ConversationRoute(session_id, channel, address.conversation)

    async def deliver(self, outbound: InteractionOutbound, to: Address) -> SendOutcome:
        """Hands an outbound to the route of its own session.

        Raises:
            RouteError: the route refused it as another session's.
        """
        route = self.route_to(outbound.session_id, to)
        if route is None:
            return NotStarted("what would deliver it is not here")
        return await route.deliver(outbound)

    async def prompt_user(self, prompt: Question) -> str | None:
        """A person's answer, by the session's own primary route; None: unanswered, or no route."""
        found = await self._primary(prompt.session_id)
        if found is None:
            return None
        route, gone = found
        try:
            answered, answer = await _unless_gone(route.prompt_user(prompt), gone)
        except Exception as error:
            log.warning("a route failed to ask: %s: %s", type(error).__name__, error)
            return None
        return answer if answered else None

    async def request_approval(self, request: Question) -> tuple[bool | None, str]:
        """The decision and why; None: it was shown and will be decided later, by its id.

        Without a route it is denied, with that reason; so it is if the route fails or goes.
        """
        found = await self._primary(request.session_id)
        if found is None:
            return False, "nobody is attached to this session who could be asked"
        route, gone = found
        try:
            answered, answer = await _unless_gone(route.request_approval(request), gone)
        except Exception as error:
            log.warning("a route failed to ask: %s: %s", type(error).__name__, error)
            return False, "the connection failed to ask"
        return (answer, "asked") if answered else (False, "the connection was lost")

    async def shows_progress(self, session_id: SessionId) -> bool:
        """Whether the session's conversation shows how the work goes. Mostly a look at no row."""
        shows = any(c.profile.progress for c in self._channels.values())
        if not shows and not any(b.route.profile.progress for b in self._live.values()):
            return False
        found = await self._primary(session_id)
        return found is not None and found[0].profile.progress

    async def _primary(self, session_id: SessionId) -> tuple[Route, asyncio.Event | None] | None:
        """The route, and what is set when it goes (None: a conversation does not)."""
        address = await self._store.read(session_address, session_id)
        route = self.route_to(session_id, address) if address is not None else None
        if route is None:
            return None
        bound = self._live.get(address.token) if isinstance(address, ToConnection) else None
        return route, bound.gone if bound is not None else None


async def _unless_gone(asking: Awaitable[T], gone: asyncio.Event | None) -> tuple[bool, T | None]:
    """What was answered; ``(False, None)`` if the connection went first."""
    if gone is None:
        return True, await asking
    answer = asyncio.ensure_future(asking)
    leaving = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return (True, answer.result()) if answer.done() else (False, None)
    finally:
        answer.cancel()
        leaving.cancel()
