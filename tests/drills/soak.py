"""A longer drill, as a program: a job is disturbed again and again, and must end as if nothing had happened.

    PYTHONPATH=tests python tests/drills/soak.py --rounds 20 --seed 0

In each round the job is started, left alone for a random time, and disturbed at random: ranks killed or told
to stop, a rank stopped for a while, lines of rubbish in its figures, the newest checkpoint cut off, a start
with settings that must be refused. At the end it runs through, and its losses must be those of an undisturbed
one.
"""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import time
from pathlib import Path

import click
from drill_ground import Drill, Ground
from forking import ForkServer


def kill_all(job: Drill, draw: random.Random) -> None:
    job.kill()


def kill_one(job: Drill, draw: random.Random) -> None:
    job.signal(signal.SIGKILL, [draw.randrange(2)])


def stop_one(job: Drill, draw: random.Random) -> None:
    job.signal(signal.SIGTERM, [draw.randrange(2)])


def pause_one(job: Drill, draw: random.Random) -> None:
    rank = draw.randrange(2)
    job.signal(signal.SIGSTOP, [rank])
    time.sleep(draw.uniform(0, 3))
    job.signal(signal.SIGCONT, [rank])
    job.signal(signal.SIGKILL, [1 - rank])


def scribble(job: Drill, draw: random.Random) -> None:
    job.kill()
    with (job.dump / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')


def cut_checkpoint(job: Drill, draw: random.Random) -> None:
    job.kill()
    whole = sorted((job.dump / "checkpoint").glob("step-*/.metadata"))
    if len(whole) > 1:
        newest = max(whole, key=lambda file: int(file.parent.name.removeprefix("step-"))).parent
        piece = draw.choice(sorted(newest.glob("*.distcp")))
        with piece.open("r+b") as file:
            file.truncate(piece.stat().st_size // 2)


DISTURBANCES = (kill_all, kill_one, stop_one, pause_one, scribble, cut_checkpoint)


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--steps", type=click.IntRange(4), default=60, show_default=True, help="Of the job.")
def main(rounds: int, seed: int, steps: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer()
        try:
            _soak(Ground(Path(folder), server), draw, rounds, ("--training.steps", str(steps)))
        finally:
            server.close()


def _soak(ground: Ground, draw: random.Random, rounds: int, words: tuple[str, ...]) -> None:
    undisturbed = ground.run("undisturbed", *words)
    assert undisturbed.codes == [0, 0], undisturbed.log()
    for number in range(rounds):
        if number and draw.random() < 0.2:
            refused = ground.run("job", *words, "--wlb.corpus.seed", "7")
            assert 0 not in refused.codes, refused.log()
        job = ground.start("job", *words)
        job.await_(lambda job=job: "| loss" in job.log() or "Done: " in job.log())
        time.sleep(draw.uniform(0, 2))
        disturb = draw.choice(DISTURBANCES)
        with contextlib.suppress(ProcessLookupError):  # the job was through before
            disturb(job, draw)
        job.wait()
        click.echo(f"{number:3} {disturb.__name__:15} exit codes {job.codes}")
    job = ground.run("job", *words)
    assert job.codes == [0, 0], job.log()
    assert job.losses() == undisturbed.losses(), "the losses are not those of an undisturbed job"
    click.echo(f"{rounds} disturbances: all {len(job.losses())} losses as without them")


if __name__ == "__main__":
    main()
