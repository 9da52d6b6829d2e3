"""What ranks need that Intel MPI's mpiexec.hydra starts on this machine alone, without cluster-train."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BOOTSTRAP = REPOSITORY / "remote" / "bootstrap.py"  # without it gloo aborts one in ten scripts at their end


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on; those beside them may well be taken, by connections too."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def rank_environment() -> dict[str, str]:
    """Where they find remote/ and each other, by a port that is free now; one thread each, wherever the system puts it."""
    return {
        "PYTHONPATH": str(REPOSITORY / "remote"),
        "PYTHONWARNINGS": "ignore",
        "I_MPI_PIN": "0",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }
