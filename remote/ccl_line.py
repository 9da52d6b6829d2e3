"""The line in which the collectives of all `ccl` groups of a process wait, and the thread that watches over it.

One thread runs them, in the order in which they were issued: the same on every rank, as torch.distributed asks of its
callers. The call into oneCCL cannot be taken back. So where one outlives its time limit, or cannot complete because a rank
has left, the watch ends the *operation*: whoever waits for it gets an error that names it and the ranks that did not
arrive, everything behind it in the line fails as well, and the process leaves without any further call.
Needs torch >= 2.9.
"""

import queue
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LOOK_S = 0.5  # how often the watch looks
STOP_LIMIT_S = 30.0  # on a loaded machine the watch may be in the middle of a look
GONE_S = 2.0  # an operation that runs longer than this is compared with what the other ranks have issued


class Operation(dist.Work):
    """One collective: a future of its tensors.

    Args:
        group: the ProcessGroupCCL.
        name, sequence: which operation of the group it is.
        run: does it, on the line's thread.
        tensors: what it results in.
        limit_s: how long it may run.
    """

    def __init__(self, group, name, sequence, run, tensors, limit_s):
        super().__init__()
        self.group, self.name, self.sequence, self.limit_s = group, name, sequence, limit_s
        self.started_s = None  # by the monotonic clock
        self._run, self._tensors = run, tensors
        self._error, self._future = None, None
        self._is_done = False
        self._settling = threading.Lock()  # held while the outcome is written
        self._running = threading.Lock()  # held until there is an outcome
        self._running.acquire()

    def __str__(self):
        return "%s (number %d of group %s)" % (self.name, self.sequence, self.group.label)

    def execute(self):
        """Run it; whatever it raises is its outcome."""
        self.started_s = time.monotonic()
        try:
            with torch.inference_mode():  # no graph, and the tensors may be such of inference
                self._run()
        except BaseException as error:
            self.finish(error)
        else:
            self.finish()

    def finish(self, error=None):
        """Settle the outcome, unless it is."""
        with self._settling:
            if self._is_done:
                return
            self._error, self._is_done, self._run = error, True, None
            self._running.release()
            future = self._future
        if future is not None:
            future.set_result(None)  # its callbacks run here: outside of the lock

    def wait(self, timeout=timedelta(0)):
        """True when it is complete; raises its error, or DistBackendError when `timeout` (0: the operation's own) is over."""
        LINE.run_until(self)  # only where a callback of an operation waits for another
        limit_s = timeout.total_seconds()
        if not self._is_done:
            if not self._running.acquire(timeout=limit_s if limit_s > 0 else -1):
                raise dist.DistBackendError(overdue(self, limit_s))
            self._running.release()
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_completed(self):
        return self._is_done

    def is_success(self):
        return self._is_done and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return self._tensors

    def get_future(self):
        """A future of the tensors; one that fails does so for C++ as well, which `set_exception` would not give."""
        with self._settling:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._is_done:
                    self._future.set_result(None)
        return self._future.then(self._outcome)

    def _outcome(self, _):
        if self._error is not None:
            raise self._error
        return self._tensors


def overdue(operation, limit_s):
    """What there is to say about an operation that did not complete."""
    missing = operation.group.missing_at(operation.sequence)
    if operation.started_s is None:
        why = "it has not begun: an operation before it still runs"
    else:
        why = "; ".join(missing) or "all ranks have arrived, as far as they have told"
    return "%s did not complete within its timeout of %g s: %s" % (operation, limit_s, why)


class Line:
    """Runs operations one after the other on one thread."""

    def __init__(self):
        self._waiting = queue.SimpleQueue()
        self._thread = self._watch = None
        self._starting = threading.Lock()
        self._groups = []
        self.running = None
        self.broken = None  # the error after which nothing runs any more

    def watch_over(self, group):
        """Have a new group's operations watched."""
        with self._starting:
            self._groups.append(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ccl", daemon=True)
                self._watch = threading.Thread(target=self._look, name="ccl-watch", daemon=True)
                self._thread.start()
                self._watch.start()

    def stop(self):
        """At the end: a thread that is inside of torch when the interpreter ends takes the process down."""
        is_stuck = self.broken is not None
        self.broken = self.broken or dist.DistBackendError("this process has left its job")
        self._waiting.put(None)
        for thread in (self._watch, None if is_stuck else self._thread):
            if thread is not None:
                thread.join(STOP_LIMIT_S)

    def issue(self, operation):
        """Put an operation at the end of the line."""
        self._waiting.put(operation)
        if self.broken is not None:
            self._fail_the_rest()
        return operation

    def run_until(self, operation):
        """On the line's own thread: run what waits until this operation is complete."""
        if threading.current_thread() is self._thread:
            while not operation.is_completed():
                self._execute(self._waiting.get())

    def fail(self, operation, message):
        """Give up an operation that runs, and with it the line: its thread cannot be had back."""
        self.broken = dist.DistBackendError(message)
        operation.finish(self.broken)
        self._fail_the_rest()

    def _fail_the_rest(self):
        while not self._waiting.empty():
            try:
                operation = self._waiting.get_nowait()
            except queue.Empty:
                return
            if operation is not None:
                operation.finish(dist.DistBackendError("not begun, because earlier %s" % self.broken))

    def _work(self):
        for operation in iter(self._waiting.get, None):
            self._execute(operation)

    def _execute(self, operation):
        before, self.running = self.running, operation
        operation.execute()
        self.running = before

    def _look(self):
        while self.broken is None:
            time.sleep(min([LOOK_S] + [group.limit_s / 5 for group in self._groups]))
            operation = self.running
            try:
                for group in self._groups:
                    group.tell_progress()
                if operation is not None and operation.started_s is not None and not operation.is_completed():
                    self._judge(operation, time.monotonic() - operation.started_s)
            except RuntimeError as error:  # the store, which the job's first rank keeps, does not answer
                if operation is not None and not operation.is_completed():
                    self.fail(operation, "%s cannot complete: the job's store does not answer any more (%s)" % (operation, error))

    def _judge(self, operation, age_s):
        if age_s > operation.limit_s:
            self.fail(operation, overdue(operation, operation.limit_s))
        elif age_s > min(GONE_S, operation.limit_s / 2):
            gone = operation.group.gone_before(operation.sequence)
            if gone:
                self.fail(operation, "%s cannot complete: %s" % (operation, "; ".join(gone)))


LINE = Line()
