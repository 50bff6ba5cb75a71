"""SIGTERM and Ctrl-C at any moment: the run ends within the step, with a checkpoint of the last whole one, and says so."""

import json
import os
import signal
import time

import pytest
from harness import Fault, Run
from ray_trainer.interrupt import sigterm_interrupts


def test_sigterm_outside_the_steps_is_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_loading_it_ends_at_once(start, tmp_path, number):
    run = Run(start, tmp_path, [], Fault("ray_trainer.workers:ActorRolloutRefWorker.init_model", "hold", seconds=600))
    run.reached(400)
    run.program.signal(number)
    done = run.program.wait(200)
    assert done.code == 130, done.err[-3000:]
    assert "stopped at once" in done.err
    assert done.left_over == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_an_engine_loads_it_ends_at_once(start, tmp_path, number):
    pytest.importorskip("vllm_omni")
    run = Run(start, tmp_path, ["rollout.backend=vllm_omni"])
    run.program.until(lambda: run.processes("engine"), 400)
    time.sleep(3)  # it loads for half a minute
    run.program.signal(number)
    asked = time.monotonic()
    done = run.program.wait(200)
    assert done.code == 130, done.err[-3000:]
    assert time.monotonic() - asked < 60
    assert "stopped at once" in done.err
    assert not (run.run / "config.yaml").exists()  # nothing had begun
    assert done.left_over == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_a_long_update_it_ends_after_the_step(start, tmp_path, number):
    update = Fault("fsdp_diffusers_engine.engine:DiffusersFSDPEngine.optimizer_step", "hold", call=3, seconds=20)
    run = Run(start, tmp_path, [], update)
    run.reached(400)
    run.program.signal(number)
    done = run.program.wait(300)
    assert done.code == 130, done.err[-3000:]
    last = max(run.rows())
    assert 0 < last < 6
    assert f"stopped after step {last} of 6" in done.err
    assert json.loads((run.run / "checkpoints" / "latest.json").read_text()) == {"step": last}
    assert done.left_over == []
