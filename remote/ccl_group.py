"""The torch.distributed backend `ccl` for tensors in host memory: collectives by oneCCL, for torch >= 2.9, Python >= 3.10.

    import ccl_group; ccl_group.register(); torch.distributed.init_process_group("ccl")

The ranks must have been started by the mpirun of Intel MPI or MPICH. What oneCCL lacks is made of what it has: averages
(a sum, then divided), bit operations (gathered, then combined here), gather, scatter and uneven exchanges (messages between
pairs). Point-to-point messages with tags, and from any source, go through a gloo group of the same ranks; that group's
connections also tell at once when a rank dies.
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

# The options are told apart by nothing but their fields; these are what a call without any gets.
ALL_REDUCE, REDUCE, REDUCE_SCATTER = dist.AllreduceOptions(), dist.ReduceOptions(), dist.ReduceScatterOptions()
BROADCAST, GATHER, SCATTER, BARRIER = dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions(), dist.BarrierOptions()


def register():
    """Make torch.distributed know the backend; raises OneCCLError where oneCCL cannot be loaded."""
    ccl_library.load()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options, _backend_options):
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCCL(options.store, options.group_rank, members, options.timeout, options.group_id)


class ProcessGroupCCL(dist.ProcessGroup):
    """One group of ranks.

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

    # Reductions.

    def allreduce(self, tensors, opts=ALL_REDUCE):
        tensors, (kind, factor) = ccl_tensors.dense_or_sparse(tensors), ccl_tensors.reduction(opts)
        for tensor in tensors:
            ccl_tensors.refuse_reduction("all_reduce", tensor, kind)

        def run():
            for tensor in tensors:
                self._all_reduce(tensor, kind, factor)

        return self._issue("all_reduce", run, tensors, opts, "%s %s" % (kind.name, ccl_tensors.shapes(tensors)))

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensor, kind, factor):
        if tensor.layout != torch.strided:
            tensor.copy_(self._sum_sparse(tensor.coalesce()))
        elif kind in ccl_tensors.BITWISE:
            every = self._gather_all(ccl_tensors.packed(tensor))
            tensor.copy_(functools.reduce(ccl_tensors.BITWISE[kind], every.unbind()))
        else:
            form = ccl_tensors.form(tensor, kind, factor)
            self._all_reduce_form(form, ccl_tensors.operation(tensor, kind))
            ccl_tensors.take(tensor, form, kind, self.size())

    def _all_reduce_form(self, form, operation):
        if form.numel():
            address = form.data_ptr()
            self._communicator.all_reduce(
                address, address, form.numel(), ccl_tensors.CODES[form.dtype], form.element_size(), operation
            )

    def _sum_sparse(self, tensor):
        counts = self._gather_all(torch.tensor([tensor._nnz()])).flatten().tolist()
        parts = [
            (
                tensor.indices() if rank == self.rank() else tensor.indices().new_empty((tensor.sparse_dim(), count)),
                tensor.values() if rank == self.rank() else tensor.values().new_empty((count,) + tensor.values().shape[1:]),
            )
            for rank, count in enumerate(counts)
        ]
        for rank, part in enumerate(parts):
            for half in part:
                self._broadcast(half, rank)
        indices, values = (torch.cat(halves, dim) for halves, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
        return torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce()

    def reduce(self, tensors, opts=REDUCE):
        tensors, root, (kind, factor) = ccl_tensors.dense(tensors), opts.rootRank, ccl_tensors.reduction(opts)
        for tensor in tensors:
            ccl_tensors.refuse_reduction("reduce", tensor, kind)

        def run():
            for tensor in tensors:
                self._reduce(tensor, kind, factor, root)

        return self._issue("reduce", run, tensors, opts, "%s to %d %s" % (kind.name, root, ccl_tensors.shapes(tensors)))

    def _reduce(self, tensor, kind, factor, root):
        """Leaves the tensors of the other ranks as they are."""
        is_root = self.rank() == root
        if kind in ccl_tensors.BITWISE:
            self._all_reduce(tensor if is_root else tensor.clone(), kind, factor)
            return
        form = ccl_tensors.form(tensor, kind, factor)
        if form.numel():
            receive = form if is_root else torch.empty_like(form)
            sizes = form.numel(), ccl_tensors.CODES[form.dtype], form.element_size()
            self._communicator.reduce(form.data_ptr(), receive.data_ptr(), *sizes, ccl_tensors.operation(tensor, kind), root)
        if is_root:
            ccl_tensors.take(tensor, form, kind, self.size())

    def reduce_scatter(self, output_tensors, input_tensors, opts=REDUCE_SCATTER):
        outputs, inputs, (kind, factor) = (
            ccl_tensors.dense(output_tensors),
            [ccl_tensors.dense(one) for one in input_tensors],
            ccl_tensors.reduction(opts),
        )
        for output, parts in zip(outputs, inputs, strict=True):
            ccl_tensors.refuse_reduction("reduce_scatter", output, kind)
            ccl_tensors.require(len(parts) == self.size(), "reduce_scatter", "the list has %d tensors", len(parts))
            ccl_tensors.require(
                parts[self.rank()].shape == output.shape, "reduce_scatter", "the output has the shape %s", tuple(output.shape)
            )
            ccl_tensors.require_types("reduce_scatter", [output] + parts)

        def run():
            for output, parts in zip(outputs, inputs, strict=True):
                if len({part.shape for part in parts}) == 1:
                    self._reduce_scatter(output, torch.stack(parts), kind, factor)
                else:
                    for rank, part in enumerate(parts):
                        reduced = part.clone()
                        self._reduce(reduced, kind, factor, rank)
                        if rank == self.rank():
                            output.copy_(reduced)

        return self._issue(
            "reduce_scatter", run, outputs, opts, "%s %s" % (kind.name, [ccl_tensors.shapes(one) for one in inputs])
        )

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=REDUCE_SCATTER):
        outputs, inputs, (kind, factor) = ccl_tensors.dense(outputs), ccl_tensors.dense(inputs), ccl_tensors.reduction(opts)
        for output, given in zip(outputs, inputs, strict=True):
            ccl_tensors.refuse_reduction("reduce_scatter_tensor", output, kind)
            ccl_tensors.require_types("reduce_scatter_tensor", [output, given])
            ccl_tensors.require(
                given.numel() == output.numel() * self.size(), "reduce_scatter_tensor", "the input has %d elements", given.numel()
            )

        def run():
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, kind, factor)

        return self._issue("reduce_scatter_tensor", run, outputs, opts, "%s %s" % (kind.name, ccl_tensors.shapes(inputs)))

    def reduce_scatter_single(self, output, given, opts=REDUCE_SCATTER):
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output, given, kind, factor):
        if not output.numel():
            return
        if kind in ccl_tensors.BITWISE:
            received = self._exchange_all(ccl_tensors.packed(given).reshape((self.size(),) + output.shape))
            output.copy_(functools.reduce(ccl_tensors.BITWISE[kind], received.unbind()))
            return
        form = ccl_tensors.form(given, kind, factor)
        count = form.numel() // self.size()
        result = torch.empty(count, dtype=form.dtype)
        operation = ccl_tensors.operation(output, kind)
        self._communicator.reduce_scatter(form.data_ptr(), result.data_ptr(), count, ccl_tensors.CODES[form.dtype], operation)
        ccl_tensors.take(output, result.reshape(output.shape + ((2,) if output.is_complex() else ())), kind, self.size())

    # Movements.

    def broadcast(self, tensors, opts=BROADCAST):
        tensors, root = ccl_tensors.dense(tensors), opts.rootRank

        def run():
            for tensor in tensors:
                self._broadcast(tensor, root)

        return self._issue("broadcast", run, tensors, opts, "from %d %s" % (root, ccl_tensors.shapes(tensors)))

    def _broadcast(self, tensor, root):
        packed = ccl_tensors.packed(tensor)
        address, count, code, width = ccl_tensors.span(packed)
        if count:
            self._communicator.broadcast(address, count, code, width, root)
        if packed is not tensor and self.rank() != root:
            tensor.copy_(packed)

    def allgather(self, output_tensors, input_tensors, opts=None):
        outputs, inputs = [ccl_tensors.dense(one) for one in output_tensors], ccl_tensors.dense(input_tensors)
        for parts, given in zip(outputs, inputs, strict=True):
            ccl_tensors.require(len(parts) == self.size(), "all_gather", "the list has %d tensors", len(parts))
            ccl_tensors.require(
                parts[self.rank()].numel() == given.numel(), "all_gather", "the input has %d elements", given.numel()
            )
            ccl_tensors.require_types("all_gather", parts + [given])

        def run():
            for parts, given in zip(outputs, inputs, strict=True):
                self._all_gather(parts, given)

        return self._issue("all_gather", run, [part for parts in outputs for part in parts], opts, ccl_tensors.shapes(inputs))

    def _all_gather(self, parts, given):
        if len({part.numel() for part in parts}) == 1:
            for part, got in zip(parts, self._gather_all(ccl_tensors.packed(given)).unbind(), strict=True):
                part.copy_(got.reshape(part.shape))
            return
        parts[self.rank()].copy_(given.reshape(parts[self.rank()].shape))
        for rank, part in enumerate(parts):
            self._broadcast(part, rank)

    def _gather_all(self, packed, into=None):
        """A tensor with one more dimension: what each rank has."""
        result = torch.empty((self.size(),) + packed.shape, dtype=packed.dtype) if into is None else into
        address, count, code, _ = ccl_tensors.span(packed)
        if count:
            self._communicator.all_gather(address, result.data_ptr(), count, code)
        return result

    def allgather_coalesced(self, output_lists, input_list, opts=None):
        """`output_lists[rank][i]` becomes the rank's `input_list[i]`."""
        return self.allgather([[of_rank[i] for of_rank in output_lists] for i in range(len(input_list))], input_list, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        outputs, inputs = ccl_tensors.dense(outputs), ccl_tensors.dense(inputs)
        for output, given in zip(outputs, inputs, strict=True):
            ccl_tensors.require_types("all_gather_into_tensor", [output, given])
            ccl_tensors.require(
                output.numel() == given.numel() * self.size(),
                "all_gather_into_tensor",
                "the output has %d elements",
                output.numel(),
            )

        def run():
            for output, given in zip(outputs, inputs, strict=True):
                shares = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()  # often a part of it
                into = output if output.is_contiguous() else None
                got = self._gather_all(ccl_tensors.packed(given).clone() if shares else ccl_tensors.packed(given), into)
                if into is None:
                    output.copy_(got.reshape(output.shape))

        return self._issue("all_gather_into_tensor", run, outputs, opts, ccl_tensors.shapes(inputs))

    def all_gather_single(self, output, given, opts=None):
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors, input_tensors, opts=GATHER):
        inputs, root = ccl_tensors.dense(input_tensors), opts.rootRank
        outputs = [ccl_tensors.dense(one) for one in output_tensors] if self.rank() == root else []
        ccl_tensors.require(
            len(outputs) in (0, len(inputs)) and all(len(one) == self.size() for one in outputs), "gather", "wrong lists%s", ""
        )
        for parts in outputs:
            ccl_tensors.require_types("gather", parts + inputs)

        def run():
            for index, given in enumerate(inputs):
                self._gather(outputs[index] if outputs else None, ccl_tensors.packed(given), root)

        return self._issue(
            "gather", run, [part for parts in outputs for part in parts], opts, "to %d %s" % (root, ccl_tensors.shapes(inputs))
        )

    def _gather(self, parts, packed, root):
        if parts is None:
            self._send(packed, root)
            return
        for rank, part in enumerate(parts):
            if rank == root:
                part.copy_(packed.reshape(part.shape))
            else:
                self._receive(part, rank)

    def scatter(self, output_tensors, input_tensors, opts=SCATTER):
        outputs, root = ccl_tensors.dense(output_tensors), opts.rootRank
        inputs = [ccl_tensors.dense(one) for one in input_tensors] if self.rank() == root else []
        ccl_tensors.require(
            len(inputs) in (0, len(outputs)) and all(len(one) == self.size() for one in inputs), "scatter", "wrong lists%s", ""
        )
        for parts in inputs:
            ccl_tensors.require_types("scatter", parts + outputs)

        def run():
            for index, output in enumerate(outputs):
                if not inputs:
                    self._receive(output, root)
                for rank, part in enumerate(inputs[index] if inputs else ()):
                    if rank == root:
                        output.copy_(part.reshape(output.shape))
                    else:
                        self._send(ccl_tensors.packed(part), rank)

        return self._issue("scatter", run, outputs, opts, "from %d %s" % (root, ccl_tensors.shapes(outputs)))

    def all_to_all_single(self, output, given, output_split_sizes, input_split_sizes, opts=None):
        output, given = ccl_tensors.dense([output])[0], ccl_tensors.dense([given])[0]
        ccl_tensors.require_types("all_to_all_single", [output, given])
        if not output_split_sizes and not input_split_sizes:
            fits = output.numel() == given.numel() and given.numel() % self.size() == 0
            ccl_tensors.require(fits, "all_to_all_single", "the input has the shape %s", tuple(given.shape))

            def run():
                received = self._exchange_all(ccl_tensors.packed(given).reshape(self.size(), -1))
                output.copy_(received.reshape(output.shape))
        else:
            receives = ccl_tensors.split("all_to_all_single", output, output_split_sizes, self.size())
            sends = ccl_tensors.split("all_to_all_single", given, input_split_sizes, self.size())

            def run():
                self._exchange(receives, sends)

        return self._issue("all_to_all_single", run, [output], opts, "of %s" % given.dtype)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors, input_tensors, opts=None):
        outputs, inputs = ccl_tensors.dense(output_tensors), ccl_tensors.dense(input_tensors)
        ccl_tensors.require(len(outputs) == len(inputs) == self.size(), "all_to_all", "the lists have %d tensors", len(inputs))
        ccl_tensors.require_types("all_to_all", outputs + inputs)
        return self._issue("all_to_all", lambda: self._exchange(outputs, inputs), outputs, opts, "of %s" % inputs[0].dtype)

    def _exchange_all(self, packed):
        """`packed[rank]` is for the rank; what comes from each, in the same shape."""
        result = torch.empty_like(packed)
        address, count, code, _ = ccl_tensors.span(packed)
        if count % self.size():  # counted in eights of bytes it does not divide
            address, count, code = packed.data_ptr(), packed.numel() * packed.element_size(), ccl_library.UINT8
        if count:
            self._communicator.all_to_all(address, result.data_ptr(), count // self.size(), code)
        return result

    def _exchange(self, receives, sends):
        """Pair by pair, as messages of any size: in each round every rank meets one other."""
        receives[self.rank()].copy_(sends[self.rank()].reshape(receives[self.rank()].shape))
        for other in meetings(self.size(), self.rank()):
            if self.rank() < other:
                self._send(ccl_tensors.packed(sends[other]), other)
                self._receive(receives[other], other)
            else:
                self._receive(receives[other], other)
                self._send(ccl_tensors.packed(sends[other]), other)

    def _send(self, packed, rank):
        address, count, code, _ = ccl_tensors.span(packed)
        if count:
            self._communicator.send(address, count, code, rank)

    def _receive(self, tensor, rank):
        packed = ccl_tensors.packed(tensor)
        address, count, code, _ = ccl_tensors.span(packed)
        if count:
            self._communicator.receive(address, count, code, rank)
        if packed is not tensor:
            tensor.copy_(packed)

    def barrier(self, opts=BARRIER):
        one = torch.ones(1)
        return self._issue("barrier", lambda: self._all_reduce_form(one, ccl_library.SUM), [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier; every barrier of this backend names the ranks that did not come."""
        options = dist.BarrierOptions()
        # A limit of nothing, which is one for gloo, would mean here that none is given.
        options.timeout = self._timeout if timeout is None else max(timeout, timedelta(milliseconds=1))
        self.barrier(options).wait()

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


def meetings(size, rank):
    """The other ranks in the order in which `rank` meets them: in each of the rounds everybody is in one pair at most.

    The circle method of tournaments: in round r those meet whose numbers add up to r, and one meets the last.
    """
    even = size + size % 2
    for turn in range(even - 1):
        other = (turn - rank) % (even - 1)
        if rank == even - 1:
            other = turn * (even // 2) % (even - 1)
        elif other == rank:
            other = even - 1
        if other < size:
            yield other


def ends_mpi():
    """Whether this backend began MPI, and will have ended it when the handlers of atexit have run."""
    return SESSION.owns_mpi


def fail(code):
    """Tell that this process ends with this exit code, where no uncaught exception does."""
    SESSION.failure = code
