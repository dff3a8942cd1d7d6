"""Finds where a session's deliveries go in this process, by the session's id and nothing else.

It knows nothing of parents, children, conversation keys, context variables, or a current channel.
Live routes are registered here and, as rows, in the store: only there a transaction can see that
nothing could deliver. A conversation of a channel needs no registration: a route to it is made when
it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from postroom import mint
from postroom.domain.conversation import ConversationKey
from postroom.domain.ids import ClaimToken, SessionId
from postroom.domain.outbox import NotStarted, SendOutcome
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
        self._live: dict[ClaimToken, tuple[SessionId, Route]] = {}

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
        """
        if route.session_id != session_id:
            raise RouteError(f"this route belongs to {route.session_id}, not {session_id}")
        token = mint.claim_token()
        self._live[token] = (session_id, route)
        try:
            await self._store.write(
                bind_route, session_id, token, channel=route.channel, node=self._store.node
            )
        except BaseException:
            del self._live[token]
            raise
        return token

    async def unbind(self, token: ClaimToken) -> None:
        """Takes a route away; the one bound before it is primary again. Again, it does nothing."""
        if self._live.pop(token, None) is not None:
            await self._store.write(unbind_route, token)

    async def rebind(self) -> None:
        """After the lease was lost, and with it the rows: every live route is bound anew."""
        for token, (session_id, route) in list(self._live.items()):
            await self._store.write(unbind_route, token)
            if token in self._live:
                await self._store.write(
                    bind_route, session_id, token, channel=route.channel, node=self._store.node
                )

    def route_to(self, session_id: SessionId, address: Address) -> Route | None:
        """The route to an address that a session's delivery was claimed for; None: not from here."""
        if isinstance(address, ToConnection):
            bound = self._live.get(address.token)
            return bound[1] if bound is not None and bound[0] == session_id else None
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
        route = await self._primary(prompt.session_id)
        return await route.prompt_user(prompt) if route is not None else None

    async def request_approval(self, request: Question) -> tuple[bool | None, str]:
        """The decision and why; None: it was shown and will be decided later, by its id.

        Without a route it is denied, with that reason.
        """
        route = await self._primary(request.session_id)
        if route is None:
            return False, "nobody is attached to this session who could be asked"
        return await route.request_approval(request), "asked"

    async def _primary(self, session_id: SessionId) -> Route | None:
        address = await self._store.read(session_address, session_id)
        return self.route_to(session_id, address) if address is not None else None
