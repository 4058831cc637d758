#!/usr/bin/env bash
# One node of a cluster, in the foreground, as a service manager wants it:
#   start_node.sh head                 the first node; PORT (6379) is what the others connect to
#   start_node.sh FIRST:6379           every other
# More arguments go to `ray start`. With RAY_REDIS_ADDRESS=HOST:PORT the head keeps its state in
# Redis, and the next one at its address finds the other nodes. RAY_AUTH_TOKEN_PATH names a file with
# the cluster's token, the same on every node: whoever has the token and reaches the ports can run
# anything here, and nobody else. `openssl rand -hex 32` makes one. Ray's dashboard stays on loopback.
set -euo pipefail
: "${RAY_AUTH_TOKEN_PATH:?a file with the token of the cluster is needed}"
test -s "$RAY_AUTH_TOKEN_PATH" || { echo "no token in $RAY_AUTH_TOKEN_PATH" >&2; exit 2; }
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0
# A killed proxy is replaced in 4 s instead of 30.
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1
export RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=2
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30
export RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S=2
# A replica that does not answer is not asked to leave: the next one may need its GPU.
export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1
export RAY_SERVE_USE_GRPC_BY_DEFAULT=1
# gRPC would send these calls through the environment's http_proxy.
export no_grpc_proxy=0.0.0.0/0,::/0
# A replica says itself what takes long while it starts.
export RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S=600
# Every process passes its counts on so often, idle or not; Ray's own 100 ms cost more.
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS=1000
# Answers may be as large as their pictures; Ray's own limit is 4 MiB.
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=1073741824
# The headers of a request are bounded before Ray's proxy holds them.
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve.front.connection:bound

role=${1:?head, or the address of the first node}
shift
if [[ $role == head ]]; then
  exec ray start --block --head --port="${PORT:-6379}" --dashboard-host=127.0.0.1 "$@"
else
  exec ray start --block --address="$role" "$@"
fi
