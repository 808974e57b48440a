"""Prints the summary of bench/gpu_check.sh and writes its JSON file."""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from part import SKIPPED

TIMED_OUT = (124, 137)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else ""


def read_parts(work: Path) -> list[dict[str, object]]:
    """Returns name, status, reason, seconds and details of the parts, in the order they ran."""
    parts = []
    for line in (work / "parts").read_text().splitlines():
        name, code, seconds, limit = line.split()
        status = {0: "ok", SKIPPED: "skipped"}.get(int(code), "failed")
        reason = last_line(work / f"{name}.log")
        if int(code) in TIMED_OUT:
            reason = f"not done after {limit} s; its last line: {reason}"
        elif status == "failed":
            reason = reason or f"exit code {code}"
        details = work / f"{name}.json"
        parts.append(
            {
                "part": name,
                "status": status,
                "reason": reason,
                "seconds": int(seconds),
                "details": json.loads(details.read_text()) if details.exists() else None,
            }
        )
    return parts


def file_stem(facts: dict) -> str:
    """Returns the name of the files: date, device, number of ranks."""
    device = facts["gpus"][0]["name"] if facts["gpus"] else "dry-run"
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{facts['date'][:10]}-gpu-check-{device}-{len(facts['ranks'])}-ranks"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    facts = json.loads((args.work / "facts.json").read_text())
    parts = read_parts(args.work)
    failed = [part["part"] for part in parts if part["status"] == "failed"]
    stem = args.out / file_stem(facts)
    result = {"machine": facts, "failed": failed, "parts": parts}
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.copyfile(args.work / "log", stem.with_name(f"{stem.name}.log"))
    if (args.work / "junit.xml").exists():
        shutil.copyfile(args.work / "junit.xml", stem.with_name(f"{stem.name}.xml"))

    devices = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "virtual devices, no GPU"
    print(f"\n======== summary: {len(facts['ranks'])} ranks on {devices}")
    for part in parts:
        print(
            f"{part['part']:20} {part['status']:8} {part['seconds']:4d} s  {part['reason']}"[:200]
        )
    print(f"total {sum(part['seconds'] for part in parts)} s; details: {stem}.json")
    if args.dry_run:
        print("A dry run: nothing here says anything about a GPU.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
