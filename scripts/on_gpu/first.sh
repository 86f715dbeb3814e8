#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: are the results right, what serves each op, how fast are steps. At most nine minutes.
# Results: $OUT/{correct,speed}.{log,jsonl} and $OUT/speed-SHAPE.json, or build/gpu/out; they grow line by line.
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python3}" scripts/gpu.py --only correct speed --out "${OUT:-build/gpu/out}" "$@"
