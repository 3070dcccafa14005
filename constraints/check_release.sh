#!/usr/bin/env bash
# Check the files in a directory of distributions: both contain what they should, and the first run of the quickstart
# works from the wheel alone, outside of the source tree.
set -euo pipefail
python=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
dist=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip --quiet install --no-deps --target "$work/site" "$dist"/*.whl
cd "$work"
export PYTHONPATH="$work/site" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$python" - "$work" <<'PYTHON'
import sys
import lightning_rlhf
import lightning_rlhf.callbacks
for module in (lightning_rlhf, lightning_rlhf.callbacks):
    assert module.__file__.startswith(sys.argv[1]), f"{module.__file__} is not that of the wheel"
PYTHON
"$python" -m lightning_rlhf new first --kind quickstart
cd first
"$python" -m lightning_rlhf fit --config sft.yaml --trainer.max_steps 20
test -f runs/quickstart/sft/export/model.safetensors
tar --list --file "$dist"/*.tar.gz > "$work/files"
for name in setup.cfg README.md CHANGELOG.md callbacks/loop/rollout_loop.py configs/quickstart/ppo.yaml tests/conftest.py; do
    grep --quiet "/$name\$" "$work/files" || { echo "the source distribution lacks $name"; exit 1; }
done
echo "the wheel and the source distribution in $dist work"
