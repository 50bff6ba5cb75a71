"""Rows and who keeps them: what crosses the driver, who trains what, and what the driver's part of a step costs.

Many logical workers live in one other process. They are the real `Worker` with an engine that computes nothing; every call to them
crosses a pipe, serialised as Ray does it, so that bytes can be counted and the driver's time and memory are this process's own.
"""

import asyncio
import concurrent.futures
import itertools
import math
import multiprocessing
import threading
import time
from collections import deque
from contextlib import nullcontext
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import image_rewards.loop
import numpy as np
import omni_rollout.edit_loop
import psutil
import pytest
import ray
import ray_trainer.rollouts
import torch
from diffusion_losses import statistic
from flowgrpo.trainer import RayFlowGRPOTrainer
from fsdp_diffusers_engine.batch import mini_batches
from image_rewards import RewardResult
from image_rewards.functions import inputs_of
from image_rewards.loop import RewardLoopWorker
from image_rewards.registry import find
from omni_rollout.errors import ReplicaError
from omni_rollout.kept import with_latents
from omni_rollout.remote import Remote
from omni_rollout.replica import DiffusersReplica
from omni_rollout.router import Router
from omni_rollout.samples import parted, stacked
from ray import cloudpickle
from ray_trainer.compose import compose
from ray_trainer.group import WorkerGroup
from ray_trainer.prompts import Prompt
from ray_trainer.rollouts import FleetSampler, HybridSampler, Rollouts
from ray_trainer.rows import Store
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from safetensors.torch import load_file
from tensordict import TensorDict

RECIPES = Path(str(files("flowgrpo"))) / "recipes"
ELEMENTS = 2048
"""Of a latent: a trajectory of two steps takes 32 KiB, so that one that crosses the driver is seen."""


# ---- the other process -----------------------------------------------------------------------------------------------------


def row(request):
    """A sample whose numbers tell which it is, and whether it began from another one's."""
    start = getattr(request, "init_latents", None)
    number = lambda: float(int(request.uid.rpartition("/")[2]) * 1000 + request.index)  # noqa: E731
    value = number() if start is None else float(start[-1]) + 0.5
    data = {"responses": torch.full((3, 8, 8), 7, dtype=torch.uint8), "final_latents": torch.full((ELEMENTS,), value)}
    data |= {"latents": data["final_latents"].expand(2, -1), "next_latents": data["final_latents"].expand(2, -1)}
    data |= {"step_index": torch.tensor([0, 1]), "sigmas": torch.linspace(1, 0, 7), "std": torch.ones(2)}
    data |= {"rollout_log_probs": torch.full((2,), value), "prompt_embeds": torch.ones(9, 64)}
    data |= {"prompt_embeds_mask": torch.ones(9, dtype=torch.bool), "policy_version": torch.tensor(0)}
    return data | {"forwards": torch.tensor(6.0), "batch_rows": torch.tensor(1)}


class Drawn:
    """A backend."""

    def abort(self, request_ids):
        return len(request_ids)

    def generate(self, requests):
        return stacked([row(request) for request in requests])

    def draw(self, requests, owners=(), *latents):
        return parted(requests, self.generate(with_latents(requests, latents)), owners)


class Logical(Worker):
    """The real worker without an engine; what it is told to train, it remembers."""

    def __init__(self, config, rank):
        self.config, self.rank, self.version, self.backend, self.trained = config, rank, 0, Drawn(), []
        self.forms, self.taken, self.shares = [], [], []
        self.engine = SimpleNamespace(eval_mode=nullcontext)
        self.trainer = SimpleNamespace(train_mini_batch=self.train, compute_log_prob=self.score)
        self.rows = Store(("latents", "next_latents", "step_index", "sigmas", "rollout_log_probs", "final_latents"))

    def seen(self, data):
        """What decides how often the engine's ranks meet in a call."""
        self.forms.append((sorted(map(str, data.keys())), data["latents"].shape[1]))

    def forms_seen(self):
        return self.forms

    def train(self, data):
        self.seen(data)
        self.trained = list(
            zip(data["row"].tolist(), data["latents"][:, 0, 0].tolist(), data["advantages"][:, 0].tolist(), strict=True)
        )
        return {"statistics": {f"actor/number_{i}": statistic("mean", float(i), len(data)) for i in range(40)}}

    def score(self, data, adapter, share):
        self.shares.append(share)
        self.seen(data)
        means = data["latents"].clone()
        return TensorDict({"log_probs": data["rollout_log_probs"], "means": means}, batch_size=[len(data)])

    def what_was_trained(self):
        return self.trained

    def prompts_kept(self):
        return len(self.rows._prompts)

    def keep(self, rows, copies=False):
        self.taken.append((len(rows.keys), copies))
        return super().keep(rows, copies)

    def shares_scored(self):
        return self.shares

    def rows_taken(self):
        return self.taken


