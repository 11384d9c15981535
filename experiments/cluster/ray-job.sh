#!/bin/bash
# Submit a sweep to a running Ray cluster. Its nodes need lantern-bench[ray] and the weights:
#     RAY_API_SERVER_ADDRESS=http://HEAD:8265 experiments/cluster/ray-job.sh lantern-table2 --model llamagen-t2i-stage1
# The driver runs on the head node and writes the run to the folder RESULTS there. Choose a folder that
# outlives the head node.
set -euo pipefail
: "${RAY_API_SERVER_ADDRESS:?is not set: the address of the dashboard, http://HEAD:8265}"
exec ray job submit --no-wait -- \
  env LANTERN_BENCH_RESULTS="${RESULTS:-/mnt/results}" lantern-bench sweep "$@" --ray auto
