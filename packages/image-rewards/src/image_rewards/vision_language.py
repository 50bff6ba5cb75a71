"""Rewards that are vision-language models run here (for one behind a server, see `vlm`).

    unified_reward  a judge that writes "Final Score: N" (Wang et al., 2025, arXiv:2503.05236; LLaVA- and Qwen-based releases)
    hps_v3          Qwen2-VL with a scoring head on a special last token (Ma et al., 2025, arXiv:2508.03789)

Both were trained with one exact instruction. The texts belong to those projects and are not copied here: `template` names a
file with the text from the release, in which {prompt} stands for the prompt. `unified_reward` also has a default of ours;
`hps_v3` has none, because its head fits one wording only.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .base import RewardResult, RewardSample
from .errors import RewardError, RewardTargetError, check_counts, require
from .model import ModelReward, fill, from_pretrained, load_state, need_prompt, processor_of

_UNIFIED_DEFAULT = (
    "Here are a caption and a picture that was generated from it. Judge how well the picture matches the caption and how "
    "good it looks. List what matches and what does not, then end with a line of the form 'Final Score: N', where N is a "
    "number from 1 (bad) to 5 (excellent).\nCaption: {prompt}"
)
_SCORE = re.compile(r"final\s+score\W{0,6}(\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(eq=False, kw_only=True)
class VisionLanguageReward(ModelReward):
    """Base: one picture and one filled-in instruction per forward pass."""

    default_template: ClassVar[str] = ""

    path: str
    template: str | None = None
    dtype: str = "bfloat16"
    batch_size: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.template is not None or self.default_template != "",
            f"{self.name} was trained with one exact instruction: give template=FILE with the text of its release, "
            "in which {prompt} stands for the prompt.",
        )
        require(self.template is None or Path(self.template).is_file(), f"template={self.template!r} is no file.")
        self._text = Path(self.template).read_text(encoding="utf-8") if self.template else self.default_template
        require(
            "{prompt}" in self._text, f"the template of {self.name} does not contain {{prompt}}: {self._text[:80]!r}."
        )

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        need_prompt(self.name, prompt)

    def processed(self, sample: RewardSample, suffix: str = "") -> Any:
        """The processor's tensors for one sample, on the device; `suffix` follows the instruction."""
        from PIL import Image

        special = [token for token in self._processor.tokenizer.get_added_vocab() if token in sample.prompt]
        if special:
            raise RewardTargetError(f"{self.name}: the prompt contains the model's control token {special[0]!r}.")
        text = self._text.replace("{prompt}", sample.prompt) + suffix
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        chat = self._processor.apply_chat_template([message], add_generation_prompt=not suffix, tokenize=False)
        picture = Image.fromarray(sample.image.transpose(1, 2, 0).copy())
        tensors = self._processor(text=[chat], images=[picture], return_tensors="pt").to(self.device)
        if "pixel_values" in tensors:
            tensors["pixel_values"] = tensors["pixel_values"].to(next(self._model.parameters()).dtype)
        return tensors

    def load(self) -> None:
        from transformers import AutoProcessor

        self._processor = processor_of(AutoProcessor, self.path, self.revision)
        self._model = self.place(self.load_model())

    @abstractmethod
    def load_model(self) -> Any:
        """The network, with weights."""

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        try:
            return [self.score_one(samples[0])]
        except RewardError as error:
            return [RewardResult.failed(error)]

    @abstractmethod
    def score_one(self, sample: RewardSample) -> RewardResult:
        """Score one sample."""


@dataclass(eq=False, kw_only=True)
class UnifiedReward(VisionLanguageReward):
    """score = the number after "Final Score:", from 1 to 5. An answer without it is a failure.

    Args:
        path: folder or hub id, e.g. "CodeGoat24/UnifiedReward-qwen-7b"
        max_new_tokens: of the answer, decoded greedily
    """

    name = "unified_reward"
    default_template = _UNIFIED_DEFAULT

    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(max_new_tokens=self.max_new_tokens)

    def load_model(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return from_pretrained(AutoModelForImageTextToText, self.path, self.revision)

    def score_one(self, sample: RewardSample) -> RewardResult:
        inputs = self.processed(sample)
        ids = self._model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        answer = self._processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]
        score = parse_final_score(answer)
        return RewardResult(score, {"final_score": score})


def parse_final_score(answer: str) -> float:
    """The last "Final Score: N" of an answer. Raises `RewardError` where there is none, or N is not from 1 to 5."""
    found = _SCORE.findall(answer)
    require(bool(found), f"unified_reward: the answer has no 'Final Score: N': {answer[-200:]!r}.", RewardError)
    score = float(found[-1])
    wrong = f"unified_reward: the final score {score!r} is not from 1 to 5: {answer[-200:]!r}."
    require(1 <= score <= 5, wrong, RewardError)
    return score


@dataclass(eq=False, kw_only=True)
class HpsV3Reward(VisionLanguageReward):
    """score = mu, the mean of the predicted preference; component sigma is the predicted spread.

    Args:
        path: folder or hub id of the Qwen2-VL that was fine-tuned ("Qwen/Qwen2-VL-7B-Instruct"): settings, tokenizer
        checkpoint: the released HPSv3.safetensors
        template: file with the release's instruction; required
        token: the special token whose last hidden state is scored
    """

    name = "hps_v3"

    checkpoint: str
    token: str = "<|Reward|>"

    def load_model(self) -> Any:
        from torch.nn import Dropout, Linear, ReLU, Sequential
        from transformers import Qwen2VLConfig, Qwen2VLModel

        tokenizer = self._processor.tokenizer
        tokenizer.add_tokens([self.token], special_tokens=True)
        self._token_id = int(tokenizer.convert_tokens_to_ids(self.token))
        state = load_state(self.checkpoint)
        head = {k.removeprefix("rm_head."): v for k, v in state.items() if k.startswith("rm_head.")}
        body = {current_name(k): v for k, v in state.items() if not k.startswith(("rm_head.", "lm_head."))}
        config: Any = processor_of(Qwen2VLConfig, self.path, self.revision)
        model = Qwen2VLModel(config)
        words = body.get("language_model.embed_tokens.weight")
        if words is not None:
            model.resize_token_embeddings(len(words), mean_resizing=False)
            require(
                self._token_id < len(words),
                f"checkpoint={self.checkpoint!r} has {len(words)} token embeddings, and token={self.token!r} is number "
                f"{self._token_id}: it was trained with another token or tokenizer.",
            )
        fill(model, body, self.checkpoint, ignore=("inv_freq",))
        width = int(config.text_config.hidden_size)
        self._head = Sequential(
            Linear(width, 1024), ReLU(), Dropout(0.05), Linear(1024, 16), ReLU(), Linear(16, 2)
        )  # fmt: skip
        fill(self._head, head, f"{self.checkpoint}: rm_head")
        self._head.eval().requires_grad_(False).to(self.device)
        return model

    def score_one(self, sample: RewardSample) -> RewardResult:
        inputs = self.processed(sample, suffix=self.token)
        places = (inputs["input_ids"][0] == self._token_id).nonzero()
        hidden = self._model(**inputs).last_hidden_state[0, int(places[-1])]
        mu, sigma = self._head(hidden.float()).tolist()
        return RewardResult(mu, {"mu": mu, "sigma": sigma})


def current_name(key: str) -> str:
    """A Qwen2-VL weight's name in releases of before transformers 4.52, as `Qwen2VLModel` calls it now."""
    key = key.removeprefix("model.") if key.startswith(("model.visual.", "model.language_model.")) else key
    return f"language_model.{key.removeprefix('model.')}" if key.startswith("model.") else key
