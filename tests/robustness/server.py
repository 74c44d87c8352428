# SPDX-License-Identifier: Apache-2.0
"""Process that has imported all commands and runs each request in a fork, which saves the start-up of Python.

It reads one JSON request per line and answers with one JSON line. faults.c is preloaded, so that file operations in a
fork can be made to fail.
"""

import atexit
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any

_IMPORTS = (
    "bionemo.cli.pretrain",
    "bionemo.cli.finetune",
    "bionemo.cli.predict",
    "bionemo.cli.preprocess",
    "bionemo.cli.analysis",
    "bionemo.cli.main",
    "bionemo.experiment.nemo",
    "bionemo.training.train",
    "bionemo.training.module",
    "bionemo.models.language_model",
    "bionemo.models.esm2nv",
    "bionemo.models.esm1nv",
    "bionemo.inference.predict_files",
    "bionemo.inference.load",
    "bionemo.finetuning.linear_probe",
    "bionemo.preparation.sequences",
    "h5py",
    "matplotlib.figure",
    "pyarrow.parquet",
    "tensorboard.compat",
    "torch.utils.tensorboard",
)


def main() -> None:
    """Serve requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _IMPORTS:
        import_module(name)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=answers, flush=True)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a fork; return its wait status, and whether it had to be killed."""
    if (child := os.fork()) == 0:
        _run(request)
    while os.getpgid(child) != child:  # until the child has called setsid
        time.sleep(0.001)
    begun = time.monotonic()
    limit = begun + request["timeout"]
    number, delay = request.get("signal", (0, 0.0))
    while True:
        if number and time.monotonic() > begun + delay:
            os.killpg(child, number)  # like a terminal
            number = 0
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return {"status": os.waitstatus_to_exitcode(status), "hung": False}
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"status": None, "hung": True}
        time.sleep(0.01)


def _run(request: dict[str, Any]) -> None:
    """Run the command; never return."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    console = os.open(request["console"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(console, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if largest := request.get("largest_file"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    library = ctypes.CDLL(None)
    if fault := request.get("fault"):
        library.faults_arm(
            os.fsencode(fault["below"]), fault["kinds"], ctypes.c_long(fault["nth"]), fault["error"], fault["lasting"]
        )
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    status: object = 0
    try:
        import_module(module).main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        if path := request.get("calls"):
            calls = library.faults_calls()
            library.faults_disarm()
            with open(path, "w") as file:
                file.write(str(calls))
        os._exit(int(status or 0))


if __name__ == "__main__":
    main()
