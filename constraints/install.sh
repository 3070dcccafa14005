#!/usr/bin/env bash
# Makes .venv and installs the locked packages and this project into it; does nothing where that is already done.
#   PYTHON=python3.12   the interpreter to use (default: python3)
#   DEVICE=cpu          install for a CPU even where there is an NVIDIA GPU (default: gpu where there is one)
#   DEVICE=gpu-next     the newest vLLM that setup.cfg allows, and its torch; the default is what the tests run with
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
fail() { echo "make: $*" >&2; exit 1; }

# What is to be installed
command -v "$python" > /dev/null || fail "there is no command '$python'; name a Python with make PYTHON=/path/to/python"
version=$("$python" -c 'import platform; print(platform.python_version())') || fail "'$python' does not run"
case $version in
    3.11.* | 3.12.* | 3.13.*) ;;
    *) fail "Python 3.11 to 3.13 is needed, '$python' is $version; name another one with make PYTHON=/path/to/python" ;;
esac
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the locked packages are for Linux on x86_64, this is $(uname -sm)"
# Containers without NVIDIA's "utility" capability have the GPU's device file and no nvidia-smi.
has_nvidia() { nvidia-smi -L > /dev/null 2>&1 || compgen -G "/dev/nvidia[0-9]*" > /dev/null; }
device=${DEVICE:-$(has_nvidia && echo gpu || echo cpu)}
if [ -z "${DEVICE:-}" ] && [ "$device" = cpu ] && [ -e /dev/kfd ]; then
    echo "make: the AMD GPU of this machine is not used, because ROCm is not supported: installing for the CPU" >&2
fi
lock=constraints/$device.lock
[ -f "$lock" ] || fail "DEVICE is cpu, gpu or gpu-next, not '$device'"

# Is it there already? The stamp is written last, so an interrupted installation has none and starts afresh.
# The lock on this script makes a second make wait for the first.
exec 9< "$0"
flock 9
stamp=.venv/installed
place="$device Python $version $PWD"
key="$place $(cat "$lock" setup.cfg pyproject.toml "$0" | sha256sum | cut -d' ' -f1)"
installed=$(cat "$stamp" 2> /dev/null || true)
[ "$installed" != "$key" ] || exit 0
rm -f "$stamp"

# The packages for GPUs are built for CUDA 13, and Triton compiles at run time. Without a GPU, as where an image is built,
# neither is known. lightning_rlhf/extras/doctor/command.py has the same requirements.
gpus() {
    if command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader || true
    elif [ -f /sys/module/nvidia/version ]; then
        cat /sys/module/nvidia/version
    fi
}
if [ "$device" != cpu ] && has_nvidia; then
    while IFS=', ' read -r driver capability; do
        [[ $driver =~ ^[0-9]+(\.|$) ]] || fail "nvidia-smi reports no driver ('$driver $capability'); install NVIDIA driver" \
            "580 or newer, or install for the CPU with make DEVICE=cpu"
        [ "${driver%%.*}" -ge 580 ] || fail "the packages of $lock are built for CUDA 13, which needs NVIDIA driver 580" \
            "or newer, and this machine has $driver; update the driver, or install for the CPU with make DEVICE=cpu"
        [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] || continue  # "[N/A]" with some virtual GPUs
        [ "$(tr -d . <<< "$capability")" -ge 75 ] || fail "the packages of $lock are built for CUDA 13, which needs GPUs" \
            "of compute capability 7.5 (Turing) or newer, and this one has $capability; use make DEVICE=cpu"
    done < <(gpus)
    command -v "${CC:-gcc}" > /dev/null || command -v clang > /dev/null || fail "a C compiler is missing, with which" \
        "Triton compiles on a GPU at run time; on Debian and Ubuntu: apt-get install gcc"
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -f "$header" ] || fail "$header is missing, with which Triton compiles on a GPU at run time;" \
        "on Debian and Ubuntu: apt-get install python3-dev"
fi

# A fresh environment, unless only the packages of a whole one have changed
if [ "${installed% *}" != "$place" ]; then
    echo "make: a new .venv for Python $version and the packages of $lock (3 GB on a CPU, some 12 GB with a GPU)"
    "$python" -m venv --clear .venv || fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
uv=$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' "$lock")
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install --quiet "$uv" || fail "pip could not install $uv"

# uv does not read pip's settings: hand over where pip is told to look for packages
setting() { pip config get "global.$1" 2> /dev/null | tr -s ' \n' ',' | sed 's/^,//; s/,$//' || true; }
links=$(tr -s ' ' ',' <<< "${PIP_FIND_LINKS:-$(setting find-links)}")
index=${PIP_INDEX_URL:-$(setting index-url)}
[ -z "$links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$links}"
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
export UV_PYTHON_DOWNLOADS=never

# PyPI has only the CUDA build of torch for Linux. The CPU build comes from a folder named to pip, else from PyTorch.
backend=()
hint=
if [ "$device" = cpu ]; then
    torch=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$lock")
    tag=cp$(cut -d. -f1,2 <<< "$version" | tr -d .)
    backend=(--torch-backend cpu)
    hint="; torch $torch is looked for in the folders of PIP_FIND_LINKS and on the index of the PyTorch project"
    IFS=, read -r -a folders <<< "${UV_FIND_LINKS:-}"
    for folder in "${folders[@]}"; do
        if compgen -G "${folder#file://}/torch-$torch-$tag-*.whl" > /dev/null; then backend=(); fi
    done
fi

.venv/bin/uv pip install --python .venv/bin/python --no-deps --compile-bytecode "${backend[@]}" -r "$lock" || fail \
    "the packages of $lock could not be installed for Python $version (the reason is above)$hint"
.venv/bin/uv pip install --python .venv/bin/python --quiet --no-deps --no-build-isolation -e . || fail \
    "lightning-rlhf itself could not be installed (the reason is above)"
echo "$key" > "$stamp"
