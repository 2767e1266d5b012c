"""A few texts of a trained model, to look at: plain decoding in one process.

Every token computes the whole text again, without a cache: this is for looking at a hundred tokens of a run,
not for serving. Exported folders (`checkpoint.last_save_in_hf`) are for programs that serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer

from wlb_titan.corpus.chat import ChatTemplate
from wlb_titan.corpus.tokenizer import CorpusTokenizer
from wlb_titan.errors import UserError
from wlb_titan.runtime.attention.module import DocumentMask
from wlb_titan.runtime.compat import batch_of, set_rotary_length
from wlb_titan.runtime.data.corpus import open_corpus
from wlb_titan.runtime.life.checkpoints import newest_whole
from wlb_titan.runtime.life.dump_folder import CONFIG_FILE
from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.models.variants import MAX_CONTEXT


class Sampler:
    """The model of a run's newest whole checkpoint.

    Raises:
        UserError: there is no run, or it has no checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(f"{folder} is no folder of a run: it has no {CONFIG_FILE}.")
        config = load_config(folder / CONFIG_FILE).config
        checkpoints = folder / config.checkpoint.folder
        self.step = newest_whole(checkpoints).step
        if self.step < 0:
            raise UserError(f"{checkpoints} has no checkpoint; train with checkpoint.enable = true.")
        spec = config.model_spec
        assert spec is not None
        self._longest = batch_of(config).window
        for _, rope, _, _ in spec.model.traverse(type(spec.model.first_attention.rope)):
            set_rotary_length(rope, min(max(self._longest, 2), MAX_CONTEXT))
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = there or torch.device("cpu")
        self._model = spec.model.build()
        with torch.no_grad():
            self._model.init_weights()
        saved = checkpoints / f"step-{self.step}"
        state = self._model.state_dict()
        files = sorted(saved.glob("*.safetensors"))
        if files:
            adapter = spec.state_dict_adapter(spec.model, None)
            state = adapter.from_hf({key: t for file in files for key, t in load_file(file).items()})
        else:
            dcp.load(state, checkpoint_id=saved, no_dist=True)
        self._model.load_state_dict(state)
        self._model.to(self.device).eval()
        tokenizer = open_corpus(config.wlb.corpus).tokenizer_path
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._end = CorpusTokenizer(tokenizer).end_of_text_id
        self._folder = tokenizer

    def written(self, prompt: str, *, chat: bool) -> str:
        """What the model reads: the prompt, or a conversation that begins with it."""
        if not chat:
            return prompt
        template = ChatTemplate(self._folder, {})
        return template.prompt([{"role": "user", "content": prompt}])

    @torch.no_grad()
    def sample(self, text: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
        """The text that follows, a piece for each token, until the end-of-text token.

        Args:
            text: as of `written`.
            tokens: at most, and no more than the context window has room for.
            temperature: 0 takes the likeliest token.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids or [self._end]
        if len(ids) >= self._longest:
            raise UserError(f"The prompt has {len(ids):,} tokens; the context window is {self._longest:,}.")
        draw = torch.Generator().manual_seed(seed)
        shown, begin = "", len(ids)
        for _ in range(min(tokens, self._longest - len(ids))):
            inputs = torch.tensor([ids], device=self.device)
            mask = DocumentMask(torch.tensor([[0, len(ids), 0, len(ids)]], dtype=torch.int32))
            scores = self._model(inputs, torch.arange(len(ids), device=self.device)[None], mask)[0, -1]
            scores = scores.float().cpu()
            if temperature > 0:
                chosen = torch.multinomial(torch.softmax(scores / temperature, dim=0), 1, generator=draw)
            else:
                chosen = scores.argmax()
            ids.append(int(chosen))
            if ids[-1] == self._end:
                return
            whole = self._tokenizer.decode(ids[begin:], skip_special_tokens=False)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
                yield whole[len(shown) :]
                shown = whole
