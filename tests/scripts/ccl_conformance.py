"""One rank of the conformance test: every case of ccl_cases.py, by ccl and by gloo, compared with what it should be.

Usage: ccl_conformance.py DIRECTORY | DTYPE..., under mpirun, with tests/ccl_cases.py in the path, and remote/ unless bootstrap.py
runs it. Writes DIRECTORY/<rank>.json, or prints, for these types alone, one JSON line:
{"operation dtype": {"ccl": verdict, "gloo": verdict, "same": "equal" | "close" | "differs" | null where gloo lacks it}},
where a verdict is "equal", "close", "refused: ..." or "wrong: ...".
"""

import importlib
import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import ccl_cases
import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
ROOT = SIZE - 1
SHAPE = (6, 5)
TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}
CODE = {name: number for number, name in enumerate(ccl_cases.DTYPES)}


def values(dtype, rank, shape=SHAPE, salt=0):
    """What a rank begins with; every rank can tell what every other has."""
    generator = torch.Generator().manual_seed(1000 * CODE[dtype] + 10 * salt + rank)
    kind = getattr(torch, dtype)
    if dtype in ccl_cases.FLOATS + ccl_cases.COMPLEX:
        parts = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        return (torch.view_as_complex(parts) if dtype in ccl_cases.COMPLEX else parts[..., 0].contiguous()).to(kind)
    span = {"bool": (0, 2), "int8": (-128, 128), "uint8": (0, 256)}.get(dtype, (0, 1000))
    return torch.randint(*span, shape, generator=generator).to(kind)


def wide(tensor):
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


FOLDS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(tensors, kind, factor=None):
    """The reduction of the ranks' tensors, computed here in wide types."""
    total = wide(tensors[0]) * (1 if factor is None else factor)
    for tensor in tensors[1:]:
        total = FOLDS[kind](total, wide(tensor) * (1 if factor is None else factor))
    if kind == "AVG":
        total = (
            total / SIZE if tensors[0].is_floating_point() or tensors[0].is_complex() else total.div(SIZE, rounding_mode="trunc")
        )
    return total.ne(0) if tensors[0].dtype == torch.bool else total.to(tensors[0].dtype)


def operator(kind):
    return getattr(dist.ReduceOp, kind)


def all_reduce(dtype, group, kind="SUM", shape=SHAPE, strided=False):
    given = [values(dtype, rank, shape) for rank in range(SIZE)]
    mine = given[RANK].clone()
    if strided:
        mine = torch.stack([mine, mine])[:, ::2, 1:].transpose(0, 2)
        given = [torch.stack([one, one])[:, ::2, 1:].transpose(0, 2) for one in given]
        assert not mine.is_contiguous()
    dist.all_reduce(mine, operator(kind), group=group)
    return [mine], [reduced(given, kind)]


def reduce(dtype, group, kind):
    given = [values(dtype, rank) for rank in range(SIZE)]
    mine = given[RANK].clone()
    dist.reduce(mine, ROOT, operator(kind), group=group)
    return ([mine], [reduced(given, kind)]) if RANK == ROOT else ([], [])


def scattered(dtype, uneven=False):
    """[rank][part]"""
    return [[values(dtype, r, (p + 1 if uneven else 3, 5), salt=p + 1) for p in range(SIZE)] for r in range(SIZE)]


def reduce_scatter(dtype, group, kind="SUM", uneven=False):
    given = scattered(dtype, uneven)
    output = torch.empty_like(given[RANK][RANK])
    dist.reduce_scatter(output, [one.clone() for one in given[RANK]], operator(kind), group=group)
    return [output], [reduced([given[rank][RANK] for rank in range(SIZE)], kind)]


def reduce_scatter_tensor(dtype, group):
    given = scattered(dtype)
    output = torch.empty_like(given[RANK][RANK])
    dist.reduce_scatter_tensor(output, torch.cat(given[RANK]), group=group)
    return [output], [reduced([given[rank][RANK] for rank in range(SIZE)], "SUM")]


def all_reduce_coalesced(dtype, group):
    given = scattered(dtype, uneven=True)
    mine = [one.clone() for one in given[RANK]]
    dist.all_reduce_coalesced(mine, group=group)
    return mine, [reduced([given[rank][part] for rank in range(SIZE)], "SUM") for part in range(SIZE)]


def all_reduce_premultiplied(dtype, group):
    given = [values(dtype, rank) for rank in range(SIZE)]
    mine = given[RANK].clone()
    dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0), group=group)
    return [mine], [reduced(given, "SUM", 2)]


def broadcast(dtype, group, shape=SHAPE, strided=False):
    given = [values(dtype, rank, shape) for rank in (RANK, ROOT)]
    if strided:
        given = [one.t() for one in given]
    dist.broadcast(given[0], ROOT, group=group)
    return given[:1], given[1:]


def all_gather(dtype, group, uneven=False, strided=False):
    given = [values(dtype, rank, (rank + 1, 5) if uneven else SHAPE) for rank in range(SIZE)]
    if strided:
        given = [one.t()[1:] for one in given]
    outputs = [torch.empty_like(one) for one in given]
    dist.all_gather(outputs, given[RANK], group=group)
    return outputs, given


def all_gather_into_tensor(dtype, group):
    given = [values(dtype, rank) for rank in range(SIZE)]
    output = torch.empty((SIZE * SHAPE[0], SHAPE[1]), dtype=given[0].dtype)
    dist.all_gather_into_tensor(output, given[RANK], group=group)
    return [output], [torch.cat(given)]


