"""`vlm`: a vision-language model as the judge, behind any OpenAI-compatible server (vLLM, SGLang, ...).

    task "grade"      one grade from 0 to 10 for a question about picture and prompt; score = grade / 10
    task "questions"  yes/no questions from metadata["questions"]; score = share of yes
    task "ocr"        the judge reads the text, and *we* compare it with the target as the reward `ocr` does

The request gives a JSON schema, and the answer is checked against it here too: an answer of another form, one that stops
half-way, or one with too few answers is a failure, not a low score.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .base import RewardResult, RewardSample
from .errors import RewardError, RewardServiceError, RewardTargetError, check_counts, require
from .service import ServiceReward
from .text import match_texts, targets_of
from .wire import encode_png

TOP_GRADE = 10
_SYSTEM = "You judge generated pictures. Look closely, be strict, and answer only with the JSON that is asked for."
_GRADE = (
    "The picture was generated from this prompt: {prompt}\n{question}\n"
    "Give a whole number from 0 (not at all) to 10 (perfectly), and a reason of one sentence."
)
_ALIGNMENT = (
    "How well does the picture show everything the prompt asks for: objects, counts, colors, positions and style?"
)
_QUESTIONS = (
    "The picture was generated from this prompt: {prompt}\nAnswer each question with true or false.\n{questions}"
)
_OCR = "Read every text in the picture exactly as it is written, from top to bottom. Give one string for each line."


@dataclass(frozen=True)
class _Task:
    """question(sample) -> text; schema(sample) -> JSON schema; judge(sample, answer) -> result, or ValueError."""

    question: Callable[[RewardSample], str]
    schema: Callable[[RewardSample], dict[str, Any]]
    judge: Callable[[RewardSample, Any], RewardResult]


@dataclass(eq=False, kw_only=True)
class VlmReward(ServiceReward):
    """Asks `url`/chat/completions once per sample.

    Args:
        url: base of the API, e.g. http://127.0.0.1:8000/v1
        model: the served model's name
        task: "grade", "questions" or "ocr"
        question: for "grade": what to ask instead of prompt alignment; "{prompt}" in it stands for the prompt
        concurrency: questions at a time
        max_tokens: of an answer

    The rest are fields of `ServiceReward`.
    """

    name = "vlm"

    model: str
    task: str = "grade"
    question: str = ""
    concurrency: int = 16
    max_tokens: int = 512
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        require(self.task in TASKS, f"task={self.task!r} is unknown. Choose one of {', '.join(TASKS)}.")
        require(
            not self.question or self.task == "grade",
            f"question={self.question!r} goes with task='grade', not with task={self.task!r}.",
        )
        check_counts(concurrency=self.concurrency, max_tokens=self.max_tokens)
        self.url = self.url.rstrip("/") + "/chat/completions"
        super().__post_init__()
        self.batch_size = self.concurrency

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        if self.task == "ocr":
            targets_of(prompt, metadata)
        elif self.task == "questions":
            asked = metadata.get("questions")
            fits = isinstance(asked, list) and bool(asked) and all(isinstance(q, str) and q for q in asked)
            wrong = f"vlm: metadata questions={asked!r} must be a list of texts, and not empty."
            require(fits, wrong, RewardTargetError)
        else:
            require(prompt != "", "vlm: there is no prompt to grade the picture against.", RewardTargetError)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        if self.task == "ocr":
            return targets_of(prompt, metadata)
        return metadata.get("questions") if self.task == "questions" else None

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        with ThreadPoolExecutor(min(self.concurrency, len(samples)), "vlm-reward") as threads:
            return list(threads.map(self._ask, samples))

    def _ask(self, sample: RewardSample) -> RewardResult:
        task = TASKS[self.task]
        picture = base64.b64encode(encode_png(sample.image)).decode()
        question = task.question(sample).replace("{question}", self.question or _ALIGNMENT)
        question = question.replace("{prompt}", json.dumps(sample.prompt))
        request = {
            "model": self.model,
            "temperature": 0.0,
            "seed": 0,
            "max_tokens": self.max_tokens,
            "messages": [
                {"role": "system", "content": _SYSTEM},
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                        {"type": "text", "text": question},
                    ],
                },
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": self.task, "strict": True, "schema": task.schema(sample)},
            },
        }

        def read(answer: bytes) -> RewardResult:
            text = ""
            try:
                text = _content(answer)
                return task.judge(sample, json.loads(text))
            except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
                raise RewardServiceError(
                    f"the judge {self.model!r} gave no valid answer to {self.task!r}: {type(error).__name__}: {error}; "
                    f"it said {text[:200]!r}"
                ) from error

        try:
            return self.post(json.dumps(request).encode(), "application/json", read)
        except RewardError as error:
            return RewardResult.failed(error)


def _content(answer: bytes) -> str:
    """The message of a chat completion that came to its end."""
    choice = json.loads(answer)["choices"][0]
    if choice.get("finish_reason") not in ("stop", None):
        raise ValueError(f"the answer stopped for the reason {choice['finish_reason']!r}; raise max_tokens")
    content = choice["message"]["content"]
    if not isinstance(content, str):
        raise TypeError(f"content is {content!r}")
    return content


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _grade(_: RewardSample, answer: Any) -> RewardResult:
    grade = answer["grade"]
    if isinstance(grade, bool) or not isinstance(grade, int) or not 0 <= grade <= TOP_GRADE:
        raise ValueError(f"grade={grade!r} is not a whole number from 0 to {TOP_GRADE}")
    return RewardResult(grade / TOP_GRADE, {"grade": float(grade)})


def _number_questions(sample: RewardSample) -> str:
    questions = "\n".join(f"{i}. {q}" for i, q in enumerate(sample.metadata["questions"], 1))
    return _QUESTIONS.replace("{questions}", questions)


def _answer_questions(sample: RewardSample, answer: Any) -> RewardResult:
    answers, expected = answer["answers"], len(sample.metadata["questions"])
    if not isinstance(answers, list) or len(answers) != expected or not all(isinstance(a, bool) for a in answers):
        raise ValueError(f"answers={answers!r} are not {expected} times true or false")
    components = {f"question_{i}": float(a) for i, a in enumerate(answers, 1)}
    return RewardResult(sum(answers) / expected, components)


def _question_schema(sample: RewardSample) -> dict[str, Any]:
    count = len(sample.metadata["questions"])
    return _object(answers={"type": "array", "items": {"type": "boolean"}, "minItems": count, "maxItems": count})


def _read_text(sample: RewardSample, answer: Any) -> RewardResult:
    texts = answer["texts"]
    if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"texts={texts!r} is not a list of strings")
    words = [word for text in texts for word in text.split()]
    match = match_texts(targets_of(sample.prompt, sample.metadata), words)
    components = {"exact": match.exact, "edit": match.edit, "extra": match.extra, "lines": float(len(texts))}
    return RewardResult(0.5 * match.exact + 0.5 * match.edit, components)


TASKS = {
    "grade": _Task(
        lambda _: _GRADE,
        lambda _: _object(reason={"type": "string"}, grade={"type": "integer", "minimum": 0, "maximum": TOP_GRADE}),
        _grade,
    ),
    "questions": _Task(_number_questions, _question_schema, _answer_questions),
    "ocr": _Task(lambda _: _OCR, lambda _: _object(texts={"type": "array", "items": {"type": "string"}}), _read_text),
}
