"""`wlb-titan compare`: what runs differ in, and what came of it."""

from __future__ import annotations

from pathlib import Path

import click

from wlb_titan.commands.console import make_console, show_table


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]...")
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html.")
def compare(folders: tuple[Path, ...], report: Path | None) -> None:
    """Put the metrics of training runs side by side; the first is the baseline.

    RUN is a run's dump_folder, of a job that has ended or still runs:

    \b
    wlb-titan compare outputs/cpu_debug outputs/cpu_balanced --report outputs/compare

    First comes what differs in their configurations. The loss is compared after equally many tokens. Times
    leave out each run's first logged step, which has the start in it. docs/metrics.md explains the figures.
    """
    from wlb_titan.commands.report.compare import figure_rows, remarks, setting_rows
    from wlb_titan.commands.run_folder import open_runs

    runs = open_runs(folders)
    console = make_console()
    if settings := setting_rows(runs):
        show_table(console, settings)
    show_table(console, figure_rows(runs))
    for line in remarks(runs):
        console.print(line, markup=False, soft_wrap=True)
    if report is not None:
        from wlb_titan.commands.report.compare import write_report

        click.echo(f"Report: {write_report(report, runs)}")