def all_gather_in_place(dtype, group):
    given = [values(dtype, rank) for rank in range(SIZE)]
    output = torch.empty((SIZE, *SHAPE), dtype=given[0].dtype)
    output[RANK] = given[RANK]
    dist.all_gather_into_tensor(output, output[RANK], group=group)
    return [output], [torch.stack(given)]


def all_gather_coalesced(dtype, group):
    given = [[values(dtype, rank, (salt + 1, 5), salt) for salt in range(3)] for rank in range(SIZE)]
    outputs = [[torch.empty_like(one) for one in of_rank] for of_rank in given]
    dist.all_gather_coalesced(outputs, given[RANK], group=group)
    return [one for of_rank in outputs for one in of_rank], [one for of_rank in given for one in of_rank]


def gather(dtype, group):
    given = [values(dtype, rank) for rank in range(SIZE)]
    outputs = [torch.empty_like(one) for one in given] if RANK == ROOT else None
    dist.gather(given[RANK], outputs, ROOT, group=group)
    return (outputs, given) if RANK == ROOT else ([], [])


def scatter(dtype, group):
    given = [values(dtype, rank) for rank in range(SIZE)]
    output = torch.empty_like(given[RANK])
    dist.scatter(output, given if RANK == ROOT else None, ROOT, group=group)
    return [output], [given[RANK]]


def all_to_all(dtype, group):
    given = scattered(dtype, uneven=True)
    outputs = [torch.empty_like(given[rank][RANK]) for rank in range(SIZE)]
    dist.all_to_all(outputs, given[RANK], group=group)
    return outputs, [given[rank][RANK] for rank in range(SIZE)]


def all_to_all_single(dtype, group, uneven=False):
    given = scattered(dtype, uneven)
    expected = torch.cat([given[rank][RANK] for rank in range(SIZE)])
    output = torch.empty_like(expected)
    sizes = ([RANK + 1] * SIZE, [rank + 1 for rank in range(SIZE)]) if uneven else (None, None)
    dist.all_to_all_single(output, torch.cat(given[RANK]), *sizes, group=group)
    return [output], [expected]


def send_and_receive(dtype, group):
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = [torch.empty_like(values(dtype, before)) for _ in range(2)]
    works = [dist.irecv(got[tag], before, group=group, tag=tag) for tag in (0, 1)]
    works += [dist.isend(values(dtype, RANK, salt=tag), after, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return got, [values(dtype, before, salt=tag) for tag in (0, 1)]


def receive_from_any(dtype, group):
    if RANK != ROOT:
        dist.send(values(dtype, RANK), ROOT, group=group)
        return [], []
    got = {}
    for _ in range(SIZE - 1):
        tensor = torch.empty_like(values(dtype, 0))
        got[dist.recv(tensor, group=group)] = tensor
    return [got[rank] for rank in sorted(got)], [values(dtype, rank) for rank in range(SIZE - 1)]


def run(operation, dtype, group):
    name, _, last = operation.rpartition("_")
    if last in FOLDS:
        return {"all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter}[name](dtype, group, last)
    options = {"scalar": {"shape": ()}, "empty": {"shape": (0, 5)}, "strided": {"strided": True}, "uneven": {"uneven": True}}
    options["large"] = {"shape": (131, 1009)}  # of every type more than the 64 KB up to which oneCCL has another algorithm
    names = {"all_to_all_uneven": all_to_all_single}
    if operation not in globals() and last in options:
        return names.get(operation, globals().get(name))(dtype, group, **options[last])
    return globals()[operation](dtype, group)


def comparison(got, expected, dtype):
    """ "equal", "close" or "differs"."""
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(got, expected, strict=True)):
        return "differs"
    pairs = [(wide(a), wide(b)) for a, b in zip(got, expected, strict=True)]
    if dtype == "bool":
        pairs = [(a.ne(0), b.ne(0)) for a, b in pairs]  # gloo adds bytes: True and True make 2
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal"
    limit = TOLERANCE.get(dtype, 0)
    return "close" if limit and all(torch.allclose(a, b, rtol=limit, atol=limit) for a, b in pairs) else "differs"


def judge(operation, dtype, group):
    try:
        got, expected = run(operation, dtype, group)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        kind = "refused" if isinstance(error, NotImplementedError) else "failed"
        return None, f"{kind}: {str(error).strip().splitlines()[0]}"
    verdict = comparison(got, expected, dtype)
    return got, verdict if verdict != "differs" else f"wrong: {got} instead of {expected}"


def main():
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(SIZE))
    if importlib.util.find_spec("ccl_group"):
        importlib.import_module("ccl_group").register()
    dist.init_process_group("ccl", timeout=timedelta(seconds=120))
    gloo = dist.new_group(backend="gloo")
    report = {}
    chosen = [name for name in sys.argv[1:] if name in ccl_cases.DTYPES]
    for dtype in chosen or ccl_cases.dtypes(SIZE):
        for operation in ccl_cases.OPERATIONS:
            ours, verdict = judge(operation, dtype, None)
            theirs, other = judge(operation, dtype, gloo)
            same = comparison(ours, theirs, dtype) if ours is not None and theirs is not None else None
            report[f"{operation} {dtype}"] = {"ccl": verdict, "gloo": other, "same": same}
    if not chosen:
        Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(report))
    else:
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
