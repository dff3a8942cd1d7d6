"""A tool that asks before it acts.

The core says "ask"; the program is the session's route while the binding is open, so the question comes
here. If nobody answered, or the answer raised, the call would be denied.
"""

import asyncio

import postroom
from postroom.domain.ids import CoreId
from postroom.testing import calling, scripted
from postroom.tools import tool
from postroom.wire.protocol import ApprovalRequest


@tool(effects="outside")
async def send_letter(to: str) -> str:
    """Sends the letter.

    Args:
        to: who gets it
    """
    return f"sent to {to}"


def core() -> postroom.Core:
    """A model by script: it calls the tool, then says that it is done."""
    model = scripted(calling(("send_letter", {"to": "Ada"})), "The letter is on its way.")
    return postroom.Core(
        id=CoreId("clerk"),
        revision="1",
        models=(model,),
        tools={"send_letter": send_letter},
        permissions={"send_letter": "ask"},
    )


async def approve(request: ApprovalRequest) -> bool:
    print("asked:", request.subject)
    return True


async def main() -> None:
    async with postroom.connect(core=core(), database="example.db") as room:
        session = await room.session("letters")
        async with session.bind(on_approval=approve):
            result = await session.run("Send it.", timeout=60)
        print(result.final_response)


asyncio.run(main())
