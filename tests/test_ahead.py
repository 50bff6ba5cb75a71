"""`trainer.staleness=1`: the samples of a step are drawn and scored under the update before it. Programs run in this process."""

import asyncio
import hashlib
import threading
from types import SimpleNamespace

import dpo_online.cli
import flowgrpo.cli
import pytest
import ray_trainer.rollouts
import ray_trainer.trainer as loop
import torch
from fsdp_diffusers_engine.states import PolicyStatesMixin
from model_specs import tiny
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.router import Router
from omni_rollout.samples import parted
from ray_trainer.cli import run
from ray_trainer.group import WorkerGroup
from ray_trainer.workers import ActorRolloutRefWorker as Worker

PROGRAMS = {"flowgrpo": flowgrpo.cli.APP, "dpo-online": dpo_online.cli.APP}
RECIPES = {"flowgrpo": "tiny_flow_grpo", "dpo-online": "tiny_nft"}


class Events:
    """What happened, in order. A reward of step n + 1 is not given before the update of step n has begun."""

    def __init__(self, monkeypatch, gated):
        self.seen, self.gated, self.updating = [], gated, {}
        update, train = loop.RayDiffusionTrainer.update_actor, loop.RayDiffusionTrainer.sync

        def update_actor(trainer, data, step):
            self.note(f"update {step}")
            self.begun(step).set()
            return update(trainer, data, step)

        def sync(trainer, version):
            metrics = train(trainer, version)
            self.note(f"sync {version}")
            return metrics

        monkeypatch.setattr(loop.RayDiffusionTrainer, "update_actor", update_actor)
        monkeypatch.setattr(loop.RayDiffusionTrainer, "sync", sync)

    def note(self, what):
        if what not in self.seen:
            self.seen.append(what)

    def begun(self, step):
        return self.updating.setdefault(step, threading.Event())

    async def score_all(self, samples):
        return [await self.score(sample) for sample in samples]

    async def score(self, sample):
        """A number that depends on the picture."""
        step = int(sample.uid.split("/")[0].removeprefix("step")) if sample.uid.startswith("step") else 0
        while self.gated and step and not self.begun(step - 1).is_set():
            await asyncio.sleep(0.01)
        picture = torch.from_numpy(sample.image.reference.value["pixels"][sample.image.row])
        return SimpleNamespace(score=float(picture.float().std()), components={}, error=None, look=())


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Folder of a policy of two narrow blocks, as it does not matter what is drawn."""
    return tiny.build("qwen_image", tmp_path_factory.mktemp("model"))


@pytest.fixture
def program(one_process, monkeypatch, tmp_path, metric_rows, micro, narrow):
    """Runs a program here; (exit code, rows of its metrics, events)."""

    def start(app, *arguments, folder="run", gated=True):
        events = Events(monkeypatch, gated)
        drawing = Worker.generate

        def generate(worker, requests):
            events.note(f"draw {requests[0].uid.split('/')[0]}")
            return drawing(worker, requests)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "generate", generate)
            patch.setattr(one_process.Rewards, "score_all", lambda self, samples: events.score_all(samples))
            keys = [f"recipe={RECIPES[app]}", *micro, "trainer.save_every=2", f"model.path={narrow}"]
            keys.append(f"trainer.run_dir={tmp_path / folder}")
            code = run(PROGRAMS[app], [*keys, *arguments])
        return code, metric_rows(tmp_path / folder), events.seen

    return start


@pytest.mark.parametrize("app", PROGRAMS)
def test_by_turns_the_rewards_of_a_step_come_under_the_update_before_and_a_resumed_run_trains_on_the_same_rows(
    program, rewound, app, tmp_path
):
    code, rows, seen = program(app, "trainer.staleness=1")
    assert code == 0
    assert [e for e in seen if "val" not in e] == [
        *("sync 0", "draw step0", "draw step1", "update 0", "sync 1", "draw step2", "update 1", "sync 2", "draw step3"),
        *("update 2", "sync 3", "update 3", "sync 4"),
    ]
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert {row["rollout/refilled"] for row in rows} == {0}
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    rewound(tmp_path / "run", tmp_path / "killed", 2)
    code, again, seen = program(app, "trainer.staleness=1", "trainer.on_existing=resume", folder="killed", gated=False)
    assert code == 0
    assert seen[:3] == ["sync 2", "draw step3", "update 2"]  # those of step 2 were in the checkpoint
    assert again == rows


def test_the_first_samples_are_those_of_a_run_by_steps_and_the_next_are_older(program):
    _, ahead, _ = program("flowgrpo", "trainer.staleness=1", "trainer.total_steps=2", "trainer.save_every=0")
    _, steps, _ = program("flowgrpo", "trainer.total_steps=2", "trainer.save_every=0", folder="steps", gated=False)
    assert {key: value for key, value in ahead[0].items() if key in steps[0]} == steps[0]
    assert set(ahead[0]) - set(steps[0]) == {"rollout/staleness_mean", "rollout/staleness_max", "rollout/refilled"}
    assert ahead[1]["reward/mean"] != steps[1]["reward/mean"]


def test_what_the_policy_drew_before_the_run_went_back_is_not_trained(program):
    """The rule is broken once three steps lie before."""
    back = "trainer.watchdog.grad_norm={bound: -1, steps: 1, action: rollback}"
    code, rows, _ = program("flowgrpo", "trainer.staleness=1", "trainer.total_steps=5", "trainer.save_every=1", back)
    assert code == 0
    assert rows[3]["watchdog/went_back_to"] == 3
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1, 0]


def test_what_waited_under_another_config_is_drawn_anew(program, rewound, tmp_path):
    short = ["trainer.staleness=1", "trainer.total_steps=3"]
    program("flowgrpo", *short)
    rewound(tmp_path / "run", tmp_path / "killed", 2)
    change = ["actor.optim.lr=1e-4", "trainer.allow_config_change=[actor.optim.lr]", "trainer.on_existing=resume"]
    code, rows, _ = program("flowgrpo", *short, *change, folder="killed", gated=False)
    assert code == 0
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0]


class Fleet:
    """A replica with weights of its own, whose drawing needs the driver's event loop again and again."""

    def __init__(self, here, events, model):
        self.answer, self.events = here.Answer, events
        self.policy = DiffusersBackend.from_pretrained(str(model), max_batch_size=2)
        self.name, self.batch_size, self.router, self.fail = "replica-0", 2, Router([self]), 0

    async def draw(self, requests, owners=()):
        step = int(requests[0].uid.split("/")[0].removeprefix("step")) if requests[0].return_trajectory else 0
        while step and not self.events.begun(step - 1).is_set():  # under the update, or never
            await asyncio.sleep(0.01)
        self.events.note(f"draw {requests[0].uid.split('/')[0]}")
        facts, shown, rows = parted(requests, self.policy.generate(requests))
        return facts, self.answer(shown), {owners[0]: rows}

    async def abort(self, ids):
        return 0

    async def update_lora(self, payload, adapter, reference):
        return [self.policy.update_lora(reference.value, adapter)]

    async def close(self):
        pass


