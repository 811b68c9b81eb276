"""The command that each serving task runs: `python -m tfdist.cli.server`.

Joins the cluster, starts TensorFlow's server, and stays until the chief has gone. The script runs
on the chief alone, which gives the servers their work.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdist.utils.turns import turn

with turn():
    from tfdist import environment
    from tfdist._tf.server import ServerError, start_server
    from tfdist.cluster import resources
    from tfdist.cluster.rendezvous import liveness
    from tfdist.cluster.spec import ClusterSpec
    from tfdist.cluster.tf_config import own_tf_config
    from tfdist.config.strategy_config import StrategyConfig
    from tfdist.errors import ConfigError, StartError, TfdistError
    from tfdist.strategies.membership import ServerMember, join_as_server
    from tfdist.utils.imports import quiet_import

__all__ = ["main"]

#: Seconds that a server stays after it has lost its chief. If a launcher watches both, it sees
#: the chief's end first and names the right one.
_SECONDS_TO_STAY = 2.0


def main(argv: Sequence[str]) -> int:
    """Runs one server to its chief's end.

    Args:
        argv: nothing.

    Returns:
        The exit status: 0 if the chief ended with 0 or this server cannot know, 1 if the chief
        failed or went without a word, else that of the error that kept the server from running.
    """
    if argv:
        print("tfdist: usage: python -m tfdist.cli.server (no arguments)", file=sys.stderr)
        return 2
    try:
        return _serve()
    except TfdistError as error:
        _report(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _serve() -> int:
    text, config = environment.read("TFDIST_CONFIG"), own_tf_config()
    if text is None or config is None:
        missing = "TFDIST_CONFIG" if text is None else "TF_CONFIG"
        raise ConfigError(
            f"{missing} is not set. Start servers with `tfdist run --strategy parameter_server "
            "SCRIPT` or `--strategy pipeline`, which set it."
        )
    member = join_as_server(config, StrategyConfig.from_json(text))
    server = _start_server(member)
    _report(f"{member.task} serves at {member.cluster.address(member.task)}")
    status = _stay(member)
    del server
    return status


def _start_server(member: ServerMember) -> Any:
    """TensorFlow's server of a task. It cannot be stopped but by the end of this process."""
    cluster, task = member.cluster, member.task
    with turn(), quiet_import():
        if resources.visible():
            _check_gpus()
        threads = resources.inter_op_threads(
            task.type, workers=len(cluster.addresses["worker"]), cores=os.cpu_count() or 1
        )
        try:
            return start_server(_addresses(cluster), task.type, task.index, threads)
        except ServerError as error:
            address = cluster.address(task)
            raise StartError(
                f"TensorFlow's server of {task} cannot start at {address}. Another program may "
                f"have taken port {address.port} (`ss -ltnp sport = :{address.port}` shows which). "
                f"TensorFlow says: {error}"
            ) from error


def _check_gpus() -> None:
    """Compares the GPUs of this host with those that TensorFlow can use."""
    # TensorFlow imports Keras if it is there, which takes 2 s and is of no use to a server.
    sys.modules.setdefault("keras", None)  # type: ignore[arg-type]
    from tfdist.strategies.devices import check_gpus

    check_gpus()


def _addresses(cluster: ClusterSpec) -> dict[str, dict[int, str]]:
    addresses: dict[str, dict[int, str]] = {}
    for task, address in cluster.tasks():
        addresses.setdefault(task.type, {})[task.index] = str(address)
    return addresses


def _stay(member: ServerMember) -> int:
    """Waits for the chief's end and reports it."""
    chief = f"{member.cluster.chief} at {member.cluster.address(member.cluster.chief)}"
    if member.line is None:
        end = liveness.await_silence(member.cluster.address(member.cluster.chief))
        _report(
            f"{chief} has gone: {end.seen}. This server took the place of one that had died, and "
            "cannot tell whether the training was complete: see the chief's own log. It ends."
        )
        return 0
    end = liveness.await_end(member.line)
    if end.status == 0:
        return 0
    how = "has failed" if end.status else "has gone without a farewell: it was killed, or unplugged"
    _report(f"{chief} {how} ({end.seen}). {member.task} ends, since nobody needs it.")
    time.sleep(_SECONDS_TO_STAY)
    return 1


def _report(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)


def _leave(status: int) -> NoReturn:
    """Ends the process at once: TensorFlow's server would keep it alive without an end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run() -> NoReturn:
    try:
        status = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        status = 1
    _leave(status)


if __name__ == "__main__":
    _run()
