"""oneCCL's C API for tensors in host memory, by ctypes; needs nothing but the libraries, and is used by ccl_group.py.

The API is that of <oneapi/ccl.h> 2022: libccl.so.2 hands each call on to libccl_legacy_cpu.so, which needs libccl.so.1 (the
build without SYCL) and, for the transport, Intel MPI. All five libraries are loaded here by their paths, so that neither
LD_LIBRARY_PATH nor what else lies on the machine has a say. A call returns when the operation is complete on this rank.

MPI is initialised here and not by oneCCL: oneCCL would finalise it in a destructor at the end of the process, which aborts
where a communicator is left, and waits without a limit for ranks that may have failed.
"""

import ctypes
import glob
import importlib.util
import os
import sys

PACKAGE = "cluster_train_oneccl"  # the wheel that brings the libraries
DIRECTORY_VARIABLE = "CLUSTER_TRAIN_ONECCL"  # a directory of libraries that goes before the package
LIBRARIES = (
    "libfabric.so.1",
    "libmpi.so.12",
    "libccl.so.2",
    "libccl.so.1",
    "libccl_legacy_cpu.so",
)  # in the order of their needs
UNIQUE_ID_BYTES = 4096
MPI_THREAD_MULTIPLE = 3
MPI_COMM_WORLD = 0x44000000  # MPICH's ABI, which is Intel MPI's

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
WIDTHS = {INT8: 1, UINT8: 1, INT32: 4, UINT32: 4, INT64: 8, UINT64: 8, FLOAT16: 2, FLOAT32: 4, FLOAT64: 8, BFLOAT16: 2}  # bytes
SUM, PROD, MAX, MIN = 0, 1, 2, 3  # 4 is the average, which the CPU library refuses
LARGEST_COUNT = 1 << 30  # elements of one call: MPI counts in 32 bits

_loaded = []


class OneCCLError(RuntimeError):
    """oneCCL or its MPI refused a call, or cannot be loaded."""


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator know each other by: made by one of them, told to the others."""

    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


def directory():
    """Where the libraries lie; raises OneCCLError where there are none."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    spec = None if named else importlib.util.find_spec(PACKAGE)
    found = named or (spec and spec.submodule_search_locations and os.path.join(spec.submodule_search_locations[0], "lib"))
    if not found:
        raise OneCCLError("oneCCL is not installed in %s: there is no package %s" % (sys.prefix, PACKAGE))
    missing = [name for name in LIBRARIES if not os.path.isfile(os.path.join(found, name))]
    if missing:
        raise OneCCLError("oneCCL is incomplete: %s lacks %s" % (found, ", ".join(missing)))
    return found


def set_environment(libraries, environ=os.environ):
    """What oneCCL and Intel MPI read from the environment; the values that are there already win."""
    defaults = {
        "CCL_LOG_LEVEL": "error",
        # The thread that waits for an operation, and oneCCL's worker that runs it, ask again and again, and sleep in between,
        # for some 50 us. CCL_YIELD=sched_yield answers sooner where nobody else wants the core; where others do, Linux 6.18
        # was seen to give them none of it for more than a minute, another rank and the process that shows it alive among
        # them. With CCL_WORKER_OFFLOAD=0 the calling thread does the work and never lets go.
        "CCL_YIELD": "sleep",
        "CCL_SPIN_COUNT": "1",
        # Each rank reduces its part of what all send it. oneCCL would leave large tensors to MPI_Iallreduce too, as it does
        # small ones: 100 MB of 2 ranks on one host then take 61 ms and not 31, 4 ranks on 2 cores 121 and not 42.
        "CCL_ALLREDUCE": "direct:0-65536;nreduce:65537-max",
        "CCL_WORKER_AFFINITY": _own_cores(environ),
        "FI_PROVIDER": "tcp",
        "I_MPI_PIN": "0",  # the launch has bound the rank; MPI_Init would bind it anew
    }
    if glob.glob(os.path.join(libraries, "lib*-fi.so")):
        defaults["FI_PROVIDER_PATH"] = libraries
    for name, value in defaults.items():
        environ.setdefault(name, value)


def _own_cores(environ):
    """CCL_WORKER_AFFINITY where the launch names no cores: oneCCL itself would take any, also such as other ranks have.

    It reads a list of the workers of all ranks of the node; this rank's part is all that it looks at here.
    """
    rank, ranks = (int(environ.get(name, default)) for name, default in (("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")))
    cores, workers = sorted(os.sched_getaffinity(0)), int(environ.get("CCL_WORKER_COUNT", "1"))
    own = [str(cores[-1 - (rank * workers + worker) % len(cores)]) for worker in range(workers)]
    return ",".join(own * ranks)


