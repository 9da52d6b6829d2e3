"""Whether the nodes agree on what the setvars.sh in their environment does. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.errors import ProvisionError
from orchestrator.specs.setvars import SetvarsEffect


def agreed_effect(effects: Mapping[str, SetvarsEffect | None]) -> SetvarsEffect | None:
    """The one effect that the nodes tell, by node name; a node without the environment yet tells None.

    Raises ProvisionError when they differ: their environments have one path and one content, so one was changed by hand.
    """
    told = {node: effect for node, effect in effects.items() if effect}
    if not told:
        return None
    first, effect = next(iter(told.items()))
    differing = [node for node, other in told.items() if other != effect]
    if differing:
        raise ProvisionError(
            f"setvars.sh of {effect.module} has another effect on {', '.join(differing)} than on {first}",
            advice=f"remove the environment that holds {effect.file} there, and provision again",
        )
    return effect
