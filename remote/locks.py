"""Who uses this machine: a lock for each run, in one directory that all people of the machine share.

    hold < {"run_id", "root", "share", ...}     one line on stdin: take the machine for a run, and keep it while stdin is open
                                                and, with "silence_s", not silent for so long (see `caller.py`)
    list                                        {"locks": [...]}: the runs that hold this machine or wait for it

A lock is a file `<run id>.json` that at least one living process holds with flock(2). The kernel lets go of it when the last
holder dies, however it dies: a dead lock counts for nothing and is replaced. `hold` keeps it for the command that a person typed;
the supervisor and the ranks join it and keep it while the run goes on, whoever else has gone. Where a run may be attempted
again, its supervisor has a `hold` on every other node as well (`outposts.py`), for the time when no rank is there.

`hold` prints JSON lines: first {"machine", "living", "states"} (what of our own runs lives here, and the states that this
root knows), then {"busy": [lock, ...]} whenever that changes while others are in the way, then {"held": true, "beside":
[...]}. It reads `cancel` (end all that was started here over this very connection) and `keep` (stay after stdin's end until a
rank has joined). First come, first served: who waits bars those that came later. With "share" nobody is in the way.

The directory is world-writable and sticky, as /tmp is. Nothing in it is followed or trusted: a link is refused, a file is made
new or is our own, another person's is only read, and whose it is the kernel says. The directory itself is locked while one looks.
"""

import fcntl
import json
import os
import pwd
import signal
import stat
import sys
import time

import caller
import processes
import records
import runs

DIRECTORY = "/tmp/cluster-train-locks"
VARIABLE = "CLUSTER_TRAIN_LOCKS"  # names another directory
MODE = 0o1777
GUARD_LIMIT_S = 10.0  # nobody has the directory for longer than a look takes
POLL_S = 0.25
KEEP_LIMIT_S = 60.0
LOOKED_AT = 200  # runs, the newest
LARGEST_BYTES = 64 * 1024
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def path() -> str:
    """Where the locks are."""
    return os.environ.get(VARIABLE) or DIRECTORY