def load():
    """(oneCCL, MPI) as ctypes libraries, loaded once; raises OneCCLError."""
    if not _loaded:
        found = directory()
        set_environment(found)
        try:
            opened = {name: ctypes.CDLL(os.path.join(found, name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES}
        except OSError as error:
            raise OneCCLError("oneCCL cannot be loaded: %s" % error)
        _loaded.extend([opened["libccl.so.2"], opened["libmpi.so.12"]])
        _declare(_loaded[0])
    return tuple(_loaded)


def _declare(library):
    address, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    both = [address, address, count, number]  # send buffer, receive buffer, elements, type
    one = [address, count, number, number]  # buffer, elements, type, rank
    end = [address, address]  # communicator, stream
    arguments = {
        "onecclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "onecclCommInitRank": [ctypes.POINTER(address), count, UniqueId, number],
        "onecclCommDestroy": [address],
        "onecclAllReduce": both + [number] + end,
        "onecclReduceScatter": both + [number] + end,
        "onecclReduce": both + [number, number] + end,
        "onecclBroadcast": both + [number] + end,
        "onecclAllGather": both + end,
        "onecclAllToAll": both + end,
        "onecclSend": one + end,
        "onecclRecv": one + end,
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    library.onecclGetErrorString.restype = ctypes.c_char_p
    library.onecclGetErrorString.argtypes = [number]


def start_mpi():
    """Initialise MPI, unless the script has; whether it was done here. Collective over all ranks of the job."""
    _, mpi = load()
    already, provided = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Initialized(ctypes.byref(already))
    if already.value:
        return False
    code = mpi.MPI_Init_thread(None, None, MPI_THREAD_MULTIPLE, ctypes.byref(provided))
    if code or provided.value < MPI_THREAD_MULTIPLE:
        raise OneCCLError("MPI_Init_thread: error %d, thread level %d" % (code, provided.value))
    return True


def mpi_world_size():
    """How many ranks mpirun has started."""
    size = ctypes.c_int()
    load()[1].MPI_Comm_size(MPI_COMM_WORLD, ctypes.byref(size))
    return size.value


def stop_mpi():
    """MPI_Finalize, once; waits for all ranks."""
    _, mpi = load()
    already = ctypes.c_int()
    mpi.MPI_Finalized(ctypes.byref(already))
    if not already.value:
        mpi.MPI_Finalize()


def leave_with_exit_code():
    """Have this process end right after Python's own end, with the exit code that Python gives it.

    The destructors of these libraries are left out: those of MPI abort, or wait for other ranks, where MPI is not finalised.
    """
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # calls _exit(code, NULL), and before all earlier handlers


def unique_id():
    """The id of a new communicator, as bytes."""
    made = UniqueId()
    _call("onecclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def _call(name, *arguments):
    library = load()[0]
    code = getattr(library, name)(*arguments)
    if code:
        raise OneCCLError("%s: %s (code %d)" % (name, library.onecclGetErrorString(code).decode(errors="replace"), code))


def copy(source, target, count, code):
    """`count` elements from one address to another, which may overlap."""
    ctypes.memmove(target, source, count * WIDTHS[code])


class Communicator:
    """One communicator; buffers are addresses of contiguous host memory, counts are in elements of `code`."""

    def __init__(self, size, identity, rank):
        self._handle = ctypes.c_void_p()
        _call("onecclCommInitRank", ctypes.byref(self._handle), size, UniqueId.from_buffer_copy(identity), rank)

    def _pieces(self, name, send, receive, count, code, width, *rest):
        for start in range(0, count, LARGEST_COUNT):
            offset = start * width
            piece = min(LARGEST_COUNT, count - start)
            _call(name, send + offset, receive + offset, piece, code, *rest + (self._handle, None))

    def all_reduce(self, send, receive, count, code, width, operation):
        self._pieces("onecclAllReduce", send, receive, count, code, width, operation)

    def reduce(self, send, receive, count, code, width, operation, root):
        self._pieces("onecclReduce", send, receive, count, code, width, operation, root)

    def broadcast(self, buffer, count, code, width, root):
        self._pieces("onecclBroadcast", buffer, buffer, count, code, width, root)

    def reduce_scatter(self, send, receive, count, code, operation):
        """`count`: what one rank receives."""
        _call("onecclReduceScatter", send, receive, count, code, operation, self._handle, None)

    def all_gather(self, send, receive, count, code):
        """`count`: what one rank sends."""
        _call("onecclAllGather", send, receive, count, code, self._handle, None)

    def all_to_all(self, send, receive, count, code):
        """`count`: what one rank sends to one other."""
        _call("onecclAllToAll", send, receive, count, code, self._handle, None)

    def send(self, buffer, count, code, rank):
        """Blocks until the message is on its way; a large one until `rank` receives it."""
        _call("onecclSend", buffer, count, code, rank, self._handle, None)

    def receive(self, buffer, count, code, rank):
        _call("onecclRecv", buffer, count, code, rank, self._handle, None)
