"""The table of clients, printed after the tests."""

from typing import Any

COLUMNS = ("works", "one_rollout", "exact", "retries", "prediction", "trainable")
TITLES = ("client", "mode", "works", "one rollout", "exact bytes", "retries equal", "prediction right", "trainable")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, ())]
    rows = sorted(
        (value for report in reports for name, value in report.user_properties if name == "client"),
        key=lambda row: row["client"],
    )
    skipped = [
        (value, str(report.longrepr[2]))
        for report in terminalreporter.stats.get("skipped", ())
        for name, value in report.user_properties
        if name == "client name"
    ]
    if not rows and not skipped:
        return
    lines = [
        TITLES,
        *((row["client"], row["mode"], *("yes" if row[name] else "NO" for name in COLUMNS)) for row in rows),
    ]
    widths = [max(len(line[at]) for line in lines) for at in range(len(TITLES))]
    terminalreporter.section("clients, alone and through the gateway")
    for number, line in enumerate(lines):
        terminalreporter.write_line(
            "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
        )
        if number == 0:
            terminalreporter.write_line("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for client, reason in skipped:
        terminalreporter.write_line(f"{client}: {reason[0].lower()}{reason[1:]}")
