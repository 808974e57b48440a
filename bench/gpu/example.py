"""The example trains on one device and on all ranks, and compares weights and losses."""

import subprocess
import sys

import part


def body(args) -> dict[str, object]:
    command = [sys.executable, "examples/01_drop_in.py", "--check"]
    command += ["--epochs", "1" if args.dry_run else "3"]
    result = subprocess.run(command, cwd=part.ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    if "No module named 'sklearn'" in result.stderr:
        raise part.SkipPart("scikit-learn is not installed")
    part.check(result.returncode == 0, f"the example ended with {result.returncode}")
    lines = result.stdout.splitlines()
    devices = next(line for line in lines if line.startswith("devices:"))
    part.check(("cuda" in devices) == args.ranks.startswith("cuda"), f"it ran on {devices}")
    differences = [line for line in lines if "differ by" in line]
    return {"note": "; ".join(differences), "devices": devices}


if __name__ == "__main__":
    parser = part.parser()
    parser.add_argument("--dry-run", action="store_true")
    part.run(parser.parse_args(), body)
