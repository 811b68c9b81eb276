#!/usr/bin/env bash
# A parameter-server cluster on several machines, started by ssh: the chief on the first, workers in the slots of all, servers in turn.
#
#     cluster/ssh_ps.sh node1:2,node2:2 train.py [ARGS]
#
# SERVERS, MODE (sync, async) and SSH_ARGS may be set: SSH_ARGS="-p 2222" cluster/ssh_ps.sh node1:2,node2:2 train.py
# ssh must work without a password, and this directory and environment be at the same path on every machine.
set -euo pipefail
hosts=$1
shift
exec tfdist run --strategy parameter_server --hosts "$hosts" --ssh-args "${SSH_ARGS:-}" \
    --ps "${SERVERS:-1}" --mode "${MODE:-sync}" "$@"
