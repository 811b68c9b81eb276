"""Ports that follow from a job's number, so that all its tasks know them and no other job has them.

Each job has a block of ports on each of its hosts, one port for each of its tasks there:

    up to 16 tasks on a host:   12288 +  16 · ((job + 633 · step) mod 1024) + task on the host
    up to 128 tasks on a host:  28672 + 128 · ((job + 633 · step) mod 32)   + task on the host

All are from 12288 to 32767: above the ports of common services, below those that Linux gives to
clients (32768 to 60999 by /proc/sys/net/ipv4/ip_local_port_range). What follows:

- Two jobs on one host share ports only if their numbers differ by a multiple of 1024, or of 32
  where both have more than 16 tasks there. Jobs of the two kinds never do.
- Two steps of a job share none, up to 1024 and 32 steps. 633 is about 1024 divided by the golden
  ratio: step s of a job has the block of a job whose number is far away, 93 or more for s up to 7.
"""

from __future__ import annotations

from tfdist.errors import ConfigError

__all__ = ["MOST_ON_A_HOST", "first_port"]

_STRIDE = 633
#: Most tasks on a host, first port, and number of blocks of each kind of job.
_KINDS = ((16, 12288, 1024), (128, 28672, 32))
#: The most tasks on a host for which there are ports.
MOST_ON_A_HOST = _KINDS[-1][0]


def first_port(job: int, step: int, on_a_host: int, source: str) -> int:
    """The port of the first task of each host.

    Args:
        job: the scheduler's number of the job.
        step: the number of the step in the job, or of the job in its array.
        on_a_host: the most tasks that the job has on one host.
        source: what says so, for messages.

    Raises:
        ConfigError: if there are too many tasks on a host.
    """
    for most, first, blocks in _KINDS:
        if on_a_host <= most:
            return first + most * ((job + _STRIDE * step) % blocks)
    raise ConfigError(
        f"{source} puts {on_a_host} tasks on one host. Ports follow from the job's number for up "
        f"to {MOST_ON_A_HOST}. Give the first port yourself, such as port=20000."
    )
