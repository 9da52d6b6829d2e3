"""A provision that finds nothing touched does not ask again; one that finds something touched does, and mends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Ran
from labs import Lab, make_wheels
from sshd import SshdNodes

pytestmark = pytest.mark.stack

UNTOUCHED = "nothing was touched there"


class Ready(Lab):
    """Two nodes with one root, on which all is ready, and known to be."""

    def again(self, *arguments: str) -> Ran:
        done = self.provision(self.wheels.parent / "recall.yml", *arguments)
        assert done.exit_code == 0, done.stdout + done.stderr
        return done


@pytest.fixture
def ready(sshd_factory: SshdNodes, tmp_path: Path, uv_wheel: Path) -> Ready:
    (tmp_path / "wheels").mkdir()
    made = Ready(nodes=sshd_factory(2), wheels=make_wheels(tmp_path / "wheels", uv_wheel), cache=tmp_path / "cache")
    made.inventory(tmp_path / "recall.yml", tmp_path / "root")
    made.again()
    return made


def test_the_second_time_nothing_is_asked(ready: Ready) -> None:
    second = ready.again("--json")
    assert any(UNTOUCHED in event.get("text", "") for event in second.events)
    assert second.result["installed_on"] == []


def remove_environment(ready: Ready, root: Path) -> None:
    (environment,) = (root / "envs").glob("[!.]*")
    shutil.rmtree(environment)


def remove_record(ready: Ready, root: Path) -> None:
    (record,) = (root / "envs").glob("*/complete.json")
    record.unlink()


def remove_agent(ready: Ready, root: Path) -> None:
    shutil.rmtree(root / "agent")


def revoke_key(ready: Ready, root: Path) -> None:
    keys = ready.nodes[1].home / ".ssh" / "authorized_keys"
    keys.write_text("".join(line for line in keys.read_text().splitlines(True) if "cluster-train:" not in line))


@pytest.mark.parametrize("touch", [remove_environment, remove_record, remove_agent, revoke_key])
def test_what_was_touched_is_seen_and_mended(ready: Ready, tmp_path: Path, touch: Callable[[Ready, Path], None]) -> None:
    touch(ready, tmp_path / "root")
    mended = ready.again()
    assert UNTOUCHED not in mended.stderr
    assert len(list((tmp_path / "root" / "envs").glob("*/complete.json"))) == 1
    assert "cluster-train:" in (ready.nodes[1].home / ".ssh" / "authorized_keys").read_text()
    assert UNTOUCHED in ready.again().stderr


def test_another_stack_is_installed_although_nothing_was_touched(ready: Ready, tmp_path: Path) -> None:
    ready.inventory(tmp_path / "recall.yml", tmp_path / "root", "small")
    assert UNTOUCHED not in ready.again().stderr
    assert len(list((tmp_path / "root" / "envs").glob("*/complete.json"))) == 2


def test_a_damaged_recollection_is_asked_anew(ready: Ready) -> None:
    for kept in (ready.cache / "cluster-train" / "nodes").iterdir():
        kept.write_text('{"facts": {}}')
    assert UNTOUCHED not in ready.again().stderr
    assert UNTOUCHED in ready.again().stderr