def test_replicas_draw_beside_the_update_and_all_is_drawn_before_the_weights_come(
    program, one_process, monkeypatch, tmp_path, metric_rows, micro, narrow
):
    events = Events(monkeypatch, gated=True)

    async def sampler(config, workers, say):
        return ray_trainer.rollouts.FleetSampler(config, workers, Fleet(one_process, events, narrow), False)

    monkeypatch.setattr(loop, "open_sampler", sampler)
    monkeypatch.setattr(one_process.Rewards, "score_all", lambda self, samples: events.score_all(samples))
    arguments = ["recipe=tiny_flow_grpo", *micro, "trainer.staleness=1", "rollout.max_batch_size=2"]
    arguments += ["rollout.num_replicas=2", f"trainer.run_dir={tmp_path / 'fleet'}", f"model.path={narrow}"]
    assert run(flowgrpo.cli.APP, arguments) == 0
    assert [e for e in events.seen if "val" not in e] == [
        *("sync 0", "draw step0", "update 0", "draw step1", "sync 1", "update 1", "draw step2", "sync 2"),
        *("update 2", "draw step3", "sync 3", "update 3", "sync 4"),
    ]
    rows = metric_rows(tmp_path / "fleet")
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1]
    # The same policy draws the same, whether it lies in the trainer or in a replica.
    _, embedded, _ = program("flowgrpo", "trainer.staleness=1", "rollout.max_batch_size=2", folder="embedded")
    for mine, theirs in zip(rows, embedded, strict=True):
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-4 if mine["step"] <= 2 else 0.02)


# ---- the policy that a loss compares with -------------------------------------------------------------------------------

