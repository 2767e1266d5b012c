"""`wlb-titan sample`: a few texts of a trained model."""

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--prompt", "prompts", multiple=True, required=True, help="What the text begins with.")
@click.option("--chat", is_flag=True, help="The prompt is the user's turn; the chat template writes it.")
@click.option("--tokens", type=click.IntRange(1), default=100, show_default=True, help="Longest text.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token each time.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the draws.")
def sample(
    folder: Path, prompts: tuple[str, ...], chat: bool, tokens: int, temperature: float, seed: int
) -> None:
    """Let the model of a run's newest checkpoint go on with a text.

    FOLDER is the run's dump folder. Every token computes the whole text again, so this is for looking at a
    few, not for serving.
    """
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    use_cpu_without_accelerator()

    from wlb_titan.runtime.sample import Sampler

    sampler = Sampler(folder)
    click.echo(f"Step {sampler.step} of {folder}", err=True)
    for prompt in prompts:
        text = sampler.written(prompt, chat=chat)
        click.echo(click.style(text, dim=True), nl=False)
        for piece in sampler.sample(text, tokens, temperature, seed):
            click.echo(piece, nl=False)
        click.echo()