class RewardHere(RewardLoopWorker):
    """A pool's worker with a reward that looks at the first pixel, or the first latent."""

    def __init__(self, inputs):
        self._manager = SimpleNamespace(
            reward=SimpleNamespace(inputs=inputs),
            score=lambda samples: [RewardResult(float(s.image.flat[0] + s.index)) for s in samples],
        )


def serve(pipe):
    """Make actors, run their methods in order, keep what they return until somebody asks."""
    torch.set_num_threads(1)  # a fork has lost the threads that its parent computed with, and would wait for them
    actors, kept = {}, {}
    while True:
        message = pipe.recv_bytes()
        if not message:
            return
        dropped, what, *rest = cloudpickle.loads(message)
        for name in dropped:
            kept.pop(name, None)
        if what == "make":
            actors[rest[0]] = rest[1]()
        elif what == "call":
            actor, method, arguments, named, names = rest
            arguments = [kept[a.name] if isinstance(a, Reference) else a for a in arguments]
            try:
                answer = getattr(actors[actor], method)(*arguments, **named)
                answers = answer if len(names) > 1 else (answer,)
            except Exception as error:
                answers = [error] * len(names)
            for name, value in zip(names, answers, strict=True):
                kept[name] = packed(value)[0]
                kept[name] = cloudpickle.loads(kept[name][0], buffers=kept[name][1])
        elif what == "get":
            pipe.send_bytes(cloudpickle.dumps(packed(kept[rest[0]])[0], protocol=5))


def packed(value):
    """((pickle, buffers), their size) as Ray makes them: arrays out of band."""
    buffers = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=lambda b: buffers.append(bytes(b.raw())))
    return (data, buffers), len(data) + sum(map(len, buffers))


# ---- this process ----------------------------------------------------------------------------------------------------------


class Reference:
    """Stands for what a method returned, which stays in the other process until it is asked for."""

    def __init__(self, name, line=None):
        self.name, self.line = name, line  # without a line in the other process

    def __reduce__(self):
        return _plain, (self.name, b"the address of its owner, which Ray's references carry" * 2)

    def get(self):
        return self.line.fetch(self.name)

    def future(self):
        done = concurrent.futures.Future()
        done.set_result(self.get())
        return done

    def __await__(self):
        return self.get()
        yield

    def __del__(self):
        if self.line is not None:
            self.line.dropped.append(self.name)  # sent later: this may run in the middle of another message


def _plain(name, address):
    return Reference(name)


class Line:
    """The pipe, with a count of the bytes in both directions. It has Ray's face as far as the code under test looks at it."""

    exceptions = ray.exceptions

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        self.lock, self.names = threading.RLock(), itertools.count()
        self.sent = self.received = self.calls = 0
        self.seconds = 0.0  # that the pipe took this process, and Ray would not
        self.dropped = deque()

    def send(self, *message):
        with self.lock:
            start = time.thread_time()
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            self.pipe.send_bytes(cloudpickle.dumps((dropped, *message), protocol=5))
            self.seconds += time.thread_time() - start

    def fetch(self, name):
        with self.lock:
            self.send("get", name)
            start = time.thread_time()
            data, buffers = cloudpickle.loads(self.pipe.recv_bytes())
            self.seconds += time.thread_time() - start
            self.received += len(data) + sum(map(len, buffers))
        value = cloudpickle.loads(data, buffers=buffers)
        if isinstance(value, Exception):
            raise value
        return value

    def actor(self, make):
        name = next(self.names)
        self.send("make", name, make)
        return Handle(self, name)

    def remote(self, **needs):
        """Of the reward pool's workers."""
        return lambda _: SimpleNamespace(remote=lambda name, *_: self.actor(partial(RewardHere, inputs_of(find(name)))))

    def is_initialized(self):
        return True

    def kill(self, actor, no_restart=False):
        pass

    def get(self, references, timeout=None):
        return [r.get() for r in references] if isinstance(references, list) else references.get()

    def close(self):
        self.pipe.send_bytes(b"")
        self.process.join(10)


