#!/usr/bin/env bash
# Looks for wrong memory accesses and races of the kernels with NVIDIA's compute-sanitizer, over a few steps of a small
# model with every way to sample.
#
#     scripts/sanitize.sh [CHECK ...]     CHECKs: memcheck graphs racecheck (default: all, in this order)
#
#     memcheck    kernels one by one, each tensor an allocation of its own, so that no byte beside one goes unnoticed
#     graphs      memcheck of captured graphs, as they are served
#     racecheck   hazards in shared memory, kernels one by one
#
# Settings, from the environment:
#     PYTHON      the interpreter (default: .venv/bin/python where there is one, else python3)
#     SANITIZER   compute-sanitizer (default: looked for in CUDA_HOME, /usr/local/cuda, PATH, nvidia's Python packages)
#     SECONDS_EACH  most seconds of a check (default: 120)
#     DEVICE      cuda, or cpu to see that the steps run; that checks nothing
#
# The exit status is 1 if a check found an error, could not run or took too long; 77 if compute-sanitizer is not there.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
DEVICE=${DEVICE:-cuda}
SECONDS_EACH=${SECONDS_EACH:-120}
STEPS=("$PYTHON" scripts/sanitize_steps.py --device "$DEVICE")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

find_sanitizer() {
  local candidate
  for candidate in "${SANITIZER:-}" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" \
    /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer \
    "$(command -v compute-sanitizer)" $(packaged_sanitizers); do
    if [ -n "$candidate" ] && [ -x "$candidate" ]; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

packaged_sanitizers() {
  "$PYTHON" - <<'PYTHON_CODE'
import sysconfig
from pathlib import Path

for root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
    for package in ("nvidia", "triton"):
        for found in Path(root, package).rglob("compute-sanitizer"):
            if found.is_file():
                print(found)
PYTHON_CODE
}

# watch NAME TOOL OPTION...: the steps under a tool of the sanitizer
watch() {
  local name=$1 tool=$2 begin=$SECONDS status
  shift 2
  timeout "$SECONDS_EACH" "$SANITIZER" --tool "$tool" --error-exitcode 1 --print-limit 20 \
    --target-processes application-only "${STEPS[@]}" "$@"
  status=$?
  if [ $status -eq 124 ]; then
    echo "==> $name: FAILED, not done after $SECONDS_EACH s"
  elif [ $status -ne 0 ]; then
    echo "==> $name: FAILED with $status after $((SECONDS - begin)) s"
  else
    echo "==> $name: clean, $((SECONDS - begin)) s"
  fi
  return $status
}

# memory that torch's allocator hands out again looks allocated to the sanitizer
memcheck() { PYTORCH_NO_CUDA_MEMORY_CACHING=1 watch memcheck memcheck --no-graphs; }
graphs() { watch graphs memcheck; }
racecheck() { watch racecheck racecheck --no-graphs --ways 3; }

CHECKS=("$@")
[ ${#CHECKS[@]} -gt 0 ] || CHECKS=(memcheck graphs racecheck)
for check in "${CHECKS[@]}"; do
  case $check in
  memcheck | graphs | racecheck) ;;
  *)
    echo "sanitize.sh has no check $check; it has memcheck, graphs and racecheck" >&2
    exit 2
    ;;
  esac
done

if [ "$DEVICE" != cuda ]; then
  echo "no GPU is asked for: the steps run, nothing is checked"
  exec "${STEPS[@]}"
fi
if ! SANITIZER=$(find_sanitizer); then
  echo "compute-sanitizer is not installed: nothing was checked. It is part of the CUDA toolkit; SANITIZER names it" >&2
  exit 77
fi
echo "==> $SANITIZER"
# once without: kernels are compiled, which would take much longer under it, and the steps are known to run
"${STEPS[@]}" && "${STEPS[@]}" --no-graphs || exit 1
failed=0
for check in "${CHECKS[@]}"; do
  "$check" || failed=1
done
exit $failed
