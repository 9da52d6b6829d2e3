"""Everything that can go wrong, as one tree.

ClusterTrainError                  exit code 1
    + InventoryError               2   the inventory or the command line is wrong
    + NodeError                    3   a node cannot be reached, trusted or asked
        x UnreachableError             no TCP or SSH connection
        x HostKeyError                 the host key is unknown or has changed
        x AuthenticationError          the login was refused
          - LockedKeyError                 only a private key with a passphrase is left to try
          - PasswordNeededError            it takes none of the keys, but would take a password
        x CommandError                 a command on a node failed or took too long
    + FleetError                   3   several nodes failed at once; holds every failure
    + ProvisionError               4   no consistent set of wheels, or an installation failed
        x ResolveError                 the resolver found no solution, or a CUDA build
    + PreflightError               5   launching would fail: refused before anything starts
    + JobFailed                    1   the job itself ended badly
    + Interrupted                130   the person pressed Ctrl-C

Every error carries `advice`: what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping


class ClusterTrainError(Exception):
    """Root of the tree: a message, optional advice, and the exit code of its kind."""

    exit_code = 1

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


class InventoryError(ClusterTrainError):
    """The inventory or the command line cannot be used as written."""

    exit_code = 2


class NodeError(ClusterTrainError):
    """One node cannot be used; `node` is its name in the inventory."""

    exit_code = 3

    def __init__(self, message: str, *, node: str, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.node = node


class UnreachableError(NodeError):
    """No connection to the node could be made within its time limit."""


class HostKeyError(NodeError):
    """The node's host key is unknown, or is not the one that was known."""


class AuthenticationError(NodeError):
    """The node refused every key that was offered."""


class LockedKeyError(AuthenticationError):
    """The node accepted no other key, and the private key in `key_file` needs its passphrase."""

    def __init__(self, message: str, *, node: str, key_file: str, advice: str = "") -> None:
        super().__init__(message, node=node, advice=advice)
        self.key_file = key_file


class PasswordNeededError(AuthenticationError):
    """The node takes a password, and either none was given yet or not this one; `user` at `address` is whose it is."""

    def __init__(self, message: str, *, node: str, user: str, address: str, advice: str = "") -> None:
        super().__init__(message, node=node, advice=advice)
        self.user = user
        self.address = address


class CommandError(NodeError):
    """A command on a node failed, or did not end within its time limit."""

    def __init__(self, message: str, *, node: str, command: str = "", stderr: str = "", advice: str = "") -> None:
        super().__init__(message, node=node, advice=advice)
        self.command = command
        self.stderr = stderr


class FleetError(ClusterTrainError):
    """An operation failed on some nodes; `failures` names each of them, never just the first."""

    exit_code = 3

    def __init__(self, message: str, failures: Mapping[str, ClusterTrainError]) -> None:
        advice = "\n".join(sorted({error.advice for error in failures.values() if error.advice}))
        super().__init__(message, advice=advice)
        self.failures = dict(failures)
        self.exit_code = max((error.exit_code for error in failures.values()), default=3)


class ProvisionError(ClusterTrainError):
    """The nodes' environments could not be made right."""

    exit_code = 4


class ResolveError(ProvisionError):
    """The resolver found no set of wheels, or one that must not be installed."""


class PreflightError(ClusterTrainError):
    """The launch would fail, so it was not started."""

    exit_code = 5


class JobFailed(ClusterTrainError):
    """The training job ended with a failure on at least one rank."""

    exit_code = 1


class Interrupted(ClusterTrainError):
    """The person interrupted the command."""

    exit_code = 130
