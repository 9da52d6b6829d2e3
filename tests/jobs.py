"""Little jobs that several folders of tests run."""

from __future__ import annotations

from pathlib import Path

FAILS_ON_RANK_2 = """
import os, sys, time
if os.environ["RANK"] == "2":
    print("last words", file=sys.stderr)
    sys.exit(3)
time.sleep(300)
"""
SAVES_AT_THE_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
for tick in range(600):
    print("tick", tick)
    time.sleep(0.1)
"""


def script(tmp_path: Path, text: str) -> str:
    """Write a job as train.py into the test's directory; its path."""
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def write_model(directory: Path, *, parameters: int) -> None:
    """The header of a safetensors file that holds one tensor."""
    header = f'{{"w":{{"dtype":"F32","shape":[{parameters}],"data_offsets":[0,{4 * parameters}]}}}}'.encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
