"""What the conformance tests of the `ccl` backend try; read by the tests and by the ranks (no torch here)."""

SIZES = (2, 3, 4)  # the machine may have fewer cores: the larger sizes try fewer types
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, "bool")
FEWER_DTYPES = ("int8", "int16", "int64", "bfloat16", "float32", "complex64", "bool")

REDUCTIONS = tuple(
    f"{name}_{kind}" for name in ("all_reduce", "reduce", "reduce_scatter") for kind in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
)
BITWISE = tuple(f"{name}_{kind}" for name in ("all_reduce", "reduce", "reduce_scatter") for kind in ("BAND", "BOR", "BXOR"))
SHAPES = (
    "all_reduce_scalar",
    "all_reduce_empty",
    "all_reduce_strided",
    "all_reduce_large",
    "broadcast_scalar",
    "broadcast_empty",
    "broadcast_strided",
)
FORMS = ("all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_uneven", "all_reduce_premultiplied")
MOVEMENTS = (
    *("broadcast", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "all_gather_in_place", "all_gather_strided"),
    *("all_gather_coalesced", "gather", "scatter", "all_to_all", "all_to_all_single", "all_to_all_uneven"),
    *("send_and_receive", "receive_from_any"),
)
OPERATIONS = (*REDUCTIONS, *BITWISE, *SHAPES, *FORMS, *MOVEMENTS)
SUMS = (
    "SUM",
    "scalar",
    "empty",
    "strided",
    "large",
    "coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_uneven",
    "premultiplied",
)


def is_refused(operation: str, dtype: str) -> bool:
    """Whether no backend could give this a meaning: NotImplementedError is the right answer."""
    kind = operation.rpartition("_")[2]
    if kind in ("BAND", "BOR", "BXOR"):
        return dtype in FLOATS + COMPLEX
    if kind in ("MIN", "MAX", "PRODUCT"):
        return dtype in COMPLEX
    if kind == "AVG":
        return dtype in (*INTEGERS, "bool")  # the sum may not fit the type
    if operation == "all_reduce_premultiplied":
        return dtype == "bool"
    return False


def is_exact(operation: str, dtype: str, size: int) -> bool:
    """Whether the result must be the same to the bit: no rounding, or one addition that everybody rounds alike."""
    if dtype in INTEGERS or dtype == "bool" or operation in MOVEMENTS or operation.startswith("broadcast"):
        return True
    return operation.endswith(("_MIN", "_MAX")) or (size == 2 and operation.endswith(SUMS))


def dtypes(size: int) -> tuple[str, ...]:
    """The types that a world of this size tries."""
    return DTYPES if size == 2 else FEWER_DTYPES


def complaints(found: dict[str, dict[str, str]], size: int) -> list[str]:
    """What is not as it should be in the report of one rank: {"operation dtype": {"ccl": …, "gloo": …, "same": …}}."""
    wrong = []
    for case, verdicts in found.items():
        operation, dtype = case.split()
        right = ["failed", "refused"] if is_refused(operation, dtype) else ["equal"]
        accepted = right if is_exact(operation, dtype, size) else [*right, "close"]
        agrees = verdicts["gloo"] not in ("equal", "close") or is_refused(operation, dtype) or verdicts["same"] in accepted
        if verdicts["ccl"].partition(":")[0] not in accepted or not agrees:
            wrong.append(f"{case}: {verdicts}")
    return wrong
