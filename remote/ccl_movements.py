"""The collectives of a `ccl` group that only move tensors. Needs torch >= 2.9.

What oneCCL lacks is made of what it has: gather, scatter and uneven exchanges are messages between pairs.
"""

import ccl_library
import ccl_tensors
import torch
import torch.distributed as dist
from ccl_member import Member

# The options are told apart by nothing but their fields; these are what a call without any gets.
BROADCAST, GATHER, SCATTER = dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions()


class Movements(Member):
    """Broadcasts, gathers, scatters and exchanges."""

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
        self._require_lists("gather", outputs, inputs)

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
        self._require_lists("scatter", inputs, outputs)

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

    def _require_lists(self, operation, lists, tensors):
        """At the root a list for each of `tensors`, with one of the same type for each rank; elsewhere none."""
        fit = len(lists) in (0, len(tensors)) and all(len(parts) == self.size() for parts in lists)
        ccl_tensors.require(fit, operation, "wrong lists%s", "")
        for parts in lists:
            ccl_tensors.require_types(operation, parts + tensors)

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
