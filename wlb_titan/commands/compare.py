"""`wlb-titan compare`: what runs differ in, and what came of it."""

from __future__ import annotations

from pathlib import Path

import click

from wlb_titan.commands.console import say, show_table, warnings_once
from wlb_titan.commands.errors import check_outputs
from wlb_titan.commands.options import report_option


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]...")
@report_option
def compare(folders: tuple[Path, ...], report: Path | None) -> None:
    """Put the metrics of training runs side by side; the first is the baseline.

    RUN is a run's dump_folder, of a job that has ended or still runs:

    \b
    wlb-titan compare outputs/cpu_debug outputs/cpu_balanced --report outputs/compare

    First comes what differs in their configurations. The loss is compared after equally many tokens. Times
    leave out what is logged first after each start, which is in it. docs/metrics.md explains the figures.
    """
    from wlb_titan.commands.report.compare import figure_rows, remarks, setting_rows
    from wlb_titan.commands.run_folder import open_runs

    check_outputs(report=report)
    runs = open_runs(folders)
    if settings := setting_rows(runs):
        show_table(settings)
    with warnings_once():
        show_table(figure_rows(runs))
        say(*remarks(runs))
        if report is not None:
            from wlb_titan.commands.report.compare import write_report

            click.echo(f"Report: {write_report(report, runs)}")
