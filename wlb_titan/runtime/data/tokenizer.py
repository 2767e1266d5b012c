"""The corpus' tokenizer as torchtitan's trainer wants one, without its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.components.tokenizer import HuggingFaceTokenizer


class Tokenizer(HuggingFaceTokenizer):
    """torchtitan's, which compiles a chat template as soon as there is one, and knows no `{% generation %}`.

    Training reads token ids; conversations were rendered when the corpus was prepared.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def set_chat_template(self, template: str) -> None:
        """Leaves it."""
