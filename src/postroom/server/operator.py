"""The methods of approvals and of the outbox. Those of the outbox are the operator's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from postroom import mint
from postroom.domain.ids import ApprovalId, DeliveryId, SessionId
from postroom.domain.ids import session_id as checked_session_id
from postroom.flow.outbox import rules_of
from postroom.scripts.approvals import OPERATOR, OpenApproval, decide_approval
from postroom.scripts.attach import approvals_of, check_owner
from postroom.scripts.outbox import (
    DeliveryView,
    abandon,
    list_deliveries,
    redeliver,
    resolve_delivery,
)
from postroom.server.failures import refused
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.server.connection import Connection, Method


class OperatorMethods:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._room = connection.room
        self._store = connection.room.store

    def table(self) -> dict[str, Method]:
        return {
            "approval/list": self._approvals,
            "approval/decide": self._decide,
            "outbox/list": self._list,
            "outbox/resolve": self._resolve,
            "outbox/redeliver": self._redeliver,
            "outbox/abandon": self._abandon,
        }

    async def _session(self, text: str | None) -> SessionId | None:
        if text is None:
            return None
        name = checked_session_id(text)
        await self._store.read(check_owner, name, self._connection.principal)
        return name

    # ---- approvals ----

    async def _approvals(self, params: said.ApprovalList) -> said.Approvals:
        name = await self._session(params.session_id)
        found = await self._store.read(approvals_of, self._connection.principal, name)
        return said.Approvals([_as_approval(one) for one in found])

    async def _decide(self, params: said.ApprovalDecide) -> said.Done:
        await self._store.write(
            decide_approval,
            ApprovalId(params.approval_id),
            params.decision,
            by=self._connection.principal,
            principal=self._connection.principal,
            ref=mint.claim_token(),
        )
        return said.Done()

    # ---- the outbox ----

    async def _list(self, params: said.OutboxList) -> said.Deliveries:
        if params.session_id is None:
            self._operator()
        name = await self._session(params.session_id)
        found = await self._store.read(
            list_deliveries,
            session_id=name,
            status=tuple(params.status),
            open_only=params.open,
            limit=params.limit,
        )
        return said.Deliveries([_as_delivery(view) for view in found])

    async def _resolve(self, params: said.OutboxResolve) -> said.Delivery:
        self._operator()
        return _as_delivery(
            await self._store.write(
                resolve_delivery,
                DeliveryId(params.delivery_id),
                params.decision,
                params.by,
                mint.claim_token(),
            )
        )

    async def _redeliver(self, params: said.OutboxDecide) -> said.Delivery:
        self._operator()
        return _as_delivery(
            await self._store.write(
                redeliver,
                DeliveryId(params.delivery_id),
                params.by,
                mint.claim_token(),
                rules_of(self._room.limits),
            )
        )

    async def _abandon(self, params: said.OutboxDecide) -> said.Delivery:
        self._operator()
        return _as_delivery(
            await self._store.write(
                abandon, DeliveryId(params.delivery_id), params.by, mint.claim_token()
            )
        )

    def _operator(self) -> None:
        if self._connection.principal != OPERATOR:
            raise refused("not_yours", "only the operator may do this")


def _as_approval(one: OpenApproval) -> said.Approval:
    return msgspec.convert(one, said.Approval, from_attributes=True)


def _as_delivery(view: DeliveryView) -> said.Delivery:
    return msgspec.convert(view, said.Delivery, from_attributes=True)
