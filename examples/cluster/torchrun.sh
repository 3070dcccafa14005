#!/usr/bin/env bash
# One run over several machines with torchrun. Run it on each of them, by hand or by any tool that does:
#
#   MASTER_ADDR=node0 NODES=2 NODE_RANK=0 examples/cluster/torchrun.sh --config configs/gsm8k/ppo.yaml   # on node0
#   MASTER_ADDR=node0 NODES=2 NODE_RANK=1 examples/cluster/torchrun.sh --config configs/gsm8k/ppo.yaml   # on node1
#
# Behind --config come further options of `lightning-rlhf fit`, such as --ckpt_path last to continue a run.
set -euo pipefail

: "${MASTER_ADDR:?is the machine of node 0, as all others know it}"
: "${NODES:?is the number of machines}"
: "${NODE_RANK:?is the number of this machine, from 0}"
# One process for each GPU.
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)}

# No --max-restarts: it would restart one machine's processes while the others' have ended; start all of them again.
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$PROCESSES" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
  -m lightning_rlhf fit "$@" --trainer.num_nodes "$NODES" --trainer.devices "$PROCESSES"
