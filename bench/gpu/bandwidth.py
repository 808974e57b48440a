"""Times every algorithm with bench/collectives.py, beside a copy, torch.cuda.comm and NCCL."""

import json
import sys
from pathlib import Path

import part

sys.path.insert(0, str(part.ROOT / "bench"))


def measure_ours(args, device: str, largest: str) -> list[dict]:
    """Returns the rows of bench/collectives.py, which checks every value."""
    import collectives

    rows = []
    file = Path(f"{args.details}.rows")
    n = str(len(args.ranks.split(",")))
    # Small sizes tell latency, the large one bandwidth.
    for sizes in (["-b", "4", "-e", "16K", "-f", "4096"], ["-b", largest, "-e", largest]):
        common = ["all", "--device", device, "-g", n, "--algorithm", "all", "--json", str(file)]
        code = collectives.main([*common, *sizes])
        part.check(code == 0, f"bench/collectives.py ended with {code}")
        rows += json.loads(file.read_text())
    return rows


def compare(rows: list[dict], ranks) -> tuple[dict[str, object], list[dict]]:
    """Returns the copy's speed, and each large row beside what it is compared with."""
    import rivals

    nbytes = max(row["bytes"] for row in rows)
    copy = rivals.copies(ranks, nbytes)
    rival_us: dict[str, dict[str, float | None]] = {}
    table = []
    for row in rows:
        op = row["op"]
        if row["bytes"] != nbytes or row["in_place"]:
            continue
        if op not in rival_us:
            calls = {"torch": rivals.cuda_comm(op, ranks, nbytes)}
            calls["nccl"] = rivals.nccl(op, ranks, nbytes)
            rival_us[op] = {k: call and rivals.time_us(call, ranks) for k, call in calls.items()}
        if copy.link_bytes_per_s is None:
            of_copy = rivals.traffic(op, len(ranks), nbytes) / copy.local_bytes_per_s * 1e6
            share = of_copy / row["time_us"]
        else:
            share = row["busbw_gbps"] * 1e9 / copy.link_bytes_per_s
        table.append(
            {
                "op": op,
                "algorithm": row["algorithm"],
                "bytes": nbytes,
                "time_us": row["time_us"],
                "share_of_copy": round(share, 4),
                "torch_us": rival_us[op]["torch"],
                "nccl_us": rival_us[op]["nccl"],
            }
        )
    speed = {"local": copy.local_bytes_per_s, "link": copy.link_bytes_per_s}
    return speed, table


def print_table(speed: dict[str, object], table: list[dict]) -> None:
    local, link = speed["local"], speed["link"]
    print(f"\ncopy inside of a device: {local / 1e9:.1f} GB/s, reads and writes counted")
    if link is None:
        print("share: time of a copy with as many bytes read and written, over our time")
    else:
        print(f"copy from the first GPU to the second: {link / 1e9:.1f} GB/s")
        print("share: our busbw over the speed of that copy")
    print(f"{'':10} {'algorithm':14} {'ours us':>10} {'share':>6} {'torch us':>10} {'NCCL us':>10}")
    for row in table:
        others = "".join(
            f" {row[name]:10.1f}" if row[name] is not None else f" {'-':>10}"
            for name in ("torch_us", "nccl_us")
        )
        ours = f"{row['time_us']:10.1f} {row['share_of_copy']:6.2f}"
        print(f"{row['op']:10} {row['algorithm']:14} {ours}{others}")


def body(args) -> dict[str, object]:
    device = "cuda" if args.ranks.startswith("cuda") else "cpu"
    rows = measure_ours(args, device, "1M" if args.dry_run else "256M")
    from ranks import Ranks

    speed, table = compare(rows, Ranks(device, len(args.ranks.split(",")), timeout_s=10))
    print_table(speed, table)
    best: dict[str, float] = {}
    for row in table:
        best[row["op"]] = max(best.get(row["op"], 0), row["share_of_copy"])
    note = f"{len(rows)} rows, all values right; best share of a copy: "
    note += ", ".join(f"{op} {share:.2f}" for op, share in best.items())
    return {"note": note, "copy_bytes_per_s": speed, "compared": table, "rows": rows}


if __name__ == "__main__":
    parser = part.parser()
    parser.add_argument("--dry-run", action="store_true")
    part.run(parser.parse_args(), body)
