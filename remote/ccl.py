"""The torch.distributed backend `ccl` for tensors in host memory: collectives by oneCCL, for torch >= 2.9, Python >= 3.10.

    import ccl; ccl.register(); torch.distributed.init_process_group("ccl")

The ranks must have been started by the mpirun of Intel MPI or MPICH. What oneCCL lacks is made of what it has: averages
(a sum, then divided), bit operations (gathered, then combined here), gather, scatter and uneven exchanges (messages between
pairs). Point-to-point messages with tags, and from any source, go through a gloo group of the same ranks; that group's
connections also tell at once when a rank dies.
"""

import atexit
import functools
import json
import sys
import threading
import time

import ccl_line
import oneccl
import torch
import torch.distributed as dist
from ccl_line import LINE

NAME = "ccl"
FAREWELL_LOOK_S = 0.1
DRAIN_S = 5.0
SENTINEL_TAG = 0x7CC1  # no message with this tag is ever sent

KIND = dist.ReduceOp.RedOpType
BITWISE = {KIND.BAND: torch.bitwise_and, KIND.BOR: torch.bitwise_or, KIND.BXOR: torch.bitwise_xor}
ARITHMETIC = {
    KIND.SUM: oneccl.SUM,
    KIND.AVG: oneccl.SUM,
    KIND.PREMUL_SUM: oneccl.SUM,
    KIND.PRODUCT: oneccl.PROD,
    KIND.MIN: oneccl.MIN,
    KIND.MAX: oneccl.MAX,
}
LOGICAL = {KIND.SUM: oneccl.MAX, KIND.PRODUCT: oneccl.MIN, KIND.MIN: oneccl.MIN, KIND.MAX: oneccl.MAX}  # of bool
CODES = {
    torch.int8: oneccl.INT8,
    torch.uint8: oneccl.UINT8,
    torch.int32: oneccl.INT32,
    torch.uint32: oneccl.UINT32,
    torch.int64: oneccl.INT64,
    torch.uint64: oneccl.UINT64,
    torch.float16: oneccl.FLOAT16,
    torch.float32: oneccl.FLOAT32,
    torch.float64: oneccl.FLOAT64,
    torch.bfloat16: oneccl.BFLOAT16,
}
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32}  # oneCCL has no type of 16 bits; wraps around as it should

# The options are told apart by nothing but their fields; these are what a call without any gets.
ALL_REDUCE, REDUCE, REDUCE_SCATTER = dist.AllreduceOptions(), dist.ReduceOptions(), dist.ReduceScatterOptions()
BROADCAST, GATHER, SCATTER, BARRIER = dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions(), dist.BarrierOptions()


