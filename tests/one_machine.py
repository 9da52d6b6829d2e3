"""What ranks need that Intel MPI's mpiexec.hydra starts on this machine alone, without cluster-train."""

from __future__ import annotations

import socket
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def rank_environment() -> dict[str, str]:
    """Where they find remote/ and each other, by a port that is free now; one thread each, wherever the system puts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "PYTHONPATH": str(REPOSITORY / "remote"),
        "PYTHONWARNINGS": "ignore",
        "I_MPI_PIN": "0",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
