"""Ask a node how far a training is, by the ends of a rank's logs."""

from __future__ import annotations

import json

from orchestrator.actions import agent
from orchestrator.nodes.transport import Transport, check, run
from orchestrator.planning.progress import Progress, read_progress

LOOKED_AT_BYTES = 64 * 1024
TIMEOUT_S = 30


def progress(transport: Transport, root: str, python: str, run_dir: str, log: int) -> Progress:
    """What the ends of a rank's logs say. Raises CommandError where the node does not tell."""
    arguments = ["--run-dir", run_dir, "--ranks", str(log), "--last-bytes", str(LOOKED_AT_BYTES)]
    argv = agent.command(root, python, "tail.py", arguments)
    said = check(transport, argv, run(transport, argv, idle_timeout_s=TIMEOUT_S))
    texts = {"out": "", "err": ""}
    for message in map(json.loads, said.stdout.splitlines()):
        if "data" in message:
            stream = message["file"].rsplit(".", 1)[1]
            texts[stream] += message["data"]
    # Node scripts send bytes as Latin-1 characters.
    out, err = (text.encode("latin-1").decode("utf-8", "replace") for text in (texts["out"], texts["err"]))
    return read_progress(out, err)