NFT = ["recipe=tiny_nft", "algorithm.old_policy={decay_rate: 0.5, decay_max: 0.5}", "actor.ppo_mini_batch_size=3"]
LAG = ["actor.diffusion_loss.lag_kl_coef=0.1", "actor.diffusion_loss.clip_ratio=0.1"]
LAG += ["model.policy_state_adapters=[default,old]"]
ALL = ["model.lora_rank=0", "actor.optim.lr=1e-4"]
COMPARING = {
    "nft": NFT,
    "nft, old now and then": [*NFT, "algorithm.old_policy.update_every=2"],
    "awm": ["recipe=tiny_awm"],
    "awm with old": ["recipe=tiny_awm", "model.policy_state_adapters=[default,old]", "actor.ppo_mini_batch_size=3"],
    "nft, all weights": [*NFT, *ALL, "model.policy_state_adapters=[default,old,reference]"],
    "awm, all weights": ["recipe=tiny_awm", *ALL, "model.policy_state_adapters=[default,reference]"],
    "awm that lags": ["recipe=tiny_awm", *LAG, "algorithm.old_policy={decay_rate: 0.5, decay_max: 0.5}"],
}
EVERY_CHANGE = ("nft, old now and then", "awm, all weights", "awm that lags")


@pytest.fixture
def policies(program, monkeypatch):
    """Runs dpo-online; (rows, checksums of what drew each step's samples, and of the states that each step's loss read)."""

    def start(*arguments, **options):
        drew, read, now = {}, {}, []
        drawing, training, use = Worker.generate, Worker.update_actor, PolicyStatesMixin.use_adapter

        def checksum(worker, state):
            if worker.engine.lora:
                return worker.trainer.save_weights(state, version=0).hash
            digest = hashlib.sha256()  # of the copies as they lie: to use a state is what is watched here
            for value in worker.engine.states._tensors(state).values():
                digest.update(value.detach().numpy().tobytes())
            return digest.hexdigest()

        def generate(worker, requests):
            if requests[0].return_trajectory:  # not validation
                drew[requests[0].uid.split("/")[0]] = checksum(worker, requests[0].adapter)
            return drawing(worker, requests)

        def update_actor(worker, slots, numbers, tensors, step):
            now.append((worker, read.setdefault(f"step{step}", {})))
            try:
                return training(worker, slots, numbers, tensors, step)
            finally:
                now.clear()

        def using(engine, state):
            if now and state != "reference":
                worker, states = now[0]
                states[state] = checksum(worker, state)
            return use(engine, state)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "generate", generate)
            patch.setattr(Worker, "update_actor", update_actor)
            patch.setattr(PolicyStatesMixin, "use_adapter", using)
            code, rows, _ = program("dpo-online", *arguments, "trainer.staleness=1", **options)
        assert code == 0
        return rows, drew, read

    return start


@pytest.mark.parametrize(
    "keys",
    [  # with every change, the state `old` and the copy of the trained policy, an adapter and all weights
        pytest.param(keys, id=name, marks=() if name in EVERY_CHANGE else pytest.mark.nightly)
        for name, keys in COMPARING.items()
    ],
)
def test_a_batch_is_compared_with_the_policy_that_drew_it_also_after_a_resume(policies, rewound, tmp_path, keys):
    rows, drew, read = policies(*keys)
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1]
    lag = {"old"} if LAG[0] in keys else set()
    compared = {step: {c for state, c in states.items() if state not in lag} for step, states in read.items()}
    assert compared == {step: {checksum} for step, checksum in drew.items()}
    assert all(lag <= states.keys() for states in read.values())
    shared = "algorithm.old_policy.update_every=2" in keys  # by the first two
    assert len(set(drew.values())) == (2 if shared else 3)
    rewound(tmp_path / "run", tmp_path / "killed", 2)
    again, redrawn, reread = policies(*keys, "trainer.on_existing=resume", folder="killed", gated=False)
    assert again == rows
    assert redrawn == {"step3": drew["step3"]}
    assert reread == {step: read[step] for step in ("step2", "step3")}


