#!/usr/bin/env bash
# A vLLM server on this machine for a run on others. Run it on each machine that generates:
#
#   VLLM_API_KEY=... examples/cluster/engine.sh servers.txt --model MODEL --dtype bfloat16 --max-model-len 4096 \
#       --tensor-parallel-size 8
#
# It adds the server's address to the file, which is on a disk that all machines share, and which `urls` of
# VLLMServerEngine names. A server that ends is started again. On SIGTERM, its address is removed and the server ends,
# after 20 seconds at the latest.
set -euo pipefail

FILE=${1:?is the file of addresses}
shift
: "${VLLM_API_KEY:?is the key that the run has too}"
HOST=${HOST:-$(hostname -I | tr ' ' '\n' | grep -v -e '^127[.]' -e ':' | head -n 1 || true)}
: "${HOST:?is the address of this machine for the others, which hostname -I does not show}"
PORT=${PORT:-8000}
TRANSFER=${TRANSFER:-'{"backend": "nccl"}'}
ADDRESS="http://$HOST:$PORT"
export VLLM_SERVER_DEV_MODE=1

change() { # of the file, one machine at a time: $1 is a command that changes its lines
  (
    flock 9
    touch "$FILE"
    eval "$1" < "$FILE" > "$FILE.new"
    mv "$FILE.new" "$FILE"
  ) 9> "$FILE.lock"
}
leave() {
  change "grep -vxF '$ADDRESS' || true"
  if [ -n "${SERVER:-}" ]; then
    kill -TERM -- "-$SERVER" 2> /dev/null || true
    for _ in $(seq 200); do # 20 seconds: a server that is still starting may not end by itself
      kill -0 "$SERVER" 2> /dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$SERVER" 2> /dev/null || true
  fi
}
trap 'trap - EXIT; leave; exit 143' TERM INT
trap leave EXIT

change "grep -vxF '$ADDRESS' || true; echo '$ADDRESS'"
set -m # the server's processes are a group
while true; do
  "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --host "$HOST" --port "$PORT" --tokens-only \
    --load-format dummy --logprobs-mode processed_logprobs --weight-transfer-config "$TRANSFER" \
    --middleware lightning_rlhf.extras.servers.plugin.GuardedRoutes "$@" &
  SERVER=$!
  wait "$SERVER" || true
  kill -KILL -- "-$SERVER" 2> /dev/null || true
  echo "engine.sh: the server at $ADDRESS has ended, and is started again" >&2
  sleep 1
done
