"""Ask the nodes what the setvars.sh in their environment does. It ran once, when the environment was made."""

from __future__ import annotations

from orchestrator.actions import agent
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.setvars import agreed_effect
from orchestrator.specs.lock import Lock
from orchestrator.specs.setvars import SetvarsEffect


def setvars_effect(fleet: Fleet, root: str, python: str, lock: Lock, choice: StackChoice) -> SetvarsEffect | None:
    """The effect that all nodes agree on; None where the backend needs none or no environment is there yet.

    Only where the retired bindings are used is anything asked, in one command per node. Raises ProvisionError when nodes differ.
    """
    if choice.bindings is None:
        return None

    def ask(transport: Transport) -> SetvarsEffect | None:
        told = agent.call(transport, root, python, "setvars.py", [root, lock.digest])["effect"]
        return SetvarsEffect.from_json(told) if told else None

    return agreed_effect(fleet.each(ask))
