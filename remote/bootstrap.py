"""Inside one rank's interpreter: make what the script expects exist, then run the script unchanged.

Usage: python -u bootstrap.py SCRIPT [ARGUMENT...]          SCRIPT is a file; `-m module` is not supported

The script runs as `python SCRIPT ARGUMENT...` would run it: as `__main__`, with its own directory first on `sys.path`,
with the same exit code and the same traceback. Nothing heavy is imported for it: what torch, Accelerate and Transformers
need in order to train as one job on CPU nodes is put into them after, and only if, the script itself imports them:

- `Trainer` and `Accelerator` join the job without any CPU flag, on the backend of this run;
- after a restart, `Trainer.train()` goes on from the checkpoint that CLUSTER_TRAIN_RESUME names;
- a backend that the script asks for but this stack lacks ("ccl", "mpi") becomes the backend of this run;
- the script's own `import oneccl_bindings_for_pytorch`, `torch_ccl` or `intel_extension_for_pytorch` is answered by a
  stand-in where the package is not installed. Libraries that look for these packages are not fooled.

Every replacement is told once, on rank 0's stderr. In the environment: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT, and CLUSTER_TRAIN_BOOTSTRAP, a JSON object whose `backend` names the backend of this run, and whose
`ddp_timeout_s` is the time limit of collectives for scripts that name none. CLUSTER_TRAIN_STACKS names the file into which
the stacks of all threads are written at the signal STACKS_SIGNAL, until the script takes that signal for itself. After a
restart CLUSTER_TRAIN_RESUME is the path of the newest complete checkpoint, which every node has.
"""

import atexit
import builtins
import faulthandler
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import signal
import sys
import types
from datetime import timedelta

SETTINGS_VARIABLE = "CLUSTER_TRAIN_BOOTSTRAP"
STACKS_VARIABLE, STACKS_SIGNAL = "CLUSTER_TRAIN_STACKS", signal.SIGRTMIN + 7  # as in stacks.py
TRAINER_TIMEOUT_S = 1800  # TrainingArguments' own: nobody has chosen it
RESUME_VARIABLE = "CLUSTER_TRAIN_RESUME"
CPU_BACKENDS = ("ccl", "gloo", "mpi")
CCL_BINDINGS = ("oneccl_bindings_for_pytorch", "torch_ccl")  # the package's names since 1.12 and before
OWN_CCL = "ccl_group"  # our module beside this file, for a torch that has no such package
ONECCL = "cluster_train_oneccl"  # the libraries that it needs
IPEX = "intel_extension_for_pytorch"
IN_CHILD = "cluster_train_child"  # the name under which a process of multiprocessing runs this file

_told = set()  # the notes that were printed
_resumed = []  # the checkpoints that a Trainer has gone on from
_trainer_timeout = []  # the time limit of the TrainingArguments that are just being made; at most one


