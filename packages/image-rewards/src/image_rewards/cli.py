"""The command line.

    python -m image_rewards score --reward ocr PICTURES     a folder, or JSON lines {"image", "prompt", "metadata"}
    python -m image_rewards check --reward ocr PROMPTS      every target of a prompt file, before training
    python -m image_rewards try PICTURES --rewards a b      several rewards side by side, in a table and on a page
    python -m image_rewards prompts check PROMPTS           counts, first lines, repeated texts, every broken line
    python -m image_rewards prompts split PROMPTS           what to train on and what to validate with, as two files
    python -m image_rewards serve --reward ocr --port 8100  the scorer service
    python -m image_rewards list                            every reward that can be loaded

Exit status: 0 when all is well, 1 when some picture has no score or some prompt no target, 2 for a wrong command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .base import Reward, RewardResult, RewardSample
from .batching import Limits
from .errors import RewardConfigError, RewardError, RewardTargetError, require
from .folders import NO_PICTURE, read_samples
from .prompt_commands import check_lines, split
from .prompt_files import HELD_OUT_SHARE, read_prompts
from .registry import available, load
from .sheet import by_score, contact_sheet, side_by_side, thumbnail
from .targets import check_prompts

TOKEN_ENV = "IMAGE_REWARDS_TOKEN"


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(prog="python -m image_rewards", description="Score generated pictures and videos.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.add_argument("--reward", required=True, help="name, or module:Class")
        sub.add_argument(
            "--option", action="append", default=[], metavar="KEY=VALUE", help="option; the value is JSON or text"
        )
        sub.add_argument("--video", default=None, help="how frames are combined: mean, min, max, median, first, last")
        return sub

    score = command("score", "Score a folder of pictures, or JSON lines.")
    score.add_argument("path", type=Path)
    score.add_argument("--out", type=Path, default=None, help="write results as JSON lines")
    score.add_argument("--html", type=Path, default=None, help="write a contact sheet sorted by score")
    score.add_argument(
        "--root", type=Path, default=None, help="folder that JSON lines' pictures must be in (default: theirs)"
    )
    score.add_argument("--top", type=int, default=20, help="rows of the table (0 = all)")
    check = command("check", "Print and check every target of prompt files.")
    check.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    several = commands.add_parser("try", help="Score pictures with several rewards, side by side.")
    several.add_argument("path", type=Path, help="a folder, a picture, or JSON lines, as for score")
    several.add_argument("--rewards", nargs="+", required=True, metavar="REWARD", help="names, or module:Class")
    several.add_argument(
        "--option", action="append", default=[], metavar="REWARD.KEY=VALUE", help="option of one of them"
    )
    several.add_argument("--video", default=None, help="how frames are combined: mean, min, max, median, first, last")
    several.add_argument("--html", type=Path, default=Path("rewards.html"), help="the page (default rewards.html)")
    several.add_argument("--root", type=Path, default=None, help="folder that JSON lines' pictures must be in")
    several.add_argument("--top", type=int, default=20, help="rows of the table (0 = all)")
    prompts = commands.add_parser("prompts", help="Check or divide prompt files.").add_subparsers(
        dest="part", required=True
    )
    look = prompts.add_parser(
        "check", help="Counts, first lines, repeated texts, what rewards need, every broken line."
    )
    look.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_FOLDER")
    look.add_argument("--rewards", nargs="+", default=[], metavar="REWARD", help="whose targets are looked for")
    look.add_argument("--option", action="append", default=[], metavar="REWARD.KEY=VALUE", help="option of one of them")
    divide = prompts.add_parser("split", help="Hold texts out, the same ones as a trainer without data.val_file.")
    divide.add_argument("path", type=Path, metavar="FILE")
    divide.add_argument(
        "--share", type=float, default=HELD_OUT_SHARE, help="of the texts that is held out (default 0.1)"
    )
    divide.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="default: the file's own folder")
    serve = command("serve", f"Serve a reward over HTTP. The bearer token is read from {TOKEN_ENV}.")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8100)
    serve.add_argument("--threads", type=int, default=1, help="batches scored at a time")
    serve.add_argument("--timeout-s", type=float, default=120.0, help="longest time of a request")
    serve.add_argument("--max-body-mb", type=int, default=64)
    serve.add_argument("--max-queue", type=int, default=2048, help="samples waiting or being scored")
    commands.add_parser("list", help="List the rewards that can be loaded.")
    return top


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value that is JSON is read as JSON."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise RewardConfigError(f"--option {pair!r} is not of the form KEY=VALUE.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def rewards_of(names: Sequence[str], pairs: Sequence[str], video: str | None) -> dict[str, Reward]:
    """Rewards by name, each with its own options."""
    options: dict[str, list[str]] = {name: [] for name in names}
    require(len(options) == len(names), "--rewards names one twice.")
    for pair in pairs:
        owner = next((name for name in names if pair.startswith(f"{name}.")), None)
        if owner is None:
            raise RewardConfigError(
                f"--option {pair!r} is not of the form REWARD.KEY=VALUE with one of {', '.join(names)}."
            )
        options[owner].append(pair.removeprefix(f"{owner}."))
    return {name: load(name, video=video, **options_of(given)) for name, given in options.items()}


def table(names: Sequence[str], results: Sequence[RewardResult], limit: int) -> str:
    """Best first: score, picture, components."""
    order = by_score(results)
    shown = order[:limit] if limit > 0 else order
    width = max([len(names[i]) for i in shown] + [7])
    columns = list(dict.fromkeys(key for i in shown for key in results[i].components))
    lines = [f"{'score':>10}  {'picture':<{width}}  " + "  ".join(columns)]
    for i in shown:
        result = results[i]
        if result.ok:
            cells = "  ".join(
                f"{result.components[c]:>{len(c)}.4g}" if c in result.components else " " * len(c) for c in columns
            )
            lines.append(f"{result.score:>10.4g}  {names[i]:<{width}}  {cells}")
        else:
            lines.append(f"{'-':>10}  {names[i]:<{width}}  {(result.error or '').splitlines()[0]}")
    if len(shown) < len(order):
        lines.append(f"... {len(order) - len(shown)} more")
    return "\n".join(lines)


def run_score(reward: Reward, arguments: argparse.Namespace) -> int:
    """`score`."""
    names, results, kept = [], [], []
    with open(arguments.out or os.devnull, "w", encoding="utf-8") as out:
        for batch in read_samples(arguments.path, arguments.root, reward.batch_size):
            scored = iter(reward.score([item.sample for item in batch if item.error is None]))
            for item in batch:
                result = next(scored) if item.error is None else RewardResult.failed(item.error)
                names.append(item.name)
                results.append(result)
                if arguments.html is not None:
                    kept.append(item.sample)
                score = result.score if result.ok else None
                row = {"image": item.name, "score": score, "components": result.components, "error": result.error}
                out.write(json.dumps({**row, "prompt": item.sample.prompt}, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(contact_sheet(kept, results, f"{reward.name}: {arguments.path}"), encoding="utf-8")
    print(table(names, results, arguments.top))
    failed = sum(not result.ok for result in results)
    if failed:
        print(f"{failed} of {len(results)} have no score.", file=sys.stderr)
    return 1 if failed else 0


def run_try(rewards: dict[str, Reward], arguments: argparse.Namespace) -> int:
    """`try`: a table of all rewards, the best of the first one on top, and the page."""
    samples: list[RewardSample] = []
    pictures: list[str] = []
    results: dict[str, list[RewardResult]] = {name: [] for name in rewards}
    for batch in read_samples(arguments.path, arguments.root, max(reward.batch_size for reward in rewards.values())):
        for name, reward in rewards.items():
            scored = iter(reward.score([item.sample for item in batch if item.error is None]))
            results[name] += [RewardResult.failed(one.error) if one.error else next(scored) for one in batch]
        pictures += [thumbnail(item.sample.image) for item in batch]
        samples += [replace(item.sample, image=NO_PICTURE, uid=item.name) for item in batch]  # a camera roll is large
    order = by_score(results[arguments.rewards[0]])
    shown = order[: arguments.top] if arguments.top > 0 else order
    width = max([len(samples[i].uid) for i in shown] + [7])
    print(f"{'picture':<{width}}  " + "  ".join(f"{name:>10}" for name in rewards))
    for i in shown:
        cells = (f"{r[i].score:.4g}" if r[i].ok else "-" for r in results.values())
        row = "  ".join(f"{cell:>{max(len(name), 10)}}" for name, cell in zip(rewards, cells, strict=True))
        print(f"{samples[i].uid:<{width}}  {row}")
    if len(shown) < len(order):
        print(f"... {len(order) - len(shown)} more")
    page = side_by_side(samples, results, f"{', '.join(rewards)}: {arguments.path}", pictures)
    arguments.html.write_text(page, encoding="utf-8")
    print(f"side by side: {arguments.html}")
    failed = [(name, i) for name, found in results.items() for i, one in enumerate(found) if not one.ok]
    for name, i in failed[:5]:
        print(f"{samples[i].uid}, {name}: {(results[name][i].error or '').splitlines()[0]}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(samples) * len(rewards)} have no score.", file=sys.stderr)
    return 1 if failed else 0


def run_prompts(arguments: argparse.Namespace) -> int:
    """`prompts check` and `prompts split`."""
    if arguments.part == "check":
        rewards = rewards_of(arguments.rewards, arguments.option, None)
        said, problems = check_lines(arguments.paths, list(rewards.values()))
        print("\n".join([*said, f"{problems} problems" if problems else "no problem"]))
        return 1 if problems else 0
    train, trained, apart, validated = split(arguments.path, arguments.share, arguments.out)
    print(f"{train}: {trained} prompts to train on")
    print(f"{apart}: {validated} prompts to validate with")
    print(f"data.train_file={train} data.val_file={apart}")
    return 0


def run_check(reward: Reward, paths: Sequence[Path]) -> int:
    """`check`: a line for each prompt with what the reward will look for."""
    rows = read_prompts(paths)
    check_prompts(reward, ((row.where, row.prompt, row.metadata) for row in rows))
    for row in rows:
        target = reward.target_of(row.prompt, row.metadata)
        print(f"{row.where}: {row.prompt!r}" if target is None else f"{row.where}: {target!r}")
    print(f"{len(rows)} prompts, every target usable.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "list":
            for name, target in sorted(available().items()):
                print(f"{name:<24} {target}")
            return 0
        if arguments.command == "prompts":
            return run_prompts(arguments)
        if arguments.command == "try":
            return run_try(rewards_of(arguments.rewards, arguments.option, arguments.video), arguments)
        reward = load(arguments.reward, video=arguments.video, **options_of(arguments.option))
        if arguments.command == "score":
            return run_score(reward, arguments)
        if arguments.command == "check":
            return run_check(reward, arguments.paths)
        from .server import serve

        limits = Limits(
            body_bytes=arguments.max_body_mb << 20,
            queue_samples=arguments.max_queue,
            timeout_s=arguments.timeout_s,
            threads=arguments.threads,
        )
        serve(reward, host=arguments.host, port=arguments.port, token=os.environ.get(TOKEN_ENV, ""), limits=limits)
        return 0
    except (RewardError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RewardTargetError) else 2