def register():
    """Make torch.distributed know the backend; raises OneCCLError where oneCCL cannot be loaded."""
    oneccl.load()
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
        self._store = store
        self._told_store = store.clone() if hasattr(store, "clone") else store  # while one client waits, it is not shared
        self._issued = 0  # the number of the last operation that was issued
        self._last_name = "nothing"
        self._seen = self._told = None
        self._has_left = False
        self._lost = []  # what is known of ranks whose connection broke
        self._is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._communicator = None
        self._messages = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, len(members), timeout=timeout)
        LINE.watch_over(self)
        _session.add(self)
        self._issue("connect", self._connect, []).wait()
        if len(members) > 1:
            threading.Thread(target=self._stand_guard, name="ccl-guard", daemon=True).start()

    def _connect(self):
        if self.size() == 1:
            self._communicator = Alone()
            return
        _session.start_mpi()
        started = oneccl.mpi_world_size()
        if started < self.size():
            raise oneccl.OneCCLError(
                "mpirun started %d ranks, the group has %d: start them with Intel MPI's or MPICH's mpirun"
                % (started, self.size())
            )
        if self.rank() == 0:
            self._store.set("unique_id", oneccl.unique_id())
        self._communicator = oneccl.Communicator(self.size(), self._store.get("unique_id"), self.rank())

    # What torch asks of a group.

    def getBackendName(self):
        return NAME

    def name(self):
        return NAME

    def _get_backend_name(self):
        return NAME

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
            self._told_store.set("progress/%d" % self.rank(), json.dumps(now))
            self._told = now
        self._seen = now

    def missing_at(self, sequence):
        """A phrase for each member that has not issued the operation with this number."""
        return [self._who(rank, told) for rank, told in self._progress() if told is None or told[0] < sequence] + self._lost

    def gone_before(self, sequence):
        """A phrase for each member that never will."""
        left = [(rank, told) for rank, told in self._progress() if told and told[2] and told[0] < sequence]
        return [
            "rank %d has left after %s (number %d)" % (self._members[rank], told[1], told[0]) for rank, told in left
        ] + self._lost

    def _progress(self):
        for rank in range(self.size()):
            key = "progress/%d" % rank
            if rank != self.rank():
                yield rank, json.loads(self._told_store.get(key)) if self._told_store.check([key]) else None

    def _who(self, rank, told):
        last = "it has told nothing" if told is None else "its last was %s, number %d" % (told[1], told[0])
        return "rank %d did not arrive (%s)" % (self._members[rank], last)

    def _stand_guard(self):
        """Wait for a message that is never sent: the wait ends when a member's connection does."""
        try:
            self._messages.recv_anysource([torch.zeros(1)], SENTINEL_TAG).wait()
        except RuntimeError as error:
            if not self._has_left and "imed out" not in str(error):
                self._lost.append("the connection to a rank of the group broke (%s)" % str(error).strip().splitlines()[0])

    # How an operation is issued.

    def _issue(self, name, run, tensors, options=None, detail="", is_local=False):
        if not is_local:
            self._issued += 1
            self._last_name = name
        limit_s = options.timeout.total_seconds() if options is not None else 0.0
        if self._is_checked and not is_local:
            run = functools.partial(self._check_then, run, self._issued, "%s %s" % (name, detail or _shapes(tensors)))
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
        tensors, (kind, factor) = _dense_or_sparse(tensors), _reduction(opts)
        for tensor in tensors:
            _refuse_reduction("all_reduce", tensor, kind)

        def run():
            for tensor in tensors:
                self._all_reduce(tensor, kind, factor)

        return self._issue("all_reduce", run, tensors, opts, "%s %s" % (kind.name, _shapes(tensors)))

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensor, kind, factor):
        if tensor.layout != torch.strided:
            tensor.copy_(self._sum_sparse(tensor.coalesce()))
        elif kind in BITWISE:
            every = self._gather_all(_packed(tensor))
            tensor.copy_(functools.reduce(BITWISE[kind], every.unbind()))
        else:
            form = _form(tensor, kind, factor)
            self._all_reduce_form(form, _operation(tensor, kind))
            _take(tensor, form, kind, self.size())

    def _all_reduce_form(self, form, operation):
        if form.numel():
            address = form.data_ptr()
            self._communicator.all_reduce(address, address, form.numel(), CODES[form.dtype], form.element_size(), operation)

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
        tensors, root, (kind, factor) = _dense(tensors), opts.rootRank, _reduction(opts)
        for tensor in tensors:
            _refuse_reduction("reduce", tensor, kind)

        def run():
            for tensor in tensors:
                self._reduce(tensor, kind, factor, root)

        return self._issue("reduce", run, tensors, opts, "%s to %d %s" % (kind.name, root, _shapes(tensors)))

    def _reduce(self, tensor, kind, factor, root):
        """Leaves the tensors of the other ranks as they are."""
        is_root = self.rank() == root
        if kind in BITWISE:
            self._all_reduce(tensor if is_root else tensor.clone(), kind, factor)
            return
        form = _form(tensor, kind, factor)
        if form.numel():
            receive = form if is_root else torch.empty_like(form)
            sizes = form.numel(), CODES[form.dtype], form.element_size()
            self._communicator.reduce(form.data_ptr(), receive.data_ptr(), *sizes, _operation(tensor, kind), root)
        if is_root:
            _take(tensor, form, kind, self.size())

    def reduce_scatter(self, output_tensors, input_tensors, opts=REDUCE_SCATTER):
        outputs, inputs, (kind, factor) = _dense(output_tensors), [_dense(one) for one in input_tensors], _reduction(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            _refuse_reduction("reduce_scatter", output, kind)
            _require(len(parts) == self.size(), "reduce_scatter", "the list has %d tensors", len(parts))
            _require(
                parts[self.rank()].shape == output.shape, "reduce_scatter", "the output has the shape %s", tuple(output.shape)
            )
            _require_types("reduce_scatter", [output] + parts)

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

        return self._issue("reduce_scatter", run, outputs, opts, "%s %s" % (kind.name, [_shapes(one) for one in inputs]))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=REDUCE_SCATTER):
        outputs, inputs, (kind, factor) = _dense(outputs), _dense(inputs), _reduction(opts)
        for output, given in zip(outputs, inputs, strict=True):
            _refuse_reduction("reduce_scatter_tensor", output, kind)
            _require_types("reduce_scatter_tensor", [output, given])
            _require(
                given.numel() == output.numel() * self.size(), "reduce_scatter_tensor", "the input has %d elements", given.numel()
            )

        def run():
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, kind, factor)

        return self._issue("reduce_scatter_tensor", run, outputs, opts, "%s %s" % (kind.name, _shapes(inputs)))

    def reduce_scatter_single(self, output, given, opts=REDUCE_SCATTER):
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output, given, kind, factor):
        if not output.numel():
            return
        if kind in BITWISE:
            received = self._exchange_all(_packed(given).reshape((self.size(),) + output.shape))
            output.copy_(functools.reduce(BITWISE[kind], received.unbind()))
            return
        form = _form(given, kind, factor)
        count = form.numel() // self.size()
        result = torch.empty(count, dtype=form.dtype)
        operation = _operation(output, kind)
        self._communicator.reduce_scatter(form.data_ptr(), result.data_ptr(), count, CODES[form.dtype], operation)
        _take(output, result.reshape(output.shape + ((2,) if output.is_complex() else ())), kind, self.size())

    # Movements.

    def broadcast(self, tensors, opts=BROADCAST):
        tensors, root = _dense(tensors), opts.rootRank

        def run():
            for tensor in tensors:
                self._broadcast(tensor, root)

        return self._issue("broadcast", run, tensors, opts, "from %d %s" % (root, _shapes(tensors)))

    def _broadcast(self, tensor, root):
        packed = _packed(tensor)
        address, count, code, width = _span(packed)
        if count:
            self._communicator.broadcast(address, count, code, width, root)
        if packed is not tensor and self.rank() != root:
            tensor.copy_(packed)

    def allgather(self, output_tensors, input_tensors, opts=None):
        outputs, inputs = [_dense(one) for one in output_tensors], _dense(input_tensors)
        for parts, given in zip(outputs, inputs, strict=True):
            _require(len(parts) == self.size(), "all_gather", "the list has %d tensors", len(parts))
            _require(parts[self.rank()].numel() == given.numel(), "all_gather", "the input has %d elements", given.numel())
            _require_types("all_gather", parts + [given])

        def run():
            for parts, given in zip(outputs, inputs, strict=True):
                self._all_gather(parts, given)

        return self._issue("all_gather", run, [part for parts in outputs for part in parts], opts, _shapes(inputs))

    def _all_gather(self, parts, given):
        if len({part.numel() for part in parts}) == 1:
            for part, got in zip(parts, self._gather_all(_packed(given)).unbind(), strict=True):
                part.copy_(got.reshape(part.shape))
            return
        parts[self.rank()].copy_(given.reshape(parts[self.rank()].shape))
        for rank, part in enumerate(parts):
            self._broadcast(part, rank)

    def _gather_all(self, packed, into=None):
        """A tensor with one more dimension: what each rank has."""
        result = torch.empty((self.size(),) + packed.shape, dtype=packed.dtype) if into is None else into
        address, count, code, _ = _span(packed)
        if count:
            self._communicator.all_gather(address, result.data_ptr(), count, code)
        return result

    def allgather_coalesced(self, output_lists, input_list, opts=None):
        """`output_lists[rank][i]` becomes the rank's `input_list[i]`."""
        return self.allgather([[of_rank[i] for of_rank in output_lists] for i in range(len(input_list))], input_list, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        outputs, inputs = _dense(outputs), _dense(inputs)
        for output, given in zip(outputs, inputs, strict=True):
            _require_types("all_gather_into_tensor", [output, given])
            _require(
                output.numel() == given.numel() * self.size(),
                "all_gather_into_tensor",
                "the output has %d elements",
                output.numel(),
            )

        def run():
            for output, given in zip(outputs, inputs, strict=True):
                shares = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()  # often a part of it
                into = output if output.is_contiguous() else None
                got = self._gather_all(_packed(given).clone() if shares else _packed(given), into)
                if into is None:
                    output.copy_(got.reshape(output.shape))

        return self._issue("all_gather_into_tensor", run, outputs, opts, _shapes(inputs))

    def all_gather_single(self, output, given, opts=None):
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors, input_tensors, opts=GATHER):
        inputs, root = _dense(input_tensors), opts.rootRank
        outputs = [_dense(one) for one in output_tensors] if self.rank() == root else []
        _require(
            len(outputs) in (0, len(inputs)) and all(len(one) == self.size() for one in outputs), "gather", "wrong lists%s", ""
        )
        for parts in outputs:
            _require_types("gather", parts + inputs)

        def run():
            for index, given in enumerate(inputs):
                self._gather(outputs[index] if outputs else None, _packed(given), root)

        return self._issue(
            "gather", run, [part for parts in outputs for part in parts], opts, "to %d %s" % (root, _shapes(inputs))
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
        outputs, root = _dense(output_tensors), opts.rootRank
        inputs = [_dense(one) for one in input_tensors] if self.rank() == root else []
        _require(
            len(inputs) in (0, len(outputs)) and all(len(one) == self.size() for one in inputs), "scatter", "wrong lists%s", ""
        )
        for parts in inputs:
            _require_types("scatter", parts + outputs)

        def run():
            for index, output in enumerate(outputs):
                if not inputs:
                    self._receive(output, root)
                for rank, part in enumerate(inputs[index] if inputs else ()):
                    if rank == root:
                        output.copy_(part.reshape(output.shape))
                    else:
                        self._send(_packed(part), rank)

        return self._issue("scatter", run, outputs, opts, "from %d %s" % (root, _shapes(outputs)))

    def all_to_all_single(self, output, given, output_split_sizes, input_split_sizes, opts=None):
        output, given = _dense([output])[0], _dense([given])[0]
        _require_types("all_to_all_single", [output, given])
        if not output_split_sizes and not input_split_sizes:
            fits = output.numel() == given.numel() and given.numel() % self.size() == 0
            _require(fits, "all_to_all_single", "the input has the shape %s", tuple(given.shape))

            def run():
                received = self._exchange_all(_packed(given).reshape(self.size(), -1))
                output.copy_(received.reshape(output.shape))
        else:
            receives = _split("all_to_all_single", output, output_split_sizes, self.size())
            sends = _split("all_to_all_single", given, input_split_sizes, self.size())

            def run():
                self._exchange(receives, sends)

        return self._issue("all_to_all_single", run, [output], opts, "of %s" % given.dtype)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors, input_tensors, opts=None):
        outputs, inputs = _dense(output_tensors), _dense(input_tensors)
        _require(len(outputs) == len(inputs) == self.size(), "all_to_all", "the lists have %d tensors", len(inputs))
        _require_types("all_to_all", outputs + inputs)
        return self._issue("all_to_all", lambda: self._exchange(outputs, inputs), outputs, opts, "of %s" % inputs[0].dtype)

    def _exchange_all(self, packed):
        """`packed[rank]` is for the rank; what comes from each, in the same shape."""
        result = torch.empty_like(packed)
        address, count, code, _ = _span(packed)
        if count % self.size():  # counted in eights of bytes it does not divide
            address, count, code = packed.data_ptr(), packed.numel() * packed.element_size(), oneccl.UINT8
        if count:
            self._communicator.all_to_all(address, result.data_ptr(), count // self.size(), code)
        return result

    def _exchange(self, receives, sends):
        """Pair by pair, as messages of any size: in each round every rank meets one other."""
        receives[self.rank()].copy_(sends[self.rank()].reshape(receives[self.rank()].shape))
        for other in meetings(self.size(), self.rank()):
            if self.rank() < other:
                self._send(_packed(sends[other]), other)
                self._receive(receives[other], other)
            else:
                self._receive(receives[other], other)
                self._send(_packed(sends[other]), other)

    def _send(self, packed, rank):
        address, count, code, _ = _span(packed)
        if count:
            self._communicator.send(address, count, code, rank)

    def _receive(self, tensor, rank):
        packed = _packed(tensor)
        address, count, code, _ = _span(packed)
        if count:
            self._communicator.receive(address, count, code, rank)
        if packed is not tensor:
            tensor.copy_(packed)

    def barrier(self, opts=BARRIER):
        one = torch.ones(1)
        return self._issue("barrier", lambda: self._all_reduce_form(one, oneccl.SUM), [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier; every barrier of this backend names the ranks that did not come."""
        options = dist.BarrierOptions()
        options.timeout = timeout or self._timeout
        self.barrier(options).wait()

    # Messages between two ranks.

    def send(self, tensors, destination, tag=0):
        return self._messages.send([_packed(tensor) for tensor in _dense(tensors)], destination, tag)

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
        oneccl.copy(send, receive, count, code)

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


# Tensors.


def _dense_or_sparse(tensors):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError("the backend ccl has tensors in host memory only, this one is on %s" % tensor.device)
    return tensors


def _dense(tensors):
    tensors = _dense_or_sparse(tensors)
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise NotImplementedError("the backend ccl has no sparse tensors in this operation, but in all_reduce")
    return tensors


def _require(fits, name, text, value):
    if not fits:
        raise ValueError("%s: %s, which does not fit the group or the other tensors" % (name, text % (value,)))


def _require_types(name, tensors):
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("%s: the tensors are of different types: %s" % (name, ", ".join(str(one.dtype) for one in tensors)))


def _shapes(tensors):
    return ", ".join("%s %s" % (str(tensor.dtype).partition(".")[2], list(tensor.shape)) for tensor in tensors)


def _packed(tensor):
    """The tensor, or a contiguous copy of it."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _span(packed):
    """(address, count, code, width) of a contiguous tensor that is only moved."""
    size_bytes = packed.numel() * packed.element_size()
    if size_bytes % 8 == 0:
        return packed.data_ptr(), size_bytes // 8, oneccl.INT64, 8
    return packed.data_ptr(), size_bytes, oneccl.UINT8, 1


def _split(name, tensor, sizes, parts):
    sizes = list(sizes) or [tensor.shape[0] // parts] * parts
    _require(len(sizes) == parts and sum(sizes) == tensor.shape[0], name, "the parts of a tensor are %s", sizes)
    return list(tensor.split(sizes))


# Reductions of one tensor.


def _reduction(options):
    """(kind, factor of a PREMUL_SUM)."""
    given = getattr(options, "reduceOp", options)
    return (given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)).__getstate__()


def _refuse_reduction(name, tensor, kind):
    """Raise NotImplementedError where a type does not have this reduction."""
    has = kind in ARITHMETIC and (tensor.dtype in CODES or tensor.dtype in WIDENED)
    if tensor.layout != torch.strided:
        has = kind == KIND.SUM and tensor.layout == torch.sparse_coo
    elif tensor.dtype == torch.bool:
        has = kind in LOGICAL or kind in BITWISE
    elif tensor.is_complex():
        has = tensor.dtype != torch.complex32 and kind in (KIND.SUM, KIND.AVG, KIND.PREMUL_SUM)
    elif kind in BITWISE:
        has = not tensor.is_floating_point()
    elif kind == KIND.AVG:
        has = has and tensor.is_floating_point()  # the sum of integers may not fit their type
    if not has:
        what = "sparse tensors" if tensor.layout != torch.strided else tensor.dtype
        raise NotImplementedError("%s: the backend ccl has no %s of %s" % (name, kind.name, what))


def _operation(tensor, kind):
    return (LOGICAL if tensor.dtype == torch.bool else ARITHMETIC)[kind]


def _form(tensor, kind, factor):
    """The tensor as oneCCL can reduce it: itself, or another view of it, or a copy. Contiguous."""
    packed = _packed(tensor)
    if packed.dtype in WIDENED:
        packed = packed.to(WIDENED[packed.dtype])
    elif packed.dtype == torch.bool:
        packed = packed.view(torch.uint8)
    elif packed.is_complex():
        packed = torch.view_as_real(packed)
    return packed * factor if kind == KIND.PREMUL_SUM else packed


def _take(tensor, form, kind, size):
    """Put the reduced form into the tensor."""
    if kind == KIND.AVG:
        form.div_(size)
    if form.data_ptr() == tensor.data_ptr():
        return
    if tensor.dtype == torch.bool:
        form = form.view(torch.bool)
    elif tensor.is_complex():
        form = torch.view_as_complex(form)
    tensor.copy_(form)


# The end of the process.


class Session:
    """What the groups of this process have in common, and how the process leaves the job."""

    def __init__(self):
        self.groups = []
        self.has_failed = False  # an error ends this process
        self._ours = False  # MPI was initialised here
        self._tried = False

    def add(self, group):
        if not self.groups:
            atexit.register(self.leave)
            show = sys.excepthook
            sys.excepthook = lambda *error: (setattr(self, "has_failed", True), show(*error))[1]
        self.groups.append(group)

    def start_mpi(self):
        if not self._tried:
            self._tried = True
            self._ours = oneccl.start_mpi()

    def leave(self):
        """At the interpreter's end: with everybody through MPI_Finalize, or at once where somebody failed."""
        if not self._tried:
            return
        everybody = not self.has_failed and LINE.broken is None and self._everybody_leaves()
        if self._ours:
            if everybody and oneccl.mpi_world_size() == self.groups[0].size():
                oneccl.stop_mpi()
            oneccl.leave_with_exit_code()

    def _everybody_leaves(self):
        """Say farewell and wait until all have; False where somebody is lost. Waits for as long as somebody still works."""
        try:
            for group in self.groups:
                group.shutdown()
            first = self.groups[0]
            store = dist.PrefixStore("farewell", first._told_store)
            store.set(str(first.rank()), "")
            keys = [str(rank) for rank in range(first.size())]
            while not store.check(keys):
                if first._lost or LINE.broken is not None:
                    return False
                time.sleep(FAREWELL_LOOK_S)
            return True
        except RuntimeError:
            return False  # the store has gone with the job's first rank, or an operation failed


_session = Session()


def fail():
    """Tell that this process ends with an error, where that is no uncaught exception (an exit code, say)."""
    _session.has_failed = True
