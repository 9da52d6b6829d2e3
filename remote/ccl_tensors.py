"""Tensors as oneCCL takes them: contiguous, of a type that it knows, and their reductions. Needs torch >= 2.9."""

import ccl_library
import torch
import torch.distributed as dist

KIND = dist.ReduceOp.RedOpType
BITWISE = {KIND.BAND: torch.bitwise_and, KIND.BOR: torch.bitwise_or, KIND.BXOR: torch.bitwise_xor}
ARITHMETIC = {
    KIND.SUM: ccl_library.SUM,
    KIND.AVG: ccl_library.SUM,
    KIND.PREMUL_SUM: ccl_library.SUM,
    KIND.PRODUCT: ccl_library.PROD,
    KIND.MIN: ccl_library.MIN,
    KIND.MAX: ccl_library.MAX,
}
LOGICAL = {
    KIND.SUM: ccl_library.MAX,
    KIND.PRODUCT: ccl_library.MIN,
    KIND.MIN: ccl_library.MIN,
    KIND.MAX: ccl_library.MAX,
}  # of bool
CODES = {
    torch.int8: ccl_library.INT8,
    torch.uint8: ccl_library.UINT8,
    torch.int32: ccl_library.INT32,
    torch.uint32: ccl_library.UINT32,
    torch.int64: ccl_library.INT64,
    torch.uint64: ccl_library.UINT64,
    torch.float16: ccl_library.FLOAT16,
    torch.float32: ccl_library.FLOAT32,
    torch.float64: ccl_library.FLOAT64,
    torch.bfloat16: ccl_library.BFLOAT16,
}
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32}  # oneCCL has no type of 16 bits; wraps around as it should


def dense_or_sparse(tensors):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError("the backend ccl has tensors in host memory only, this one is on %s" % tensor.device)
    return tensors


def dense(tensors):
    tensors = dense_or_sparse(tensors)
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise NotImplementedError("the backend ccl has no sparse tensors in this operation, but in all_reduce")
    return tensors


def require(fits, name, text, value):
    if not fits:
        raise ValueError("%s: %s, which does not fit the group or the other tensors" % (name, text % (value,)))


def require_types(name, tensors):
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("%s: the tensors are of different types: %s" % (name, ", ".join(str(one.dtype) for one in tensors)))


def shapes(tensors):
    return ", ".join("%s %s" % (str(tensor.dtype).partition(".")[2], list(tensor.shape)) for tensor in tensors)


def packed(tensor):
    """The tensor, or a contiguous copy of it."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def span(packed):
    """(address, count, code, width) of a contiguous tensor that is only moved."""
    size_bytes = packed.numel() * packed.element_size()
    if size_bytes % 8 == 0:
        return packed.data_ptr(), size_bytes // 8, ccl_library.INT64, 8
    return packed.data_ptr(), size_bytes, ccl_library.UINT8, 1


def split(name, tensor, sizes, parts):
    sizes = list(sizes) or [tensor.shape[0] // parts] * parts
    require(len(sizes) == parts and sum(sizes) == tensor.shape[0], name, "the parts of a tensor are %s", sizes)
    return list(tensor.split(sizes))


def reduction(options):
    """(kind, factor of a PREMUL_SUM)."""
    given = getattr(options, "reduceOp", options)
    return (given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)).__getstate__()


def refuse_reduction(name, tensor, kind):
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


def operation(tensor, kind):
    return (LOGICAL if tensor.dtype == torch.bool else ARITHMETIC)[kind]


def form(tensor, kind, factor):
    """The tensor as oneCCL can reduce it: itself, or another view of it, or a copy. Contiguous."""
    made = packed(tensor)
    if made.dtype in WIDENED:
        made = made.to(WIDENED[made.dtype])
    elif made.dtype == torch.bool:
        made = made.view(torch.uint8)
    elif made.is_complex():
        made = torch.view_as_real(made)
    return made * factor if kind == KIND.PREMUL_SUM else made


def take(tensor, form, kind, size):
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
