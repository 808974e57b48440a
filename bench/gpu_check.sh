#!/usr/bin/env bash
# What only a GPU can show, in at most nine minutes on one GPU, without a network:
#
#   bench/gpu_check.sh [--dry-run] [--out DIR] [PART...]
#
# Needs an NVIDIA GPU, nvcc, PyTorch and pytest; CuPy and compute-sanitizer are used where they are.
# One GPU serves four ranks, several GPUs one rank each. Builds the checkout for the GPUs found, and
# leaves the result in it. Without PART, all parts run in the order below. Each has a time limit; a
# part that fails does not stop the others. The summary comes last. DIR (bench/results) gets a JSON
# file, the whole log and the test report. The exit code is 1 if a part failed, 2 if nothing could start.
#
# --dry-run runs the same parts on virtual devices with small sizes, and skips those that need a GPU.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
gpu=$root/bench/gpu
python=${PYTHON:-python3}
out=$root/bench/results
dry_run=()
chosen=()

fail() {
  printf 'bench/gpu_check.sh: error: %s\n' "$1" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=(--dry-run) ;;
    --out)
      [ $# -gt 1 ] || fail "--out needs a folder"
      out=$2
      shift
      ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit
      ;;
    -*) fail "unknown option $1; there are --dry-run and --out DIR" ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
known=$(sed -n 's/^part \([a-z-]*\) .*/\1/p' "${BASH_SOURCE[0]}" | paste -sd ' ')
for name in "${chosen[@]}"; do
  [[ " $known " = *" $name "* ]] || fail "no part is called $name; there are: $known"
done
mkdir -p "$out" && [ -w "$out" ] || fail "cannot write into $out"
out=$(cd "$out" && pwd)

work=$(mktemp -d)
running=
trap 'rm -rf "$work"' EXIT
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; exit 130' INT TERM
cd "$root" || exit 2
# The checkout, in which the build leaves the compiled core, hides an installed pyparallel.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torch's threads would wait for busy cores
unset PYPARALLEL_VIRTUAL_DEVICES PYPARALLEL_TEST_DEVICES PYPARALLEL_P2P PYPARALLEL_ALGO
unset CUDA_LAUNCH_BLOCKING PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF

# limited SECONDS COMMAND...: in the background, so that Ctrl-C reaches this script at once.
limited() {
  timeout --kill-after=3 "$@" &
  running=$!
  wait "$running"
  local code=$?
  running=
  return $code
}

limited 25 "$python" "$gpu/machine.py" "${dry_run[@]}" --facts "$work/facts.json" >"$work/ranks" ||
  fail "cannot start; the reason is above"
ranks=$(cat "$work/ranks")
echo "ranks: $ranks"

# part NAME SECONDS PROGRAM ARGUMENT...: runs bench/gpu/PROGRAM.py and notes how it ended. The limits
# below, with the time to kill a part that ignores its end, add up to less than nine minutes.
part() {
  local name=$1 limit=$2 program=$3 start=$SECONDS code
  shift 3
  [ ${#chosen[@]} = 0 ] || [[ " ${chosen[*]} " = *" $name "* ]] || return 0
  # Machines without GPUs may be small and busy, and nobody waits for them.
  [ ${#dry_run[@]} = 0 ] || limit=$((4 * limit))
  printf '\n======== %s (at most %d s)\n' "$name" "$limit" | tee -a "$work/log"
  limited "$limit" "$python" "$gpu/$program.py" --ranks "$ranks" --details "$work/$name.json" "$@" \
    >"$work/$name.log" 2>&1
  code=$?
  tee -a "$work/log" <"$work/$name.log"
  printf '%s %d %d %d\n' "$name" "$code" $((SECONDS - start)) "$limit" >>"$work/parts"
}

part build 90 build "${dry_run[@]}"
part stream-order 20 stream_order
part suite 105 suite "${dry_run[@]}" --limit 100 --junit "$work/junit.xml"
part faults 30 faults
part memcheck 55 sanitizer memcheck
part racecheck 55 sanitizer racecheck
part bandwidth 40 bandwidth "${dry_run[@]}"
part host-staged 20 transfers staged
part expandable-segments 20 transfers expandable
part launch-blocking 20 transfers blocking
part example 20 example "${dry_run[@]}"

"$python" "$gpu/report.py" --work "$work" --out "$out" "${dry_run[@]}"