class Handle:
    """An actor's."""

    def __init__(self, line, name):
        self._line, self._name = line, name

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)
        return Method(self._line, self._name, method)


class Method:
    def __init__(self, line, actor, method, returns=1):
        self.line, self.actor, self.method, self.returns = line, actor, method, returns

    def options(self, num_returns=1, concurrency_group=None):
        return Method(self.line, self.actor, self.method, num_returns)

    def remote(self, *arguments, **named):
        names = [next(self.line.names) for _ in range(self.returns)]
        self.line.sent += packed((arguments, named))[1]
        self.line.calls += 1
        self.line.send("call", self.actor, self.method, arguments, named, names)
        made = [Reference(name, self.line) for name in names]
        return made if self.returns > 1 else made[0]


class Program:
    """The driver's part of flowgrpo over logical workers: the trainer's own methods, from the prompts to the update."""

    def __init__(self, line, monkeypatch, workers, samples, engines=0, *changes):
        size = [f"data.prompts_per_step={samples // 16}", "rollout.n=16", f"trainer.num_workers={workers}"]
        size += [f"actor.ppo_mini_batch_size={max(samples // 2, 1)}", "reward.batch_size=16", *changes]
        self.config = config = compose("flowgrpo", RECIPES / "tiny_flow_grpo.yaml", size)
        self.line, self.samples = line, samples
        self.group = group = WorkerGroup.__new__(WorkerGroup)
        group._ray, group.config, group.placement = line, config, SimpleNamespace(sharding="replicate")
        group.workers = [
            Remote(line.actor(lambda rank=rank: Logical(config, rank)), f"worker-{rank}") for rank in range(workers)
        ]
        self.sampler = HybridSampler(config, group)
        if engines:
            replicas = [DiffusersReplica(line.actor(Drawn), 16, f"replica-{i}") for i in range(engines)]
            self.sampler = FleetSampler(config, group, SimpleNamespace(router=Router(replicas)), False)
        monkeypatch.setattr(image_rewards.loop, "import_ray", lambda: line)
        monkeypatch.setattr(ray_trainer.scoring, "RewardLoopManager", image_rewards.loop.RewardLoopManager)
        self.trainer = made = RayFlowGRPOTrainer.__new__(RayFlowGRPOTrainer)
        made.config, made.workers, made._runner = config, group, asyncio.Runner()
        made.rollouts = Rollouts(config, self.sampler)
        text = (
            "a prompt of usual length, which says what should be in the picture, where, and in which colours and style"
        )
        self.prompts = [Prompt(f"{i}", f"{text} {i}", {"count": i}) for i in range(samples // 16)]

    def step(self, number=0):
        """A training step; what was trained, by row, and the metrics."""
        batch = self.trainer.generate_sequence(self.prompts, number)
        metrics = self.trainer.compute_rm_score(batch)
        data, prepared = self.trainer.prepare_update(batch, number)
        return batch, data, metrics | prepared | self.trainer.update_actor(data, number)

    def close(self):
        self.trainer.rollouts.close()
        self.trainer._runner.close()


@pytest.fixture
def program(monkeypatch):
    """Builds a `Program`; the other process ends with the test."""
    made = []

    def build(*arguments):
        line = Line()
        made.append((Program(line, monkeypatch, *arguments), line))
        return made[-1][0]

    yield build
    for one, line in made:
        one.close()
        line.close()


@pytest.mark.parametrize("engines", [0, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_row_is_trained_once_by_the_rank_that_keeps_it_with_its_own_advantage(program, workers, engines):
    made = program(workers, 64, engines)
    batch, data, metrics = made.step()
    assert metrics["actor/number_3"] == 3
    trained = [one for rank in made.group.call(Logical.what_was_trained) for one in rank]
    value = {
        int(uid.rpartition("/")[2]) * 1000 + int(index): float(advantage)
        for uid, index, advantage in zip(data["uid"], data["index"], data["advantages"][:, 0], strict=True)
    }
    assert sorted(row for row, _, _ in trained) == list(range(len(data)))
    assert {int(latent): advantage for _, latent, advantage in trained} == pytest.approx(value)
    assert max(made.group.call(Logical.prompts_kept)) <= len(made.prompts)
    shares = [len(rank) for rank in made.group.call(Logical.what_was_trained)]
    assert max(shares) <= 2 * math.ceil(32 / workers)  # evenly, in both mini-batches
    assert not {"latents", "prompt_embeds", "final_latents"} & set(batch.keys())


def test_a_failure_leaves_the_rows_of_every_worker_whether_they_were_trained_or_not(program, tmp_path):
    made = program(2, 32, 0, "algorithm.step_fraction=0.5", "algorithm.old_log_probs=trainer")
    batch = made.trainer.generate_sequence(made.prompts, 0)
    made.trainer.compute_rm_score(batch)
    made.trainer.prepare_update(batch[:20], 0)
    made.group.write_rows(tmp_path)
    files = [load_file(tmp_path / f"rows_rank{rank}.safetensors") for rank in (0, 1)]
    for place, (uid, index) in enumerate(zip(batch["uid"], batch["index"].tolist(), strict=True)):
        file, slot = files[int(batch["owner"][place])], int(batch["slot"][place])
        assert (file[f"{slot}/latents"] == float(int(uid.rpartition("/")[2]) * 1000 + index)).all()
        assert len(file[f"{slot}/latents"]) == (1 if place < 20 else 2)  # half of the window was chosen
        assert (f"{slot}/old_log_probs" in file) == (place < 20)
        assert file[f"{uid}/prompt_embeds"].shape == (9, 64)


def test_a_rank_whose_rows_were_all_left_out_meets_the_others_with_a_row_of_the_same_form(program):
    """Other steps or other tensors would mean other forward passes, in which sharded ranks wait for each other for ever."""
    keys = [
        "algorithm.step_fraction=0.5",
        "algorithm.old_log_probs=trainer",
        "actor.diffusion_loss.loss_mode=grpo_guard",
    ]
    made = program(4, 64, 0, *keys, "actor.diffusion_loss.ref_kl_coef=0.1", "algorithm.flat_groups=keep")
    batch = made.trainer.generate_sequence(made.prompts, 0)
    made.trainer.compute_rm_score(batch)
    data, _ = made.trainer.prepare_update(batch[batch["owner"] == 2][:3], 0)
    made.trainer.update_actor(data, 0)
    first, *others = made.group.call(Logical.forms_seen)
    assert len(first) == 3  # old, reference, update
    assert [steps for _, steps in first] == [1, 1, 1]
    assert {"old_log_probs", "old_means", "ref_means"} <= set(first[-1][0])
    assert others == [first] * 3
    assert sum(row >= 0 for rank in made.group.call(Logical.what_was_trained) for row, _, _ in rank) == 3


@pytest.mark.parametrize("workers", [1, 4])
def test_old_log_probs_are_scored_for_the_rows_after_the_first_optimizer_step(program, workers):
    """Those of the first mini-batch come with the update's own forward."""
    made = program(
        workers, 32, 0, "algorithm.old_log_probs=trainer", "actor.ppo_mini_batch_size=16", "actor.shuffle=true"
    )
    batch = made.trainer.generate_sequence(made.prompts, 0)
    made.trainer.compute_rm_score(batch)
    data, _ = made.trainer.prepare_update(batch, 0)
    first, later = mini_batches(made.trainer.config.actor, len(data), 0, planned=made.group.mini_batches)
    old = [
        made.group.of_rank(int(owner))[0].submit(Worker.give, [int(slot)])
        for owner, slot in zip(data["owner"], data["slot"], strict=True)
    ]
    old = torch.cat([rows.tensors["old_log_probs"] for rows in made.group._ray.get(old)])
    theirs = torch.tensor(
        [int(u.rpartition("/")[2]) * 1000.0 + int(i) for u, i in zip(data["uid"], data["index"], strict=True)]
    )
    assert torch.equal(old[later], theirs[later, None].expand(-1, 2))
    # A rank without a later row scores one of its own for nothing.
    assert float(old[first].isnan().float().mean()) > 0.5
    assert 0.2 < made.group.call(Logical.shares_scored)[0][0] < 0.8  # what the count of forwards goes by


@pytest.mark.parametrize("engines", [0, 3])
def test_a_row_crosses_to_its_owner_alone_and_is_written_once(program, tmp_path, engines):
    """Batches of engines lie across the borders between owners; the shuffle of the rows makes some move before the update."""
    made = program(5, 64, engines, "actor.shuffle=true")
    made.step()
    taken = [one for rank in made.group.call(Logical.rows_taken) for one in rank]
    moved = sum(rows for rows, copies in taken if copies)
    assert 0 < moved <= 64 // 4
    assert sum(rows for rows, copies in taken if not copies) == (64 if engines else 0)
    made.group.write_rows(tmp_path)
    values = [
        float(value[0, 0])
        for file in tmp_path.iterdir()
        for name, value in load_file(file).items()
        if name.endswith("/latents")
    ]
    assert len(values) == len(set(values)) == 64


def test_where_ranks_meet_in_each_pass_no_drawing_is_cut_short(program):
    made = program(3, 32)
    abort = lambda: made.trainer._runner.run(made.group.abort(["one"]))  # noqa: E731
    assert abort() == 3
    made.group.placement.sharding = "shard"
    before = made.line.calls
    assert abort() == 0
    assert made.line.calls == before


def test_samples_that_went_with_their_machine_are_a_failure_that_names_it(program):
    made = program(2, 32, 2)
    alive = {"NodeManagerAddress": "10.0.0.1", "Alive": True}
    made.line.nodes = lambda: [alive, {"NodeManagerAddress": "10.0.0.2", "Alive": False}]
    lost = ray.exceptions.ObjectLostError("ab" * 28, None, "")
    made.sampler.workers.keep = lambda rank, rows: Remote._answer(SimpleNamespace(name=f"worker-{rank}"), fails(lost))
    with pytest.raises(ReplicaError) as caught:
        made.trainer.generate_sequence(made.prompts, 0)
    said = "samples were lost with machine 10.0.0.2; look there, and at `ray status`"
    assert made.group.where(caught.value) == said


async def fails(error):
    raise error


def asked_for(index, prompt="a cat", uid="a/1"):
    names = {
        "uid": uid,
        "index": index,
        "prompt": prompt,
        "negative_prompt": None,
        "settings": None,
        "shown": ("pixels",),
    }
    return SimpleNamespace(**names)


def test_a_prompt_that_was_rewritten_under_its_uid_is_trained_with_its_own_embedding(tmp_path):
    store = Store(("latents",))
    for number, text in enumerate(("a cat", "a big cat", "a cat")):
        drawn = row(asked_for(number)) | {"prompt_embeds": torch.full((9, 64), float(len(text)))}
        store.keep(parted([asked_for(number, text)], stacked([drawn]))[2])
    assert store._tensors([0, 1, 2])["prompt_embeds"][:, 0, 0].tolist() == [5.0, 9.0, 5.0]
    store.write(tmp_path / "rows")
    written = load_file(tmp_path / "rows")
    assert sorted(float(v[0, 0]) for name, v in written.items() if name.endswith("/prompt_embeds")) == [5.0, 9.0]


def test_a_rank_keeps_no_memory_of_rows_that_another_rank_keeps():
    requests = [asked_for(index) for index in range(8)]
    samples = stacked([row(request) for request in requests])
    theirs = parted(requests, samples, [2 if index in (2, 5) else 1 for index in range(8)])[3]
    store = Store(("latents", "step_index"))
    assert store.keep(cloudpickle.loads(cloudpickle.dumps(theirs))) == [0, 1]
    kept = store.rows([0, 1]).tensors
    assert kept["latents"][:, 0, 0].tolist() == [1002.0, 1005.0]
    storages = {one["latents"].untyped_storage()._cdata: one["latents"].untyped_storage() for one in store._rows}
    assert sum(storage.nbytes() for storage in storages.values()) == 2 * 2 * ELEMENTS * 4


def measured(made, steps=2, enough=0.0):
    """Bytes a sample in both directions and calls of a step, the least seconds of the driver's in one, and its growth in bytes.

    A busy machine makes the same work take longer: a step that took no more than `enough` seconds is the last.
    """
    process, line, seconds = psutil.Process(), made.line, []
    for number in range(steps):
        before = line.sent, line.received, line.calls, line.seconds
        start, memory = time.process_time(), process.memory_info().rss
        made.step(number)
        seconds.append(time.process_time() - start - (line.seconds - before[3]))
        if seconds[-1] <= enough:
            break
    found = {"sent": (line.sent - before[0]) / made.samples, "received": (line.received - before[1]) / made.samples}
    found |= {"calls": line.calls - before[2], "seconds": min(seconds)}
    return found | {"memory": process.memory_info().rss - memory}


@pytest.mark.parametrize("engines", [0, 4])
def test_the_driver_moves_little_of_a_sample_whatever_the_number_of_workers(program, engines):
    found = {workers: measured(program(workers, 512, engines), steps=1) for workers in (1, 8, 64)}
    both = {workers: one["sent"] + one["received"] for workers, one in found.items()}
    assert all(size <= 2000 for size in both.values()), found  # a trajectory alone is 32,768 bytes, a picture 192
    # A worker's own share is that of its calls, whatever the samples.
    assert (both[64] - both[1]) * 512 <= 63 * 4000, found
    twice = measured(program(8, 1024, engines), steps=1)
    assert twice["sent"] + twice["received"] <= 1.05 * both[8], (twice, found)


@pytest.mark.parametrize("engines", [0, 4])
def test_what_an_edit_begins_from_goes_from_worker_to_worker(program, monkeypatch, engines):
    """Half of the samples are edited: the clean latents of the first turn are 8,192 bytes a sample."""
    monkeypatch.setattr(omni_rollout.edit_loop, "GOOD_ENOUGH", 15.0)  # the reward is 7 more than the index
    loop = ["rollout.agent.default_agent_loop=diffusion_judge_edit_agent", "rollout.agent.num_turns=2"]
    found = {}
    for workers in (1, 8):
        made = program(workers, 256, engines, *loop)
        found[workers] = measured(made, steps=1)
        assert found[workers]["sent"] + found[workers]["received"] <= 2000, found
        trained = [latent for rank in made.group.call(Logical.what_was_trained) for _, latent, _ in rank]
        values = [1000.0 * prompt + index + (0.5 if index < 8 else 0) for prompt in range(16) for index in range(16)]
        assert sorted(trained) == values  # each edit began from its own first turn


@pytest.mark.parametrize("engines", [0, 4])
def test_latents_that_a_reward_reads_do_not_pass_the_driver(program, tmp_path, engines):
    """They are 8,192 bytes of a sample."""
    file = tmp_path / f"first_latent_{engines}_of_a_test.py"
    file.write_text("def first(latents):\n    return 0.0\n")
    made = program(8, 64, engines, f"reward.name={file}:first")
    found = measured(made, steps=1)
    assert found["sent"] + found["received"] <= 3500, found  # of few samples, which share the calls' own bytes
    batch, _, _ = made.step(1)
    values = [
        int(uid.rpartition("/")[2]) * 1000 + 2 * i for uid, i in zip(batch["uid"], batch["index"].tolist(), strict=True)
    ]
    assert batch["rm_scores"][:, 0].tolist() == values


def test_what_the_driver_does_in_a_step_of_4096_samples(program):
    """64 logical workers; 2 % of a step of 60 s, and 1 GB."""
    found = measured(program(64, 4096), steps=8, enough=1.2)
    assert found["seconds"] <= 1.2, found
    assert found["memory"] <= 1e9, found
    assert found["sent"] + found["received"] <= 2000, found


def test_one_numpy_view_crosses_without_the_array_behind_it():
    rows = parted(
        [asked_for(0)] * 2,
        stacked([row(SimpleNamespace(uid="a/1", index=i)) for i in (0, 1)]),
    )[2]
    one = type(rows)({"latents": rows.tensors["latents"][:1]}, ["u"], [None], rows.prompts)
    (data, buffers), size = packed(one)
    assert size < 2 * 4 * ELEMENTS + 4000
    again = cloudpickle.loads(data, buffers=buffers)
    assert torch.equal(again.tensors["latents"], one.tensors["latents"])
    half = type(rows)({"a": torch.arange(6.0).bfloat16()}, ["u"], [None], {})
    assert np.array_equal(cloudpickle.loads(cloudpickle.dumps(half)).tensors["a"].float(), np.arange(6.0))