def test_a_batch_that_is_drawn_again_is_compared_with_the_policy_of_the_second_time(policies, monkeypatch):
    """One sample of the second step has no score the first time, so that all of that step is drawn again."""
    score, lost = Events.score, [1]

    async def once(events, sample):
        result = await score(events, sample)
        if sample.uid.startswith("step1") and lost:
            lost.pop()
            result.score, result.error = float("nan"), "late"
        return result

    monkeypatch.setattr(Events, "score", once)
    rows, drew, read = policies(*NFT, "reward.policy=skip")
    assert [row["rollout/refilled"] for row in rows] == [0, 2, 0, 0]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 0, 1, 1]
    assert {step: set(states.values()) for step, states in read.items()} == {step: {c} for step, c in drew.items()}
    assert len(set(drew.values())) == 3  # the third step's were drawn before the second update, as the second's anew


def test_who_resumes_may_not_begin_to_draw_ahead_where_a_state_would_lack(program, micro, narrow, tmp_path, capsys):
    assert program("dpo-online", "trainer.total_steps=1", gated=False)[0] == 0
    more = ["trainer.staleness=1", "trainer.allow_config_change=[trainer.staleness]", "trainer.on_existing=resume"]
    keys = ["recipe=tiny_nft", *micro, f"model.path={narrow}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert run(PROGRAMS["dpo-online"], [*keys, *more]) == 2
    assert "trained with other tensors (trainer.staleness" in capsys.readouterr().err


# ---- the correction of what an older policy drew -------------------------------------------------------------------------


def test_weights_and_rejection_reach_the_update(program, monkeypatch):
    """The first step's samples are fresh, so that its ratios are 1 and what a cap or an interval does is known exactly."""
    seen = []
    each_row = WorkerGroup.each_row

    def noted(group, method, batch):
        seen.append(each_row(group, method, batch))
        return seen[-1]

    monkeypatch.setattr(WorkerGroup, "each_row", noted)
    fix, plain = "algorithm.rollout_correction", ["trainer.staleness=1", "actor.diffusion_loss.ref_kl_coef=0"]
    short = [*plain, "trainer.total_steps=2", "trainer.save_every=0"]

    def rows(*changes):
        seen.clear()
        code, found, _ = program("flowgrpo", *short, *changes, folder="-".join(changes).replace("/", "") or "plain")
        assert code == 0
        return found

    none = rows()
    assert not any(key.startswith("correction/") for key in none[0])
    decoupled = [f"{fix}.mode=decoupled", "algorithm.old_log_probs=trainer"]
    quarter = rows(*decoupled, f"{fix}.cap=0.25")
    assert quarter[0]["actor/grad_norm"] == pytest.approx(none[0]["actor/grad_norm"] / 4, rel=1e-4)
    assert quarter[0]["correction/weight_max"] == 0.25
    assert quarter[0]["correction/truncated"] == 1
    # The second step's are of the policy before: the numbers are those of the log-probs, by hand.
    both = seen[1]
    weights = rows(*decoupled)[1]
    delta = (seen[1][:, 0] - seen[1][:, 1]).double()
    assert both.shape == (6, 2, delta.shape[1])
    assert 0 < float(delta.abs().max()) < 0.1
    assert weights["correction/weight_mean"] == pytest.approx(float(delta.exp().mean()), rel=1e-6)
    assert weights["correction/weight_max"] == pytest.approx(float(delta.exp().max()), rel=1e-6)
    assert weights["correction/kl"] == pytest.approx(float(-delta.mean()), rel=1e-4, abs=1e-9)
    share = float(delta.exp().sum() ** 2 / (delta.exp().square().sum() * delta.numel()))
    assert weights["correction/effective_sample_share"] == pytest.approx(share, rel=1e-5)
    assert weights["actor/rollout_log_prob_diff_max"] == pytest.approx(float(delta.abs().max()), rel=1e-3)
    # Nothing has the ratio 2, so nothing is trained; and the clip around the policy that drew costs the fresh step nothing.
    bypass = rows(f"{fix}.mode=bypass", f"{fix}.reject=[2,3]")
    assert bypass[0]["correction/rejected"] == 1
    assert bypass[0]["actor/grad_norm"] == 0
    wide = rows(f"{fix}.mode=bypass", f"{fix}.reject=[0.5,2]")
    assert wide[0]["actor/grad_norm"] == pytest.approx(none[0]["actor/grad_norm"], rel=1e-5)
    assert wide[0]["correction/weight_mean"] == wide[0]["correction/effective_sample_share"] == 1
    assert wide[0]["forwards/log_prob"] == none[0].get("forwards/log_prob", 0) + delta.shape[1]
