"""The torch.distributed backend `ccl` for tensors in host memory: collectives by oneCCL, for torch >= 2.9, Python >= 3.10.

    import ccl_group; ccl_group.register(); torch.distributed.init_process_group("ccl")

The ranks must have been started by the mpirun of Intel MPI or MPICH. Here are the reductions; what oneCCL lacks of them is made
of what it has: averages (a sum, then divided) and bit operations (gathered, then combined here).
"""

import functools
from datetime import timedelta

import ccl_library
import ccl_tensors
import torch
import torch.distributed as dist
from ccl_member import NAME
from ccl_movements import Movements
from ccl_session import SESSION

# The options are told apart by nothing but their fields; these are what a call without any gets.
ALL_REDUCE, REDUCE, REDUCE_SCATTER = dist.AllreduceOptions(), dist.ReduceOptions(), dist.ReduceScatterOptions()
BARRIER = dist.BarrierOptions()


def register():
    """Make torch.distributed know the backend; raises OneCCLError where oneCCL cannot be loaded."""
    ccl_library.load()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options, _backend_options):
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCCL(options.store, options.group_rank, members, options.timeout, options.group_id)


class ProcessGroupCCL(Movements):
    """One group of ranks."""

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

    def barrier(self, opts=BARRIER):
        one = torch.ones(1)
        return self._issue("barrier", lambda: self._all_reduce_form(one, ccl_library.SUM), [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier; every barrier of this backend names the ranks that did not come."""
        options = dist.BarrierOptions()
        # A limit of nothing, which is one for gloo, would mean here that none is given.
        options.timeout = self._timeout if timeout is None else max(timeout, timedelta(milliseconds=1))
        self.barrier(options).wait()


def ends_mpi():
    """Whether this backend began MPI, and will have ended it when the handlers of atexit have run."""
    return SESSION.owns_mpi


def fail(code):
    """Tell that this process ends with this exit code, where no uncaught exception does."""
    SESSION.failure = code
