#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, behind first.sh: kernels beside what could take their place, then a share of the
# conformance kit. At most four minutes. Results: $OUT/{alternatives,sample}.{log,jsonl}, or build/gpu/out.
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python3}" scripts/gpu.py --only alternatives sample --out "${OUT:-build/gpu/out}" "$@"
