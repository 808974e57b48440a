"""Small collectives under compute-sanitizer: every algorithm, type and rank, aligned and not."""

import os
import shutil
import subprocess
import sys

import part

FOUND = 86  # our exit code of the tool for errors that it found
TIMEOUT_S = "40"  # kernels are many times slower here


def find_tool() -> str:
    candidates = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.insert(0, f"{home}/bin/compute-sanitizer")
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise part.SkipPart("compute-sanitizer was not found")


def collectives() -> int:
    """What the tool watches. Sizes are 20, 1140 and 64980 bytes: tails, and several slices."""
    sys.path.insert(0, str(part.ROOT / "bench"))
    from collectives import main

    common = ["all", "--device", "cuda", "-g", "4", "--algorithm", "all"]
    common += ["-b", "20", "-e", "64K", "-f", "57", "-n", "1", "-w", "0", "-T", TIMEOUT_S]
    return main([*common, "-d", "all"]) or main([*common, "-d", "half", "-u", "1"])


def body(args) -> dict[str, object]:
    part.require_gpu(args.ranks)
    tool = find_tool()
    command = [tool, "--tool", args.tool, "--error-exitcode", str(FOUND)]
    if args.tool == "memcheck":
        # Not errors that calls return: torch and we ask questions whose answer may be an error.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, "--inside"]
    # Each tensor gets memory of its own, so that an access past its end is outside of it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # One GPU, because the tool may hold back one GPU's kernel while another's waits for it.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    text = result.stdout + result.stderr
    print(text)
    if "Device not supported" in text:
        raise part.SkipPart("compute-sanitizer says: Device not supported")
    part.check(result.returncode != FOUND, f"{args.tool} found errors, which are above")
    part.check(result.returncode == 0, f"the collectives ended with {result.returncode}")
    summaries = [line for line in text.splitlines() if "SUMMARY" in line]
    part.check(bool(summaries), f"{args.tool} printed no summary")
    return {"note": summaries[-1].strip("= "), "tool": args.tool}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(collectives())
    parser = part.parser()
    parser.add_argument("tool", choices=["memcheck", "racecheck"])
    part.run(parser.parse_args(), body)
