"""The one step loop of every program here. An algorithm is a subclass with one hook.

    prompts → rollout (rewards asked for sample by sample) → prepare_update (hook) → optimizer steps → old policy → sync → row

`prepare_update` turns scored samples into what the engine trains on. Everything
else (validation, checkpoints, resume, failure, report) is here, once.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from run_report import (
    Alarm,
    LiveLine,
    MetricsWriter,
    ReportError,
    comparable,
    compare,
    load_changes,
    load_validations,
    read_metrics,
    save_alarms,
    save_changes,
    save_environment,
    save_validation,
    summarize,
    truncate_validations,
    working,
)
from run_report.trackers import Trackers
from tensordict import TensorDict

from . import checkpoint, resume, schema
from .ahead import Ahead, rows_of
from .config import RunConfig, to_tree
from .errors import Interrupted, TrainerError, TrainingFailed
from .failure import disk_full, first_cause, is_out_of_memory, less_memory, record_failure, words
from .group import WorkerGroup
from .interrupt import StopRequest
from .pictures import fetched
from .progress import Progress
from .prompts import Prompt, PromptSampler, load_prompt_sets
from .report import rebuild
from .rollouts import Rollouts, open_sampler
from .run_dir import open_run_dir
from .scoring import advantages
from .step_metrics import Clock, Metrics, forwards_per_sample
from .watchdog import MOST_RETURNS, Watchdog, check_held_out
from .workers import ActorRolloutRefWorker as Worker

R = TypeVar("R")


class RayDiffusionTrainer(ABC):
    """Runs a config to its end inside an existing Ray session.

    Args:
        config: checked by `validate_config`.
        echo: where lines for a person go.
    """

    def __init__(self, config: RunConfig, echo: Callable[[str], None] = print):
        self.config, self.echo, self._began = config, echo, time.monotonic()
        self._progress = Progress()
        self.options = {**self.OPTIONS, **config.algorithm.options}
        loop, data = config.trainer, config.data
        train, held_out = load_prompt_sets(data)
        self.prompts = PromptSampler(train, data, loop.seed)
        self.val_prompts = held_out[: data.val_max_prompts]
        self.inputs = {"data.train_file": self.prompts.prompts, "data.val_file": held_out}

    OPTIONS: ClassVar[dict[str, Any]] = {}
    """Names and defaults of an algorithm's own options; `self.options` is these with what `algorithm.options` gives."""

    # ---- the hook of an algorithm -------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """From scored samples to the rows that the engine trains on, and metrics of the preparation.

        Trajectories and embeddings stay in the workers, where `self.workers` prepares them; a batch here holds scores, names and
        numbers, and the small tensors [B, …] that this adds for the loss.
        """

    # ---- the loop --------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train from the beginning, or from the newest checkpoint of a resumed folder.

        Raises:
            Interrupted: a signal asked to stop; a checkpoint was written.
            TrainerError: the workers refused the model, or the checkpoint that should be resumed.
            TrainingFailed: something failed, named with its phase; the state of a step lies in the run folder.
        """
        with ExitStack() as stack:
            try:
                self._open(stack)
                stop = stack.enter_context(StopRequest())
                self._fit(stop)
            except Exception as error:
                if isinstance(error, ReportError):  # a damaged file of the run folder, which a person can mend
                    raise TrainerError(str(error)) from error
                # Ray's wrapper of a worker's TrainerError is one too, with a remote traceback as its message.
                if isinstance(error, TrainerError | TrainingFailed | Interrupted) and first_cause(error) is error:
                    raise
                raise self._failed(error) from error

    quiet = False
    """Say nothing but warnings, errors and the table at the end."""
    _phase = "load"

    @property
    def phase(self) -> str:
        """What is being done: load, rollout, reward, update, sync, validation, save or report."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name
        if self.live:
            self.live.busy(name)

    def say(self, line: str) -> None:
        """A line that `quiet` leaves out, unless it warns."""
        if not self.quiet or line.startswith("warning"):
            self.echo(line)

    ahead: Ahead | None = None
    """Draws each step's samples one step early, with `trainer.staleness=1`."""

    def _open(self, stack: ExitStack) -> None:
        loop = self.config.trainer
        # Workers first: what they refuse is refused before anything is written.
        with working(f"loading {self.config.model.path} in {loop.num_workers} training process(es)", self.say):
            self.workers = WorkerGroup(self.config)
        stack.callback(self._quietly, self.workers.close)
        for line in self.workers.placement.lines:
            self.say(line)
        self._runner = stack.enter_context(asyncio.Runner())
        own = self.config.shares_weights  # else replicas sample: engines compile when they start
        with nullcontext() if own else working("starting the replicas that sample", self.say):
            self.sampler = self._runner.run(open_sampler(self.config, self.workers, self.say))
        stack.callback(self._quietly, lambda: self._runner.run(self.sampler.close()))
        self.rollouts = Rollouts(self.config, self.sampler, self.workers)
        stack.callback(self._quietly, self.rollouts.close)
        if loop.staleness:
            self.ahead = ahead = Ahead(self.config, self.rollouts, self.workers, self.prompts, self._note)
            stack.callback(self._quietly, lambda: self._runner.run(ahead.close()))
        self.changes = resume.differences(self.config, self.inputs)
        self.run = open_run_dir(loop.run_dir, loop.on_existing)
        if not self.run.resuming:
            resume.begin(self.run, self.config, self.inputs)

    def _quietly(self, close: Callable[[], object]) -> None:
        """Close something; that it fails may not hide why the run ended."""
        try:
            close()
        except Exception as error:
            self.echo(f"while ending: {words(error)}")

    def _fit(self, stop: StopRequest) -> None:
        loop = self.config.trainer
        self.writer = MetricsWriter(self.run.path)
        done = self._resume()
        trackers = Trackers(
            loop.trackers,
            self.run.path,
            project=self.config.app,
            config=to_tree(self.config),
            config_text=self.run.config.read_text(encoding="utf-8"),
            first_step=done + bool(done),
            note=self._note,
        )
        with trackers as self.trackers, self._line(done) as live:
            self.live = live
            if done == 0 and loop.val_before_train:
                self._guarded(0, lambda: self._append(0, self._validate(0)))
            while done < loop.total_steps:
                began = time.monotonic()
                self._guarded(done + 1, partial(self._step, done))
                done += 1
                if self._collapsed:
                    rebuild(self.run.path)
                    raise TrainingFailed(
                        f"the watchdog ended the run after step {done}: {self._collapsed}; change what docs/metrics.md advises, "
                        f"and go on from the checkpoint before with trainer.run_dir={self.run.path} trainer.on_existing=resume "
                        "trainer.allow_config_change=[…]"
                    )
                late = self._late(step_s=time.monotonic() - began)
                if (stop.requested or late) and done < loop.total_steps:
                    self._save(done)
                    rebuild(self.run.path)
                    told = (
                        f"stopped after step {done} of {loop.total_steps}; go on with trainer.run_dir={self.run.path} "
                        "trainer.on_existing=resume"
                    )
                    if stop.requested:
                        trackers.close()  # who stops to go on later has not failed
                        raise Interrupted(told)
                    self.echo(f"trainer.max_hours={loop.max_hours:g}: {told}")
                    return
        self._finish()

    @contextmanager
    def _line(self, done: int) -> Iterator[LiveLine]:
        """The live line; one that nobody sees where the run is quiet."""
        with (
            open(os.devnull, "w", encoding="utf-8") if self.quiet else nullcontext(sys.stdout) as stream,
            LiveLine(self.config.trainer.total_steps, first_step=done, stream=stream) as live,
        ):
            yield live

    def _late(self, step_s: float) -> bool:
        """Whether another step of this length would end after `trainer.max_hours`."""
        limit = self.config.trainer.max_hours * 3600
        return bool(limit) and time.monotonic() - self._began + step_s > limit

    live: LiveLine | None = None

    def _note(self, line: str) -> None:
        """Say something to a person, also while the live line is on the screen."""
        (self.live.note if self.live and not self.quiet else self.say)(line)

    def _resume(self) -> int:
        """Steps already done: 0, or those of the newest checkpoint, whose weights are then in the workers."""
        done = checkpoint.latest(self.run.checkpoints) if self.run.resuming else None
        if done is None:
            self.writer.truncate_after(-1)
            truncate_validations(self.run.path, -1)
        else:
            self.phase = "load"
            self.workers.call(Worker.load_checkpoint, str(checkpoint.step_folder(self.run.checkpoints, done)))
            self.writer.truncate_after(done)
            truncate_validations(self.run.path, done)
            self.say(f"resuming {self.run.path} after step {done}")
        save_alarms(self.run.path, done or 0, [])
        self.watchdog = Watchdog(self.config.trainer.watchdog, read_metrics(self.run.path))
        # Only now: what the workers refuse leaves the folder as it was.
        save_changes(self.run.path, done or 0, self.changes if done else [])
        resume.begin(self.run, self.config, self.inputs)
        save_environment(self.run.path, self.workers.call(Worker.describe)[0])
        # The first sync: no sample is drawn before the sampler has proved that it holds the trainer's weights.
        self.sync(done or 0)
        if done is not None and self.ahead and any(c.step == done for c in load_changes(self.run.path)):
            self._note("the config has changed, so the samples that waited for their step are drawn anew")
        elif done is not None and self.ahead:
            self._runner.run(self.ahead.load(checkpoint.step_folder(self.run.checkpoints, done), done))
        return done or 0

    def _guarded(self, step: int, work: Callable[[], None]) -> None:
        """Run one step; a failure leaves its state on disk and a checkpoint of the last whole step."""
        self._batch: TensorDict | None = None
        self._prompts: list[Prompt] = []
        try:
            work()
        except Exception as error:
            raise self._failed(error, step) from error

    def _failed(self, error: Exception, step: int | None = None) -> TrainerError | TrainingFailed:
        """What to raise for a failure: its phase, its first cause, what to change, and what it left behind.

        Args:
            error: what was caught.
            step: that failed, counted from 1; None outside the steps, where no state is written.
        """
        cause = first_cause(error)
        phase = "reward" if type(cause).__module__.startswith("image_rewards") else self.phase
        if step is None and phase == "load" and cause is not error and isinstance(cause, ValueError):
            return TrainerError(
                str(cause)
            )  # a worker refused what a person can mend: its words, not a remote traceback
        said = (hasattr(self, "workers") and self.workers.where(cause)) or words(error)
        message = f"{phase}: {said}" if step is None else f"step {step}, {phase}: {said}"
        if is_out_of_memory(error):
            message += f"; {less_memory(self.config, phase)}"
        full = disk_full(error, self.run.path) if hasattr(self, "run") else ""
        if full:
            message += f"; {full}"
        if step is None:
            if phase == "report":
                message += "\ntraining itself is done, and its last checkpoint is whole"
            return TrainingFailed(f"{message}\n{self._traceback(error)}")
        where, lost = record_failure(
            self.run.failures, step, error, self._batch, self._prompts, rows=self.workers.write_rows
        )
        if lost:
            traceback.print_exception(error, file=sys.stderr)
        notes = [*lost, f"its state is in {where}"]
        if step > 0 and self._updated < step and checkpoint.latest(self.run.checkpoints) != step - 1:
            try:
                self._save(step - 1)
            except Exception as second:
                notes.append(f"no checkpoint could be written after it: {words(second)}")
        if (self.run.checkpoints / "latest.json").exists():
            notes.append(f"go on with trainer.run_dir={self.run.path} trainer.on_existing=resume")
        return TrainingFailed("\n".join([message, *notes]))

    def _traceback(self, error: Exception) -> str:
        """Where the traceback of a failure outside the steps is: in the run folder where there is one, else shown by --debug."""
        if not hasattr(self, "run"):
            return "--debug prints its traceback"
        try:
            self.run.failures.mkdir(exist_ok=True)
            file = self.run.failures / "error.txt"
            text = "".join(traceback.format_exception(error))
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"its traceback is in {file}"
        except OSError as second:  # such as a full disk, perhaps the failure itself
            return f"--debug prints its traceback, which could not be written: {second}"

    _updated = 0
    """Steps whose update the workers' weights contain: after a failed step they may be saved only if it had not begun."""

    def _step(self, step: int) -> None:
        clock = Clock()
        self.phase = "rollout"
        batch = self.generate_sequence(self.prompts.at(step), step)
        clock.lap("time/rollout")
        self.phase = "reward"
        metrics = self.compute_rm_score(batch)
        self.phase = "update"
        self._runner.run(self.rollouts.leave_gpu())
        data, prepared = self._while_drawing(partial(self.prepare_update, batch, step))
        clock.lap("time/prepare")
        self._updated = step + 1
        if (
            self.config.keeps_drew and int(batch["policy_version"].min()) == step
        ):  # a fresh batch: the first, or drawn again
            self.workers.call(Worker.keep_drew)
        metrics |= prepared | self._while_drawing(partial(self.update_actor, data, step))
        metrics |= self.workers.call(Worker.refresh_old_policy, step)[0] | self.workers.call(Worker.take_forwards)[0]
        metrics["forwards/per_sample"] = forwards_per_sample(metrics, trained_share=len(data) / len(batch))
        clock.lap("time/update")
        if metrics.get("actor/skipped_steps"):
            named = next(filter(None, self.workers.call(Worker.bad_gradient)), "no one parameter alone")
            self._note(f"warning: step {step + 1}: an update was skipped, the gradient of {named} is not finite")
        self._warn_about_noise(metrics)
        metrics |= self._watch(step + 1, metrics)
        metrics |= self.sync(step + 1)
        clock.lap("time/sync")
        done, loop = step + 1, self.config.trainer
        if done == loop.total_steps or (loop.val_every and done % loop.val_every == 0):
            metrics |= self._validate(done)
            clock.lap("time/validate")
        metrics |= clock.laps | {
            "time/step": clock.total(),
            "perf/images_per_s": len(batch) / (clock.total() if self.ahead else clock.laps["time/rollout"]),
            "perf/max_memory_gb": max(self.workers.call(Worker.memory_gb)),
        }
        # The row first: a run killed in between resumes from the checkpoint before and writes the row again.
        self._append(done, metrics)
        if self._collapsed:
            return
        if done == loop.total_steps or (loop.save_every and done % loop.save_every == 0):
            self._save(done)

    _collapsed = ""
    """Why the watchdog ends the run."""

    def _watch(self, step: int, metrics: Metrics) -> Metrics:
        """Let the watchdog look at this step before its weights are used, and do what its rules say."""
        found: Metrics = {}
        for broken in self.watchdog.look(step, metrics):
            found[f"watchdog/{broken.name}"] = broken.value
            action = broken.rule.action
            good = checkpoint.before(self.run.checkpoints, broken.since - 1) if action == "rollback" else None
            if action == "rollback" and (good is None or self.watchdog.returns >= MOST_RETURNS):
                action = "stop"
            self._note(f"watchdog, step {step}: {broken.reason}: {action}")
            save_alarms(self.run.path, step, [Alarm(step, broken.name, action, broken.reason)])
            if action == "stop":
                self._collapsed = broken.reason
            elif good is not None:
                self.workers.call(Worker.load_checkpoint, str(checkpoint.step_folder(self.run.checkpoints, good)))
                if self.ahead:  # what waits is of the policy that collapsed
                    self._runner.run(self.ahead.close())
                self.watchdog.went_back()
                return found | {"watchdog/went_back_to": float(good)}
        return found

    _warned = False

    def _warn_about_noise(self, metrics: Metrics) -> None:
        """Say once when rollout and trainer differ by more than the loss's clip: it then cuts noise, not policy."""
        actor, rollout = self.config.actor, self.config.rollout
        loss, noise = actor.diffusion_loss, metrics.get("actor/noise_max", 0.0)
        if loss.limit is None or noise <= loss.limit or self._warned or metrics.get("rollout/staleness_max"):
            return
        self._warned = True
        micro, scored = actor.ppo_micro_batch_size_per_gpu, actor.log_prob_micro_batch_size_per_gpu
        remedies = []
        if self.config.algorithm.old_log_probs == "rollout":
            remedies.append("set algorithm.old_log_probs=trainer")
        elif scored not in (None, micro):
            remedies.append(f"set actor.log_prob_micro_batch_size_per_gpu={micro}, the size of the update's")
        if actor.fsdp_config.model_dtype != "fp32" or rollout.dtype != "float32":
            remedies.append("use float32 (actor.fsdp_config.model_dtype=fp32 rollout.dtype=float32)")
        remedies.append(f"raise actor.diffusion_loss.{loss.spec.limit}")
        self._note(
            f"warning: before the first update the policy seems to be {noise:.2e} away from the one that sampled, more than "
            f"{loss.spec.limit}={loss.limit:g}: {', or '.join(remedies)}"
        )

    def _while_drawing(self, work: Callable[[], R]) -> R:
        """Do work of the workers; where the next samples are drawn beside it, the event loop goes on meanwhile."""
        if self.ahead and self.ahead.drawing:
            return self._runner.run(asyncio.to_thread(work))
        return work()

    def _append(self, step: int, metrics: Metrics) -> None:
        self.trackers.row(step, self.writer.append(step, metrics))
        self.watchdog.remember(metrics)
        assert self.live is not None
        self.live.update(step, self._progress.shown(metrics))

    # ---- the steps of a step ---------------------------------------------------------------------------------------------

    def generate_sequence(self, prompts: list[Prompt], step: int) -> TensorDict:
        """Prompts [P] to samples [B = P·G], which the workers keep; their rewards are asked for on the way."""
        self._prompts = prompts
        if self.ahead:
            self._batch = self._runner.run(self.ahead.take(step))
            return self._batch
        self.workers.call(Worker.forget)
        drawn = self.rollouts.sample(rows_of(prompts, step), self.config.rollout.n, step=step, validate=False)
        self._batch = self._runner.run(drawn)
        return self._batch

    def compute_rm_score(self, batch: TensorDict) -> Metrics:
        """Check and describe the scores. They were asked for sample by sample while the others were still being drawn."""
        schema.check(batch, ("rm_scores",), "rollout and reward")
        metrics = self.rollouts.score_metrics(batch) | self.rollouts.fault_metrics()
        metrics["forwards/rollout"] = float(batch["forwards"].mean())
        metrics["rollout/batch_rows"] = float(batch["batch_rows"].float().mean())
        return metrics | (self.ahead.metrics if self.ahead else {})

    def compute_advantage(self, batch: TensorDict) -> tuple[TensorDict, Metrics]:
        """`advantages` [B, 1]: the reward of a sample against its own prompt's group, grouped by `uid`.

        A sample without a score leaves the batch, and so do those of groups with nothing to compare where
        `algorithm.flat_groups` is drop. The losses clamp advantages themselves, where they do.
        """
        result = advantages(self.config, batch)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        batch["advantages"] = result.advantages.to(torch.float32)[:, None]
        kept = result.mask if self.config.algorithm.flat_groups == "drop" else batch["rm_scores"][:, 0].isfinite()
        metrics["advantages/dropped"] = float((~kept).sum())
        return batch if bool(kept.all()) else batch[kept], metrics

    def update_actor(self, data: TensorDict, step: int) -> Metrics:
        """The optimizer steps of one training step, on every worker. A step with nothing to learn from changes nothing."""
        if len(data) == 0:
            return {"actor/skipped_updates": 1.0}
        return self.workers.update_actor(data, step)

    def sync(self, version: int) -> Metrics:
        """The trained adapters to every sampler; a receipt that does not match stops the run."""
        self.phase = "sync"
        if self.ahead:
            self._runner.run(self.ahead.drawn())
        return self._runner.run(self.sampler.sync(version))

    # ---- validation, checkpoints, end ------------------------------------------------------------------------------------

    def _validate(self, step: int) -> Metrics:
        self.phase = "validation"
        rows = [(f"val/{prompt.uid}", prompt) for prompt in self.val_prompts]
        batch = self._runner.run(self.rollouts.sample(rows, self.config.rollout.val_kwargs.n, step=step, validate=True))
        records = [
            {"prompt": prompt, "uid": uid, "seed": int(index), "reward": float(reward), "components": components}
            for prompt, uid, index, reward, components in zip(
                batch["prompt"],
                batch["uid"],
                batch["index"],
                batch["rm_scores"][:, 0],
                batch["reward_components"],
                strict=True,
            )
        ]
        folder = save_validation(self.run.path, step, fetched(batch["responses"]).numpy(), records)
        self.trackers.picture(step, folder / "grid.png")
        result = {"val/failed": self.rollouts.score_metrics(batch)["reward/failed"]}
        for name, value in summarize(load_validations(self.run.path)[-1]).items():
            result[f"val/{name}_mean"], result[f"val/{name}_stderr"] = value.mean, value.stderr
        check_held_out(self.config.trainer.watchdog, result)
        return result

    def _save(self, step: int) -> None:
        self.phase = "save"
        folder = checkpoint.step_folder(self.run.checkpoints, step)
        self.workers.call(Worker.save_checkpoint, str(folder), step)
        if self.ahead:
            self._runner.run(self.ahead.save(folder, step))
        checkpoint.publish(self.run.checkpoints, step, self.config.trainer.keep_checkpoints)

    def _finish(self) -> None:
        self.phase = "report"
        exported = self.workers.call(Worker.export, str(self.run.path))[0]
        report = rebuild(self.run.path)
        for line in self.summary():
            self.echo(line)
        for folder in exported:
            self.echo(f"weights {folder}")
        self.echo(f"report  {report}")

    def summary(self) -> list[str]:
        """What a person reads at the end: before → after of every validated number, with paired standard errors."""
        every, changes = load_validations(self.run.path), load_changes(self.run.path)
        validations = comparable(every, changes)
        lines = [f"from step {change.step} on with another {change}" for change in changes]
        if len(validations) < len(every):
            lines.append("validations before and after a change of what they measure are not compared")
        if len(validations) < 2:
            return lines
        first, last = validations[0], validations[-1]
        lines += [
            "",
            f"step {first.step} → {last.step} on {len(self.val_prompts)} held-out prompts × {self.config.rollout.val_kwargs.n} "
            "seeds (same prompts and seeds; ± is one standard error, clustered by prompt)",
        ]
        for change in compare(first, last):
            old, new, gain = change.before, change.after, change.difference
            errors = f"  ({change.z:+.1f} errors)" if math.isfinite(change.z) else ""
            lines.append(
                f"  {change.name:<12} {old.mean:.3f} ± {old.stderr:.3f}  →  {new.mean:.3f} ± {new.stderr:.3f}    "
                f"{gain.mean:+.3f} ± {gain.stderr:.3f}{errors}"
            )
        return [*lines, ""]
