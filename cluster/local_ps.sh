#!/usr/bin/env bash
# A parameter-server cluster on this machine: a chief, two workers and two servers.
#
#     cluster/local_ps.sh train.py [ARGS]
#
# WORKERS, SERVERS and MODE (sync, async) may be set: WORKERS=4 SERVERS=1 MODE=async cluster/local_ps.sh train.py
set -euo pipefail
exec tfdist run --strategy parameter_server -n "${WORKERS:-2}" --ps "${SERVERS:-2}" --mode "${MODE:-sync}" "$@"
