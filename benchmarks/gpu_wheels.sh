#!/bin/sh
# Gather what benchmarks/gpu.py needs in addition to PyTorch, transformers, accelerate, peft, pyarrow and
# typer, as wheels for a machine without a network:
#
#     benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]     # 3.12 by default
#
# There: python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl, and SITE in
# PYTHONPATH. The versions are those of envs/constraints.txt, or of VERSIONS.
set -eu
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]}
version=${2:-3.12}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
pinned() { grep -iE "^$(echo "$1" | tr - .)==" "$root/envs/constraints.txt" | head -n 1 | sed "s, *[;#].*,,"; }
names="manimgx-fonts ruamel.yaml ruamel.yaml.clib typing_extensions hjson diffusers pydantic pydantic-core annotated-types typing-inspection importlib-metadata"
set --
for name in $names; do
    found=$(pinned "$name" || true)
    set -- "$@" "${found:-$name}"
done
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder" "$@"
# DeepSpeed is published as source alone. Without compiled ops it is plain Python.
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps --no-build-isolation -w "$folder" "$(pinned deepspeed)"
du -sh "$folder"