class Directory:
    """The directory of locks, locked itself for as long as the `with` block lasts. Raises runs.Problem."""

    def __init__(self, is_to_be_made: bool = True) -> None:
        self.path = path()
        self.is_to_be_made = is_to_be_made
        self.descriptor = None

    def __enter__(self) -> "Directory":
        try:
            self.lock(time.monotonic() + GUARD_LIMIT_S)
            while not self.is_there():  # somebody removed it before we had it
                self.__exit__()
                self.lock(time.monotonic() + GUARD_LIMIT_S)
        except OSError as error:
            self.__exit__()
            raise runs.Problem("the locks in %s cannot be used: %s" % (self.path, error.strerror))
        except runs.Problem:
            self.__exit__()
            raise
        return self

    def lock(self, deadline: float) -> None:
        """Open the directory and lock it."""
        if self.is_to_be_made:
            make_shared_dir(self.path)
        self.descriptor = os.open(self.path, FLAGS | os.O_RDONLY | os.O_DIRECTORY)
        check_shared(self.path, os.fstat(self.descriptor))
        while not is_locked(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise runs.Problem("%s is locked by somebody for more than %d s" % (self.path, GUARD_LIMIT_S))
            time.sleep(0.01)

    def is_there(self) -> bool:
        """Whether the path still names the directory that we have open."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def own(self, run_id: str, is_new: bool) -> int:
        """A descriptor that holds the lock of our own run; None where there is none and it is not to be made."""
        name = run_id + ".json"
        try:
            descriptor = self.open_own(name, is_new)
        except OSError as error:
            raise runs.Problem("%s in %s is not ours: %s" % (name, self.path, error.strerror))
        if descriptor is None:
            return None
        about = os.fstat(descriptor)
        is_plain = stat.S_ISREG(about.st_mode) and about.st_nlink == 1  # a second name may be that of a precious file
        if about.st_uid != os.geteuid() or not is_plain or not is_locked(descriptor, fcntl.LOCK_SH):
            os.close(descriptor)
            raise runs.Problem("%s in %s is not ours" % (name, self.path))
        return descriptor

    def open_own(self, name: str, is_new: bool) -> int:
        """Open a lock of ours, or make it; None where there is none and it is not to be made."""
        try:
            return os.open(name, FLAGS | os.O_RDWR, dir_fd=self.descriptor)
        except FileNotFoundError:
            if not is_new:
                return None
        descriptor = os.open(name, FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self.descriptor)
        os.fchmod(descriptor, 0o644)
        return descriptor

    def others(self, run_id: str) -> list:
        """The living locks of other runs, first come first; dead ones are removed where we may."""
        found = []
        for name in os.listdir(self.descriptor):
            lock = None if name == run_id + ".json" else self.read(name)
            if lock:
                found.append(lock)
        return sorted(found, key=lambda lock: (lock["asked_unix_s"], lock["run_id"]))

    def read(self, name: str) -> dict:
        """What a lock says; None for a dead one, and for what is none."""
        try:
            descriptor = os.open(name, FLAGS | os.O_RDONLY, dir_fd=self.descriptor)
        except OSError:
            return None
        try:
            about = os.fstat(descriptor)
            if not name.endswith(".json") or not stat.S_ISREG(about.st_mode):
                return None
            if is_locked(descriptor, fcntl.LOCK_EX):
                self.remove(name)
                return None
            return understood(name, about, os.read(descriptor, LARGEST_BYTES))
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a dead lock; another person's may stay, it counts for nothing."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError:
            pass


def remove_directory() -> str:
    """Remove the directory if it is ours and nobody has a lock in it; its path, or None where it stays or is not there."""
    try:
        with Directory(is_to_be_made=False) as directory:
            directory.others("")  # which removes dead locks
            os.rmdir(directory.path)
            return directory.path
    except (OSError, runs.Problem):
        return None


def make_shared_dir(path: str) -> None:
    """The directory, for everybody, as /tmp is for them."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    os.chmod(path, MODE)


def check_shared(path: str, about: os.stat_result) -> None:
    """Raise runs.Problem for a directory in which others could put their files in the place of ours."""
    deadline = time.monotonic() + 1.0
    while about.st_mode & MODE != MODE and about.st_uid == os.geteuid() and time.monotonic() < deadline:
        os.chmod(path, MODE)  # whoever made it was killed before this
        about = os.stat(path)
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        raise runs.Problem("%s is open to everybody and not sticky: chmod 1777 it" % path)


def is_locked(descriptor: int, how: int) -> bool:
    """Lock a file (LOCK_EX or LOCK_SH) without waiting; whether it is ours now."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def understood(name: str, about: os.stat_result, text: bytes) -> dict:
    """A living lock's content, whatever its owner wrote; who that is comes from the kernel."""
    try:
        lock = json.loads(text.decode("ascii"))
        lock["asked_unix_s"] = float(lock["asked_unix_s"])
    except (KeyError, TypeError, ValueError):
        lock = {"asked_unix_s": about.st_mtime, "state": "held"}
    try:
        user = pwd.getpwuid(about.st_uid).pw_name
    except KeyError:
        user = str(about.st_uid)
    return dict(lock, run_id=name[: -len(".json")], user=user, is_own=about.st_uid == os.geteuid())


class Joined:
    """Our part in the lock of our own run, until `leave` or our end.

    Args:
        directory: where the lock is to be made if there is none; else nothing is held where there is none.
    """

    def __init__(self, run_id: str, directory: Directory = None) -> None:
        self.run_id = run_id
        self.descriptor = directory.own(run_id, is_new=True) if directory else None
        if directory:
            return
        try:
            if os.path.isdir(path()):
                with Directory(is_to_be_made=False) as directory:
                    self.descriptor = directory.own(run_id, is_new=False)
        except runs.Problem as problem:
            sys.stderr.write("cluster-train: this machine is not locked for the run: %s\n" % problem)

    def leave(self) -> None:
        """Let go, if that was not done yet; the last one that does so removes the lock."""
        if self.descriptor is None:
            return
        os.close(self.descriptor)  # a dead lock is removed by the next one that looks, should the rest fail
        self.descriptor = None
        try:
            with Directory(is_to_be_made=False) as directory:
                directory.read(self.run_id + ".json")
        except runs.Problem:
            pass


def main() -> int:
    """Carry out one command; 1 where it failed, with {"error": ...} on stdout and the same for people on stderr."""
    try:
        if sys.argv[1:] == ["list"]:
            with Directory() as directory:
                say({"locks": directory.others("")})
        elif sys.argv[1:] == ["hold"]:
            Hold().go()
        else:
            sys.stderr.write("locks.py: give one of hold, list\n")
            return 2
    except runs.Problem as problem:
        sys.stderr.write("%s\n" % problem)
        say({"error": str(problem)})
        return 1
    except BrokenPipeError:
        pass  # whoever asked has gone
    except caller.Gone as gone:
        sys.stderr.write("%s\n" % gone)
        return caller.EXIT_CODE
    return 0


def say(document: dict) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class Hold:
    """A run's lock on this machine, from asking for it to letting go."""

    def __init__(self) -> None:
        self.joined, self.caller = None, caller.Caller()
        while b"\n" not in self.caller.heard:
            if self.caller.hears(caller.LONGEST_WAIT_S):
                raise runs.Problem("nobody said for which run")
        line, _, self.caller.heard = self.caller.heard.partition(b"\n")
        self.owner = json.loads(line.decode("ascii"))
        self.caller.expect(self.owner.pop("silence_s", 0.0))
        self.run_dir = runs.run_directory(self.owner["root"], self.owner["run_id"])

    def go(self) -> None:
        """Take it as soon as nobody is in the way, then keep it as long as it is wanted."""
        say(dict(look(self.owner["root"]), machine=processes.machine()))
        try:
            self.wait()
            while not self.hears(caller.LONGEST_WAIT_S):
                pass
            if b"keep\n" in self.caller.heard:
                self.linger()
        finally:
            if self.joined:
                self.joined.leave()

    def wait(self) -> None:
        """Ask until nobody is in the way; whoever gives up closes stdin."""
        told, has_gone = None, False
        while not has_gone:
            busy, beside = self.ask()
            if not busy:
                return say({"held": True, "beside": beside})
            if busy != told:
                say({"busy": busy})
                told = busy
            has_gone = self.hears(POLL_S)
        return None

    def ask(self) -> tuple:
        """Those in the way, and those that are here too; with nobody in the way the lock is ours."""
        with Directory() as directory:
            others = directory.others(self.owner["run_id"])
            if self.joined is None:
                living = directory.read(self.owner["run_id"] + ".json")
                self.joined = Joined(self.owner["run_id"], directory)
                if living and living["state"] == "held":  # the run has this machine already
                    return [], others
                self.write("waiting")
            mine = (self.owner["asked_unix_s"], self.owner["run_id"])
            earlier = [lock for lock in others if lock["state"] != "waiting" or (lock["asked_unix_s"], lock["run_id"]) < mine]
            busy = [] if self.owner.get("share") else earlier
            if not busy:
                self.write("held")
        return busy, others

    def write(self, state: str) -> None:
        """Say in the file what it is for; those who read it have the directory's lock, as we do."""
        self.owner.setdefault("asked_unix_s", time.time())
        text = json.dumps(dict(self.owner, state=state, since_unix_s=time.time()), sort_keys=True).encode("ascii")
        os.pwrite(self.joined.descriptor, text, 0)
        os.ftruncate(self.joined.descriptor, len(text))

    def hears(self, wait_s: float) -> bool:
        """Do what is said within a time; whether stdin has ended."""
        has_gone = self.caller.hears(wait_s)
        if b"cancel\n" in self.caller.heard:
            self.caller.heard = b""
            say({"ended": cancel()})
        return has_gone

    def linger(self) -> None:
        """Stay until the ranks here have joined: each does so before it writes its record."""
        deadline = time.monotonic() + KEEP_LIMIT_S
        while time.monotonic() < deadline and not runs.Run(self.run_dir, {}).ranks_here():
            time.sleep(POLL_S)


def look(root: str) -> dict:
    """Our own runs that have living processes here, and the states of all runs that were started from this root's machine."""
    held = [lock["run_id"] for lock in holders()]
    found = runs.find_all(root, LOOKED_AT)
    tagged = processes.by_variable(records.RUN_VARIABLE) if found else {}
    living = []
    for run in found:
        those = run.living(tagged.get(run.status["run_id"], []))
        if those:
            named = [dict(who, command=processes.command_line(who["pid"])) for who in those]
            is_watched = bool(run.watchers()) or run.status["run_id"] in held
            living.append({"run_id": run.status["run_id"], "processes": named, "is_watched": is_watched})
    return {"living": living, "states": {run.status["run_id"]: run.status["state"] for run in found if run.status["state"]}}


def holders() -> list:
    """The living locks, first come first; makes no directory where there is none."""
    if not os.path.isdir(path()):
        return []
    with Directory(is_to_be_made=False) as directory:
        return directory.others("")


def beginning(root: str) -> list:
    """Our own runs that wait for this machine, or are being provisioned: as statuses, the newest first."""
    try:
        own = [lock for lock in holders() if lock["is_own"] and lock.get("root") == root]
    except runs.Problem:
        return []
    found = []
    for lock in own:
        if not os.path.isdir(runs.run_directory(root, lock["run_id"])):
            state = "waiting" if lock["state"] == "waiting" else "provisioning"
            label = {"cluster": lock.get("cluster"), "script": lock.get("script"), "ranks": {}}
            times = {"started_unix_s": lock["asked_unix_s"], "ended_unix_s": None}
            found.append(dict(times, run_id=lock["run_id"], state=state, label=label, ranks=[]))
    return found[::-1]


def cancel() -> list:
    """End what else was started over the connection that started us: its commands are the children of one process.

    They get SIGINT first: an installer takes away what is half made. Returns the command lines.
    """
    mine = {who["pid"] for who in processes.descendants(os.getsid(0))} | {os.getsid(0), os.getpid()}
    connection = processes.parent(os.getsid(0))

    def find():
        return [who for who in processes.descendants(connection) if who["pid"] not in mine] if connection > 1 else []

    found = find()
    commands = [processes.command_line(who["pid"]) for who in found]
    processes.end(find, found, 5.0, signal.SIGINT)
    return commands


if __name__ == "__main__":
    sys.exit(main())
