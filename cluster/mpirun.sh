#!/usr/bin/env bash
# Training under Open MPI's mpirun (or MPICH's): each process learns from MPI who it is and where the others are.
#
#     cluster/mpirun.sh train.py [ARGS]
#
# PROCESSES, STRATEGY (multi_worker, horovod) and MPI_ARGS may be set:
#     PROCESSES=8 STRATEGY=horovod MPI_ARGS="--hostfile hosts" cluster/mpirun.sh train.py
# Needs mpi4py (pip install mpi4py), on every host at the same path.
set -euo pipefail
# shellcheck disable=SC2086  # MPI_ARGS holds several words.
exec mpirun -np "${PROCESSES:-2}" ${MPI_ARGS:-} tfdist run --strategy "${STRATEGY:-multi_worker}" "$@"
