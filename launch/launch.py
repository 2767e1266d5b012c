"""What the components share: how many processes a job needs and with which devices, checked beforehand."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

import torchx.specs as specs
from torchx.schedulers.local_scheduler import SignalException

from wlb_titan.errors import UserError


def command_job(
    command: str, arguments: list[str], image: str, name: str, resource: specs.Resource
) -> specs.AppDef:
    """One process that runs `wlb-titan COMMAND ARGUMENTS`."""
    role = specs.Role(
        name=command, image=image, entrypoint="wlb-titan", args=[command, *arguments], resource=resource
    )
    return specs.AppDef(name=name, roles=[role])


def watched(app: specs.AppDef) -> specs.AppDef:
    """TorchX's distributed job with our agent in torchrun's place, which takes the same arguments."""
    for role in app.roles:
        role.args = [argument.replace("torchrun ", "wlb-agent ", 1) for argument in role.args]
    return app


def end_cleanly() -> None:
    """Has TorchX, in whose process components are made, end a local job on SIGHUP as it does on Ctrl-C and
    SIGTERM, and say so in a line."""
    if threading.current_thread() is not threading.main_thread():
        return
    if not _runs_here():
        return  # the job outlives this process
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        raise SignalException("the job is to end", sigval=signal.Signals(number))

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SignalException):
            sys.__excepthook__(kind, error, trace)
            return
        name = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
        print(f"\nStopped by {name}; the job has ended.", file=sys.stderr)
        raise SystemExit(128 + error.sigval)

    def shown_in_thread(error: threading.ExceptHookArgs) -> None:
        # TorchX deletes its folder of logs while its own thread may still be reading there.
        if not stopped.is_set():
            threading.__excepthook__(error)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, stop)
    sys.excepthook = shown
    threading.excepthook = shown_in_thread


def _runs_here() -> bool:
    """Whether a local scheduler of TorchX is to run the job: it handles signals by now, others do not."""
    return signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN)


def gpus_here() -> int | None:
    """How many GPUs the job finds, if it runs on this machine; None if it does not."""
    if not _runs_here():
        return None
    import torch

    return torch.accelerator.device_count()


def processes_a_host(
    config: str,
    overrides: list[str],
    nodes: int,
    processes_per_node: int,
    corpus_is_here: bool,
    gpus: Callable[[], int | None] = gpus_here,
) -> int:
    """Checks the experiment here, before the scheduler sees it, and sizes its job.

    A mistake of the user ends the process with its message and exit code 2, as in the `wlb-titan` command:
    TorchX would print a traceback.

    Args:
        config: path of the TOML file.
        overrides: command-line overrides of its keys.
        nodes: number of hosts.
        processes_per_node: 0 for as many as the parallel degrees need.
        corpus_is_here: whether the job will see this machine's files, so that the corpus can be checked.
        gpus: says how many the job will find; None where it runs elsewhere.
    """
    try:
        return _resolve(config, overrides, nodes, processes_per_node, corpus_is_here, gpus)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _resolve(
    config: str,
    overrides: list[str],
    nodes: int,
    processes_per_node: int,
    corpus_is_here: bool,
    gpus: Callable[[], int | None] = gpus_here,
) -> int:
    from wlb_titan.config import refuse_unknown_keys

    refuse_unknown_keys(config, overrides)  # before torch is imported for the next line
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    use_cpu_without_accelerator()
    from wlb_titan.runtime.checks.config import validate, validate_devices, validate_files
    from wlb_titan.runtime.job import degrees_product
    from wlb_titan.runtime.models.load import load_config

    if nodes < 1 or processes_per_node < 0:
        raise UserError(
            f"--nodes is at least 1 and --nproc at least 0 (as many as are needed); got {nodes} and "
            f"{processes_per_node}."
        )
    world_size = nodes * processes_per_node
    resolved = load_config(config, overrides, world_size=world_size or None)
    if (here := gpus()) is not None:
        processes = world_size or degrees_product(resolved.config)
        resolved.check(lambda config: validate_devices(config, processes, here))
    if corpus_is_here:
        resolved.check(lambda config: validate_files(config, world_size or None))
    if not world_size:
        world_size = degrees_product(resolved.config)
        if world_size % nodes != 0:
            raise UserError(f"--nodes: {world_size} processes do not spread evenly over {nodes} hosts.")
        resolved.check(lambda config: validate(config, world_size))
    return world_size // nodes
