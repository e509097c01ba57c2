"""The tables of the two studies of state formats (`state_error.py`, `format_accuracy.py`)."""

from __future__ import annotations

from pathlib import Path

from report_lines import Line, select, table

PROBLEMS = 1024
ONE_U = ", u in one bf16 number"
"""Ends the names of formats whose u of Gated DeltaNet is not kept as two bf16 numbers."""
TIERS = ("easy", "long", "track", "gsm", "recall", "tangle")
FORMATS = (
    "bfloat16",
    "bfloat16, stochastic",
    "float16",
    "float16, stochastic",
    "float8",
    "float8, stochastic",
    "nvfp4",
    "float16, stochastic, float8 readout",
    "float16, stochastic, nvfp4 readout",
    "float16, stochastic, nvfp4 readout" + ONE_U,
    "float16, stochastic, nvfp4 readout, float8 in layer 0",
    "float16, stochastic, nvfp4 readout, float8 in layer 0" + ONE_U,
    "float16, stochastic, nvfp4 readout, u from checkpoint",
    "float8, stochastic, nvfp4 readout",
    "float8, stochastic, nvfp4 readout" + ONE_U,
    "float8, stochastic, nvfp4 readout, same in layer 0",
    "float8, stochastic, nvfp4 readout, same in layer 0" + ONE_U,
    "float8, stochastic, nvfp4 readout, u from checkpoint",
    "float32, nvfp4 readout",
)
"""Those that tables and plots show, in this order."""


def precision_table(lines: list[Line]) -> str:
    """Right answers with float32 and what other formats change, of the formats that the published experiment had."""
    readouts = ("float16, stochastic, nvfp4", "float8, stochastic, nvfp4", "float16, stochastic, float8")
    names = ("float32", "nvfp4", *(f"{name} readout" for name in readouts))
    names += (f"{readouts[0]} readout, float8 in layer 0",)
    found = select(lines, benchmark="format_accuracy")
    rows = []
    for model, tier in sorted({(line["model"], line["tier"]) for line in found}):
        own = {line["format"]: line for line in select(found, model=model, tier=tier)}
        # As engines keep u, where that was run.
        own |= {name.removesuffix(ONE_U): line for name, line in own.items() if name.endswith(ONE_U)}
        if names[0] in own and len(own) > 1:
            cells = [f"{100 * own[name]['difference']:+.1f}" if name in own else "" for name in names[1:]]
            rows.append([model, tier, own[names[0]]["count"], f"{100 * own[names[0]]['value']:.1f} %", *cells])
    head = ["model", "problems", "of them", "right with float32", "one nvfp4 copy", "fp16 and nvfp4 readout"]
    head += ["fp8 and nvfp4 readout", "fp16 and fp8 readout"]
    return table([*head, "fp16 and nvfp4 readout, fp8 in layer 0"], rows)


def error_table(lines: list[Line]) -> str:
    """Errors of state and outputs by format and source, as Markdown."""
    errors = select(lines, benchmark="state_error")
    sources = list(dict.fromkeys(line["geometry"] for line in errors))
    text = [f"| format | {' | '.join(sources)} |", "|---" * (1 + len(sources)) + "|"]
    for name in ("float32", *FORMATS):
        own = {line["geometry"]: line for line in errors if line["format"] == name}
        if own:
            cells = [f"{own[s]['state_error'][-1]:.1e} / {own[s]['value']:.1e}" if s in own else "" for s in sources]
            text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def accuracy_table(lines: list[Line]) -> str:
    """Change of right answers as Markdown: a table for each model, of formats by tiers."""
    text = []
    for model in sorted({line["model"] for line in lines}):
        own = [line for line in lines if line["model"] == model]
        tiers = [tier for tier in TIERS if any(line["tier"] == tier for line in own)]
        bases = {line["tier"]: line["value"] for line in own if line["format"] == "float32"}
        titles = [f"{tier}: {bases[tier]:.1%}" for tier in tiers]
        text += [f"| {model} | {' | '.join(titles)} |", "|---" * (1 + len(tiers)) + "|"]
        for name in FORMATS:
            found = {line["tier"]: line for line in own if line["format"] == name}
            if found:
                simulated = " (simulated)" if all("simulated" in line["variant"] for line in found.values()) else ""
                cells = [_change(found[tier], not simulated) if tier in found else "" for tier in tiers]
                text.append(f"| {name}{simulated} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _change(line: Line, marked: bool) -> str:
    """marked: say of a simulated line that it is one. Numbers of problems stand where they are not the usual one."""
    low, high = (100 * bound for bound in line["difference_interval_95"])
    simulated = ", simulated" if marked and "simulated" in line["variant"] else ""
    problems = "" if line["count"] == PROBLEMS else f"; {line['count']:,} problems"
    return f"{100 * line['difference']:+.1f} ({low:+.1f} to {high:+.1f}{simulated}{problems})"


def write_tables(lines: list[Line], page: Path) -> None:
    """Put both studies' tables between their marks in docs/state_formats.md."""
    text = page.read_text(encoding="utf-8")
    accuracy = accuracy_table(select(lines, benchmark="format_accuracy"))
    for name, made in (("accuracy", accuracy), ("errors", error_table(lines))):
        begin, end = f"<!-- {name} begins -->\n", f"<!-- {name} ends -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page} must hold the marks {begin.strip()!r} and {end.strip()!r} once")
        before, rest = text.split(begin)
        text = before + begin + "\n" + made + "\n" + end + rest.split(end)[1]
    page.write_text(text, encoding="utf-8")