def main():
    """Run the script named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: bootstrap.py SCRIPT [ARGUMENT...]")
    script = sys.argv[1]
    if not os.path.isfile(script):
        print("cluster-train: there is no script %s on %s" % (script, os.uname().nodename), file=sys.stderr)
        sys.exit(2)
    show_stacks_when_asked()
    install_hooks(script)
    run(script, sys.argv[1:])


def show_stacks_when_asked():
    """Have faulthandler write all threads' stacks at the signal, also while the main thread waits in a collective."""
    path = os.environ.get(STACKS_VARIABLE)
    if path:
        # It stays open as long as the process lives; what the script starts as a new program does not get it.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def run(script, argv):
    """Execute `script` as `__main__`, as `python` itself would."""
    directory = os.path.dirname(os.path.realpath(script))
    sys.argv[:] = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory  # until now it was this file's directory
    module = types.ModuleType("__main__")
    vars(module).update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=script,
        __loader__=importlib.machinery.SourceFileLoader("__main__", script),
    )
    sys.modules["__main__"] = module  # pickle and multiprocessing look here for what the script defines
    try:
        with open(script, "rb") as file:
            exec(compile(file.read(), script, "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        end(exit_code(error))
    except BaseException:
        # Only the interpreter knows how an exception ends a process (KeyboardInterrupt by a signal), so it goes on from
        # here; whoever shows the traceback is given it without the frames of this file.
        shown = sys.excepthook

        def show(kind, error, trace):
            shown(kind, error, _of_the_script(error, trace))
            if kind is not KeyboardInterrupt:
                leave(1)

        sys.excepthook = show
        raise
    leave(0)


def exit_code(error):
    """What a SystemExit ends the process with; prints its text, if it has one, as the interpreter does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def end(code):
    """End the process with this exit code, on behalf of a script that asked for it."""
    if code and OWN_CCL in sys.modules:
        sys.modules[OWN_CCL].fail(code)
    leave(code)
    sys.exit(code)


def leave(code):
    """After the script: end the process with `code` before the destructors of C++ libraries can abort it.

    Of plain DDP scripts over gloo one in ten ended so with torch 2.13, all work done or the error shown: "terminate called
    without an active exception". Where the script itself uses MPI the end is MPI's business, and left to Python.
    """
    ends_mpi = OWN_CCL in sys.modules and sys.modules[OWN_CCL].ends_mpi()
    if "torch" not in sys.modules or (is_mpi_loaded() and not ends_mpi):
        return
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for the script's own threads, as Python's end does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # closed, or whoever read it has gone
    os._exit(code & 0xFF)


def is_mpi_loaded():
    """Whether this process has an MPI library."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return b"/libmpi" in maps.read()
    except OSError:
        return True


def _of_the_script(error, trace):
    """`trace` from the script's first frame on; `error` is given it too."""
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    error.__traceback__ = trace
    return trace


# What the hooks decide.


def backend_for(asked):
    """The torch.distributed backend to use where `asked` was asked for; None leaves the choice to this run.

    A backend that torch has is never replaced, so a script's own choice holds where it can. `asked` may be of the form
    "cpu:ccl,cuda:nccl".
    """
    effective = effective_backend()
    if effective == "ccl":
        register_backend(effective)
    if asked is None:
        return effective
    granted = re.sub(r"\b(ccl|mpi)\b", lambda match: _or_effective(match.group()), str(asked).lower())
    if granted == str(asked).lower():
        return asked
    note("the script asks for the backend %s, which this stack does not have: using %s" % (asked, granted))
    return granted


def effective_backend():
    """The torch.distributed backend of this run."""
    return settings().get("backend", "gloo")


def default_timeout():
    """The time limit of collectives that this run sets where the script sets none, or None."""
    limit_s = settings().get("ddp_timeout_s")
    return timedelta(seconds=limit_s) if limit_s else None


def settings():
    """What this run has chosen."""
    return json.loads(os.environ.get(SETTINGS_VARIABLE, "null")) or {}


def register_backend(name):
    """Make torch.distributed know the backend `name`, where something installed provides it.

    This is the one place in which a backend is plugged in; it is called before each use of torch.distributed's group.
    """
    for provider in CCL_BINDINGS if name == "ccl" else ():
        try:
            if not isinstance(importlib.import_module(provider), StandIn):
                return
        except ModuleNotFoundError as error:
            if error.name != provider:
                raise  # it is installed, and something that it needs is not
    if name == "ccl" and (importlib.util.find_spec(ONECCL) or "CLUSTER_TRAIN_ONECCL" in os.environ):
        _beside_this_file(OWN_CCL).register()


def _beside_this_file(name):
    """One of our modules; the script's directory has gone before this one on the path."""
    directory = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(directory)


def _or_effective(name):
    return name if _has_backend(name) else effective_backend()


def _has_backend(name):
    """Whether torch.distributed can make a group with the backend `name`, "ccl" or "mpi"."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return False
    return distributed.is_mpi_available() if name == "mpi" else hasattr(distributed.Backend, name.upper())


def note(text):
    """Tell `text` once in the whole job: on rank 0, and not in the processes that it starts."""
    if text not in _told and os.environ.get("RANK", "0") == "0" and __name__ != IN_CHILD:
        print("cluster-train: " + text, file=sys.stderr, flush=True)
    _told.add(text)


# What is changed in the libraries, each after its module has been loaded.


def patch_torch(module):
    """torch.distributed.distributed_c10d: a backend that does not exist becomes the one of this run; its time limit holds."""
    original, limit = module.init_process_group, default_timeout()

    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        if limit and len(args) < 2 and kwargs.get("timeout") is None:  # the arguments after the backend: init_method, timeout
            kwargs["timeout"] = limit
        return original(backend_for(backend), *args, **kwargs)

    module.init_process_group = init_process_group
    if limit and hasattr(module, "_get_default_timeout"):  # since 2.1: of further groups (new_group) as well
        module._get_default_timeout = lambda backend: limit


def patch_accelerate(module):
    """accelerate.state: every state is that of a CPU job with the backend of this run.

    Left alone, `PartialState` joins a CPU job only where the caller says cpu=True, and since 1.13 refuses "ccl".
    """
    state = module.PartialState
    initialise, prepare = state.__init__, state._prepare_backend

    @functools.wraps(initialise)
    def __init__(self, cpu=False, **kwargs):
        kwargs["backend"] = backend_for(kwargs.get("backend"))
        if _trainer_timeout:
            kwargs.setdefault("timeout", _trainer_timeout[0])
        initialise(self, cpu=True, **kwargs)

    @functools.wraps(prepare)
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        # Asked for "ccl", releases before 1.13 look into the bindings' metadata; what this run has is known here already.
        found, kind = prepare(self, cpu, sagemaker_dp, "gloo" if backend in CPU_BACKENDS else backend)
        honoured = backend in CPU_BACKENDS and kind == module.DistributedType.MULTI_CPU
        return (backend if honoured else found), kind

    state.__init__, state._prepare_backend = __init__, _prepare_backend


def patch_transformers(module):
    """transformers.training_args: arguments without a CPU flag mean the CPU, and --ddp_timeout holds there too.

    The flag is needed beside Accelerate's state, because bf16 is refused without it. The CPU branch of
    `TrainingArguments` does not hand its time limit to Accelerate; it is kept for `PartialState` to find.
    """
    arguments = module.TrainingArguments
    finish = arguments.__post_init__

    @functools.wraps(finish)
    def __post_init__(self):
        setattr(self, "use_cpu" if hasattr(self, "use_cpu") else "no_cuda", True)  # use_cpu since 4.32
        backend = "ddp_backend" if hasattr(self, "ddp_backend") else "xpu_backend"  # ddp_backend since 4.29
        setattr(self, backend, backend_for(getattr(self, backend)))
        if default_timeout() and self.ddp_timeout == TRAINER_TIMEOUT_S:
            self.ddp_timeout = max(1, int(settings()["ddp_timeout_s"]))
        _trainer_timeout[:] = [timedelta(seconds=self.ddp_timeout)]
        try:
            finish(self)
        finally:
            del _trainer_timeout[:]

    arguments.__post_init__ = __post_init__


def patch_trainer(module):
    """transformers.trainer: training goes on from this attempt's checkpoint, also where the script does not say so.

    The script's own search takes the newest directory, which a failure may have left half-written.
    """
    original = module.Trainer.train

    @functools.wraps(original)
    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        return original(self, checkpoint_for(self.args.output_dir, resume_from_checkpoint), *args, **kwargs)

    module.Trainer.train = train


def checkpoint_for(output_dir, asked):
    """What a Trainer with this output directory goes on from, where the script asks for `asked`: a path, True, False or None.

    Once in a process: another training on the same output directory is not the one that was cut off.
    """
    chosen = os.environ.get(RESUME_VARIABLE)
    if not chosen or asked is False or _resumed:
        return asked
    if os.path.realpath(os.path.dirname(chosen)) != os.path.realpath(output_dir):
        return asked
    _resumed.append(chosen)
    if asked is None or asked is True or os.path.realpath(asked) != os.path.realpath(chosen):
        note("training goes on from %s" % chosen)
    return chosen


def patch_multiprocessing(module, script):
    """multiprocessing.spawn: a process that imports the script anew (spawn, forkserver) has these hooks as well."""
    original = module.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name):
        return dict(original(name), cluster_train=_Hooks(script))

    module.get_preparation_data = get_preparation_data


class _Hooks:
    """What is sent to a new process before the script's path: to unpickle it is to run this file there."""

    def __init__(self, script):
        self.script = script

    def __reduce__(self):
        return runpy.run_path, (__file__, {"SCRIPT": self.script}, IN_CHILD)


# How they get there.


def install_hooks(script):
    """Have the libraries patched as they are loaded, and let stand-ins answer the imports of `script`."""
    patches = {
        "accelerate.state": patch_accelerate,
        "multiprocessing.spawn": functools.partial(patch_multiprocessing, script=script),
        "torch.distributed.distributed_c10d": patch_torch,
        "transformers.trainer": patch_trainer,
        "transformers.training_args": patch_transformers,
    }
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # for what the script starts, and for what reads nothing else
    for name in patches:
        if name in sys.modules:
            _apply(patches[name], sys.modules[name])
    sys.meta_path.insert(0, AfterLoading(patches))
    sys.meta_path.append(StandIns(script))  # last: only where nothing is installed


def _apply(patch, module):
    try:
        patch(module)
    except AttributeError as error:
        note("%s is left as it is, this version is not known (%s)" % (module.__name__, error))


class AfterLoading:
    """A finder that finds nothing itself: it has the module's own loader apply a patch once the module is complete."""

    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        if name not in self.patches:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None:
            self._extend(spec.loader, self.patches[name])
        return spec

    def _extend(self, loader, patch):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            _apply(patch, module)

        loader.exec_module = exec_module  # of this one module; it stays the loader that inspect and pkgutil know


class StandIns:
    """Finder and loader of empty modules for the retired CPU packages, for imports that the script's own files make."""

    def __init__(self, script):
        paths = os.path.abspath(script), os.path.realpath(script)  # of the script itself, and of the modules beside it
        self.directories = tuple(os.path.join(os.path.dirname(path), "") for path in paths)

    def find_spec(self, name, path=None, target=None):
        if (name != IPEX and name not in CCL_BINDINGS) or not self._is_own(_importing_file()):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def _is_own(self, file):
        return file.startswith(self.directories) and "site-packages" not in file

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == IPEX:
            module.optimize = optimize
            note("%s is not installed: its optimize() leaves the model as it is" % IPEX)
        else:
            note("%s is not installed: the script trains on %s without it" % (module.__name__, effective_backend()))


class StandIn(types.ModuleType):
    """A module in place of one that is not installed; what it lacks is named."""

    def __getattr__(self, name):
        raise AttributeError("%s is not installed, and cluster-train's stand-in has no %s" % (self.__name__, name))


def optimize(model, dtype=None, optimizer=None, **options):
    """In place of ipex.optimize: what was given, unchanged, in the shape in which ipex returns it."""
    return model if optimizer is None else (model, optimizer)


def _importing_file():
    """The file whose code runs the import that is under way."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("importlib", "importlib._bootstrap"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


if __name__ == "__main__":
    main()
elif __name__ == IN_CHILD:
    install_hooks(globals()["SCRIPT"])
