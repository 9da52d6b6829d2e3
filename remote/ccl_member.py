"""A process as a member of one `ccl` group: how it joins and leaves, and how its operations are issued. Needs torch >= 2.9.

Point-to-point messages with tags, and from any source, go through a gloo group of the same ranks; that group's connections
also tell at once when a rank dies.
"""

import functools
import json
import threading
from datetime import timedelta

import ccl_library
import ccl_line
import ccl_tensors
import torch
import torch.distributed as dist
from ccl_line import LINE
from ccl_session import SESSION

NAME = "ccl"
SENTINEL_TAG = 0x7CC1  # of a message that is sent when all leave
ALWAYS = timedelta(days=3650)


class Member(dist.ProcessGroup):
    """What a group of ranks is, but for its collectives.

    Args:
        store: where the members meet.
        rank: this process's in the group.
        members: the ranks of the job that the group consists of.
        timeout: timedelta; how long one operation may take.
        label: the group's name, for messages.

    Raises DistBackendError where a member does not come within `timeout`, and OneCCLError.
    """

    def __init__(self, store, rank, members, timeout, label):
        super().__init__(rank, len(members))
        self.label, self.limit_s = label, timeout.total_seconds()
        self._members, self._timeout = members, timeout
        self._store, self._description = store, ""
        self.own_store = store.clone() if hasattr(store, "clone") else store  # while one client waits, it is not shared
        self._issued = 0  # the number of the last operation that was issued
        self._last_name = "nothing"
        self._seen = self._told = None
        self._has_left = False
        self.lost = []  # what is known of ranks whose connection broke
        self._is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._communicator = None
        self._messages = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, len(members), timeout=timeout)
        LINE.watch_over(self)
        SESSION.add(self)
        self._issue("connect", self._connect, []).wait()
        self._guard = threading.Thread(target=self._stand_guard, name="ccl-guard", daemon=True)
        if len(members) > 1 and self is SESSION.groups[0]:
            self._guard.start()

    def _connect(self):
        if self.size() == 1:
            self._communicator = Alone()
            return
        SESSION.start_mpi()
        started = ccl_library.mpi_world_size()
        if started < self.size():
            raise ccl_library.OneCCLError(
                "mpirun started %d ranks, the group has %d: start them with Intel MPI's or MPICH's mpirun"
                % (started, self.size())
            )
        if self.rank() == 0:
            self._store.set("unique_id", ccl_library.unique_id())
        self._communicator = ccl_library.Communicator(self.size(), self._store.get("unique_id"), self.rank())

    # What torch asks of a group, and of its backend, which is the group itself.

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device):
        return self

    @property
    def options(self):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        return options

    def getBackendName(self):
        return NAME

    def name(self):
        return NAME

    def _get_backend_name(self):
        return NAME

    def _set_group_name(self, name):
        self.setGroupName(name)

    def setGroupName(self, name):
        self.label = name

    def getGroupName(self):
        return self.label

    group_name = property(getGroupName)

    def _set_group_desc(self, text):
        self.setGroupDesc(text)

    def setGroupDesc(self, text):
        self._description = text

    def getGroupDesc(self):
        return self._description

    group_desc = property(getGroupDesc)

    def get_group_store(self):
        return self._store

    def set_timeout(self, timeout):
        self._timeout, self.limit_s = timeout, timeout.total_seconds()

    def shutdown(self):
        """Complete what was issued. The communicator stays until the job's end: to destroy one waits for all its members."""
        if LINE.broken is None:
            self._issue("shutdown", lambda: None, [], is_local=True).wait()
        self._has_left = True
        self.tell_progress(is_due=True)

    def abort(self):
        LINE.broken = LINE.broken or dist.DistBackendError("the group %s was aborted" % self.label)
        self._has_left = True

    def _get_sequence_number_for_group(self):
        return self._issued

    def _set_sequence_number_for_group(self):
        pass

    def _has_hooks(self):
        return False

    def _start_coalescing(self, device):
        self._before_coalescing = self._issued

    def _end_coalescing(self, device):
        return self._issue("coalesced", lambda: None, [], is_local=True)  # complete when all before it are

    # Who is where.

    def tell_progress(self, is_due=False):
        """Tell the store what was issued last, once it rests: a rank that makes progress tells nothing."""
        now = [self._issued, self._last_name, self._has_left]
        if (now == self._seen or is_due) and now != self._told:
            self.own_store.set("progress/%d" % self.rank(), json.dumps(now))
            self._told = now
        self._seen = now

    def missing_at(self, sequence):
        """A phrase for each member that has not issued the operation with this number."""
        return [self._who(rank, told) for rank, told in self._progress() if told is None or told[0] < sequence] + self.lost

    def gone_before(self, sequence):
        """A phrase for each member that never will."""
        left = [(rank, told) for rank, told in self._progress() if told and told[2] and told[0] < sequence]
        return [
            "rank %d has left after %s (number %d)" % (self._members[rank], told[1], told[0]) for rank, told in left
        ] + self.lost

    def _progress(self):
        for rank in range(self.size()):
            key = "progress/%d" % rank
            if rank != self.rank():
                yield rank, json.loads(self.own_store.get(key)) if self.own_store.check([key]) else None

    def _who(self, rank, told):
        last = "it has told nothing" if told is None else "its last was %s, number %d" % (told[1], told[0])
        return "rank %d did not arrive (%s)" % (self._members[rank], last)

    def _stand_guard(self):
        """Wait for a message that is sent when all leave; the wait ends before where the connection to a member breaks."""
        try:
            # With a limit of its own: where that of the group is over, gloo closes the connections to all members.
            self._messages.recv_anysource([torch.zeros(1)], SENTINEL_TAG).wait(ALWAYS)
        except RuntimeError as error:
            if not self._has_left:
                self.lost.append("the connection to a rank broke (%s)" % str(error).strip().splitlines()[0])

    def dismiss_guard(self):
        """When all leave. The guard must not be woken later: to a thread, the end of the interpreter is the end of C++ too."""
        if self.size() > 1:
            self._messages.send([torch.zeros(1)], (self.rank() + 1) % self.size(), SENTINEL_TAG).wait()
            self._guard.join(self.limit_s)

    # How an operation is issued.

    def _issue(self, name, run, tensors, options=None, detail="", is_local=False):
        if not is_local:
            self._issued += 1
            self._last_name = name
        limit_s = options.timeout.total_seconds() if options is not None else 0.0
        if self._is_checked and not is_local:
            run = functools.partial(self._check_then, run, self._issued, "%s %s" % (name, detail or ccl_tensors.shapes(tensors)))
        return LINE.issue(ccl_line.Operation(self, name, self._issued, run, tensors, limit_s if limit_s > 0 else self.limit_s))

    def _check_then(self, run, sequence, mine):
        """TORCH_DISTRIBUTED_DEBUG=DETAIL: run only what all ranks agree on."""
        store, keys = self._store, ["check/%d/%d" % (sequence, rank) for rank in range(self.size())]
        store.set(keys[self.rank()], mine)
        said = [store.get(key).decode() for key in keys]
        if sequence > 2:
            store.delete_key("check/%d/%d" % (sequence - 2, self.rank()))
        if len(set(said)) > 1:
            each = "; ".join("rank %d: %s" % (self._members[rank], text) for rank, text in enumerate(said))
            raise dist.DistBackendError("the ranks disagree on operation %d of group %s: %s" % (sequence, self.label, each))
        run()

    # Messages between two ranks.

    def send(self, tensors, destination, tag=0):
        return self._messages.send([ccl_tensors.packed(tensor) for tensor in ccl_tensors.dense(tensors)], destination, tag)

    def recv(self, tensors, source, tag=0):
        return self._messages.recv(tensors, source, tag)

    def recv_anysource(self, tensors, tag=0):
        return self._messages.recv_anysource(tensors, tag)


class Alone:
    """In place of a communicator where a group has one member: each operation leaves it what it has."""

    def all_reduce(self, *_):
        pass

    reduce = broadcast = all_reduce

    def _copy(self, send, receive, count, code, *_):
        ccl_library.copy(send, receive, count, code)

    reduce_scatter = all_gather = all_to_all = _copy
