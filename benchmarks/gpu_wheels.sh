#!/bin/sh
# Gather what benchmarks/gpu.py needs in addition to PyTorch, transformers, accelerate, peft, pyarrow and
# typer, as wheels for a machine without a network:
#
#     benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]     # 3.12 by default
#
# There: python3 -m pip install --no-index --no-deps --no-compile --target SITE FOLDER/*.whl, and SITE in
# PYTHONPATH. The versions and hashes are those of envs/constraints.txt.
set -eu
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]}
version=${2:-3.12}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
pins=$(mktemp -d)
trap 'rm -r "$pins"' EXIT
pinned() { grep "^$1==" "$root/envs/constraints.txt" || { echo "$1 is not pinned" >&2; exit 1; }; }
for name in manimgx-fonts ruamel-yaml ruamel-yaml-clib typing-extensions hjson diffusers pydantic \
    pydantic-core annotated-types typing-inspection importlib-metadata requests urllib3 charset-normalizer \
    certifi pillow einops msgpack py-cpuinfo tensorboard protobuf absl-py; do
    pinned "$name" >>"$pins/wheels.txt"
done
python3 -m pip download -q --no-deps --require-hashes --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder" -r "$pins/wheels.txt"
# DeepSpeed is published as source alone. Without compiled ops it is plain Python.
pinned deepspeed >"$pins/source.txt"
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps --require-hashes --no-build-isolation -w "$folder" \
    -r "$pins/source.txt"
du -sh "$folder"
