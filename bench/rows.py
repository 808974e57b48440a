"""A row of the table of overheads: a line, with what it compares in columns of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bars import Line, Sample, median_ms, quartiles, ratios


@dataclass(frozen=True, kw_only=True)
class Row(Line):
    """``mode`` is what was timed. Without a time in a column there is None."""

    model: str
    nranks: int
    mode: str
    bare_ms: float | None
    ours_ms: float | None
    torch_ms: float | None


def compared(
    model: str,
    nranks: int,
    mode: str,
    samples: Mapping[str, list[Sample]],
    bar: float,
    wrong: int,
) -> Row:
    """Returns the row of times measured in turns: "bare", "ours", and perhaps "torch"."""
    times = {name: median_ms(samples[name]) for name in samples}
    notes = [f"{name} {ms:.2f} ms" for name, ms in times.items()]
    if "torch" in samples:
        low, median, high = quartiles(ratios(samples["torch"], samples["bare"]))
        notes.append(f"torch's ratio {low:.2f} {median:.2f} {high:.2f}")
    return Row(
        name=f"{model}, {nranks} ranks: {mode}",
        unit="x",
        quartiles=quartiles(ratios(samples["ours"], samples["bare"])),
        bar=bar,
        higher_is_better=False,
        wrong=wrong,
        note=", ".join(notes),
        model=model,
        nranks=nranks,
        mode=mode,
        bare_ms=times["bare"],
        ours_ms=times["ours"],
        torch_ms=times.get("torch"),
    )


def measured(
    model: str,
    nranks: int,
    mode: str,
    unit: str,
    values: Sequence[float],
    bar: float,
    wrong: int,
    note: str = "",
    bare_ms: float | None = None,
    ours_ms: float | None = None,
    torch_ms: float | None = None,
) -> Row:
    """Returns the row of something that is not a ratio of times."""
    return Row(
        name=f"{model}, {nranks} ranks: {mode}",
        unit=unit,
        quartiles=quartiles(list(values)),
        bar=bar,
        higher_is_better=False,
        wrong=wrong,
        note=note,
        model=model,
        nranks=nranks,
        mode=mode,
        bare_ms=bare_ms,
        ours_ms=ours_ms,
        torch_ms=torch_ms,
    )
