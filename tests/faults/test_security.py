"""What an attacker may bring runs no code, leaves no folder, costs bounded memory and shows no secret: see SECURITY.md."""

import ast
import json
import pickle
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CANARY, SECRETS, Run, find_secret

ROOT = Path(__file__).resolve().parents[2]


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def evil(tmp_path):
    """(bytes of a pickle that would leave a file, that file)."""
    mark = tmp_path / "was_run"
    data = pickle.dumps(Evil(mark))
    pickle.loads(data)
    assert mark.exists()  # the attack is a real one
    mark.unlink()
    return data, mark


FORBIDDEN = {
    *("pickle.load", "pickle.loads", "dill.load", "joblib.load", "yaml.load", "yaml.unsafe_load", "marshal.loads"),
    *("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive", "os.system", "eval", "exec", "tempfile.mktemp"),
}
"""Calls that run what a file says, or write where an archive says."""


def test_no_product_code_can_run_what_it_reads():
    """Whatever an input holds: the calls by which Python would run it, or unpack it anywhere, are not there."""
    seen = 0
    for file in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            seen += 1
            name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            assert name not in FORBIDDEN, where
            assert name != "torch.load" or given["weights_only"] == "True", where
            assert given.get("trust_remote_code", "False") == "False", where
            assert given.get("allow_pickle", "False") == "False", where
            assert given.get("shell", "False") == "False", where
    assert seen > 5000


def test_pickles_in_place_of_a_checkpoints_files_are_refused(evil, tmp_path):
    from fsdp_diffusers_engine import CheckpointError
    from fsdp_diffusers_engine.checkpoint import load_rng, read_record, read_tensors
    from fsdp_diffusers_engine.sharding import Layout

    data, mark = evil
    folder = tmp_path / "step_000001"
    (folder / "weights").mkdir(parents=True)
    # `.metadata` is what torch's own checkpoints are read through, and it is a pickle there.
    for name in ("weights/model.safetensors", "weights/.metadata", ".metadata", "rng/0.safetensors", "engine.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    reads = (
        lambda: read_tensors(folder, {"model.a": torch.zeros(2)}, Layout()),
        lambda: load_rng(folder / "rng" / "0.safetensors", torch.device("cpu")),
        lambda: read_record(folder),
    )
    for read in reads:
        with pytest.raises(CheckpointError):
            read()
    assert not mark.exists()


def test_pickles_in_place_of_a_lora_or_a_request_are_refused(evil, tmp_path):
    from image_rewards import RewardInputError
    from image_rewards.wire import JSON_TYPE, TENSOR_TYPE, decode_samples
    from lora_sync import LoRASyncError, load_any
    from lora_sync.message import parse_header

    data, mark = evil
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "lora.bin"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LoRASyncError):
            load_any(tmp_path / name)
    with pytest.raises(LoRASyncError):
        parse_header(data)
    for kind in (JSON_TYPE, TENSOR_TYPE, "application/x-pickle"):
        with pytest.raises(RewardInputError):
            decode_samples(data, kind, 8)
    assert not mark.exists()


def test_a_model_folders_own_code_is_not_run(tmp_path):
    """A folder from the Hub may name code of its own; nothing here allows it."""
    from model_specs import get_spec
    from ray_trainer.assets import builtin

    folder, mark = tmp_path / "model", tmp_path / "was_run"
    shutil.copytree(builtin("models", "tiny_qwen_image"), folder)
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Evil: pass\n"
    for part, file in (("text_encoder", "config.json"), ("tokenizer", "tokenizer_config.json")):
        (folder / part / "evil.py").write_text(code)
        config = json.loads((folder / part / file).read_text())
        names = ("AutoConfig", "AutoModel", "AutoTokenizer")
        config["auto_map"] = dict.fromkeys(names, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", None]}
        (folder / part / file).write_text(json.dumps(config))
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder"] = ["transformers", "AutoModel"]  # a class that would look for the folder's code
    (folder / "model_index.json").write_text(json.dumps(index))
    spec = get_spec("qwen_image")
    spec.load_encoder(str(folder), torch.float32, torch.device("cpu"))  # by the installed class; no question is asked
    assert not mark.exists()
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
    with pytest.raises(ValueError, match="custom code"):  # only its own code could read it
        spec.load_encoder(str(folder), torch.float32, torch.device("cpu"))
    assert not mark.exists()


ESCAPES = ("../../escaped", "/tmp/escaped_by_name", "..", "a/b", "nul\0byte", "x" * 5000, "‮", "%2e%2e/x", "<script>")


def test_names_from_prompts_and_archives_leave_no_folder(tmp_path):
    """uids, prompts and metadata are content of files, never names of files."""
    from ray_trainer.failure import record_failure
    from ray_trainer.prompts import Prompt, load_prompts
    from run_report import load_validations, save_validation
    from tensordict import TensorDict

    place = tmp_path / "inner" / "run"
    place.mkdir(parents=True)
    records = [{"prompt": name, "uid": name, "seed": 0, "reward": 1.0, "components": {name: 1.0}} for name in ESCAPES]
    save_validation(place, 1, np.zeros((len(ESCAPES), 3, 8, 8), np.uint8), records)
    assert [record.uid for record in load_validations(place)[0].records] == list(ESCAPES)
    batch = TensorDict({name.replace("\0", "0"): torch.zeros(1) for name in ESCAPES}, batch_size=[1])
    prompts = [Prompt(name, name, metadata={"path": name}) for name in ESCAPES]
    _, lost = record_failure(place / "failures", 1, ValueError("\n".join(ESCAPES)), batch, prompts)
    assert lost == []
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": name, "metadata": {"uid": name}}) + "\n" for name in ESCAPES))
    assert [prompt.uid for prompt in load_prompts(str(file))] == [f"line{i + 1}" for i in range(len(ESCAPES))]
    assert {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")} == {"inner", "prompts.jsonl"}
    assert not Path("/tmp/escaped_by_name").exists()


@pytest.mark.parametrize(
    "name", ["../x", "a/../../b", "a/b/c", "/etc/passwd", "..", "a/..", ".hidden/x", "a//b", "a/b\n"]
)
def test_what_is_no_hub_id_is_never_asked_for(name, tmp_path, monkeypatch):
    from ray_trainer.models import is_hub_id

    monkeypatch.chdir(tmp_path)
    owner, _, rest = name.partition("/")
    assert not is_hub_id(name) or (".." not in (owner, rest) and "/" not in rest)


def test_bodies_of_the_image_route_are_bounded():
    from fastapi.testclient import TestClient
    from omni_rollout.config import DiffusionPipelineConfig
    from omni_rollout.openai_api import create_app

    async def draw(requests):
        raise AssertionError("nothing is drawn for such a body")

    route = TestClient(create_app(draw, DiffusionPipelineConfig(height=64, width=64)))
    sent = 0

    def endless():
        nonlocal sent
        while sent < 64 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    answer = route.post("/v1/images/generations", content=endless())
    assert answer.status_code == 400
    assert "longer than the limit" in answer.json()["error"]["message"]


def test_a_small_body_cannot_become_a_large_one():
    """Decompression and pictures are bounded before anything is unpacked."""
    import zlib

    from image_rewards import RewardInputError
    from image_rewards.wire import decode_picture, decompress

    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        decompress(bomb, "deflate", 1 << 20)
    header = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    with pytest.raises(RewardInputError):
        decode_picture(header + b"\0" * 64, "a picture")


SCRIPT = "</script></pre></title><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"' onmouseover=\"window.hit=1"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """report.html of a run whose every text is an attack."""
    from run_report import MetricsWriter, save_environment, save_validation, write_report

    run = tmp_path_factory.mktemp("planted") / "<script>window.hit=1<"
    for step in (0, 1):
        with MetricsWriter(run) as writer:
            writer.append(step, {"reward/mean": 0.5 + step, f"val/{SCRIPT}": 0.1, f"reward/{SCRIPT}": 0.2 + step})
        parts = {SCRIPT: 0.5, "strict": 1.0}
        records = [{"prompt": SCRIPT, "uid": SCRIPT, "seed": i, "reward": 0.5, "components": parts} for i in (0, 1)]
        save_validation(run, step, np.zeros((2, 3, 8, 8), np.uint8), records)
    (run / "config.yaml").write_text(f"trainer:\n  note: {SCRIPT}\n{SCRIPT}: 1\n")
    save_environment(run, {SCRIPT: SCRIPT})
    return write_report(run)


def test_texts_in_the_report_are_no_code(planted):
    text = planted.read_text()
    tags = Tags(text).tags
    assert sum(tag == "script" for tag, _ in tags) == 1  # the page's own
    assert not [tag for tag, _ in tags if tag == "img"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert text.count("window.hit=1") > 5  # shown, as text


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_texts_in_the_report_are_no_code_in_chromium(planted, tmp_path):
    page = planted.read_text().replace("<title>", "<title data-x=''>", 1)
    probe = "<script>document.title='hit:'+(window.hit||0)</script></body>"
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", probe))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", str(file)], capture_output=True, text=True, timeout=120)
    assert ">hit:0<" in done.stdout, done.stderr[-2000:]


def test_secrets_are_in_no_config_error_or_report(tmp_path, monkeypatch, capsys):
    """Tokens come by environment variables; a password that a person puts into an address is not repeated either."""
    from flowgrpo.cli import APP
    from image_rewards import RewardConfigError, RewardSample
    from image_rewards.http import HttpReward
    from ray_trainer.cli import run
    from run_report import save_environment

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert run(APP, ["--dry-run", f"trainer.run_dir={tmp_path / 'run'}"]) == 0
    assert run(APP, ["--dry-run", "reward.name=nothing"]) == 2
    reward = HttpReward("http://127.0.0.1:9/score", token_env="IMAGE_REWARDS_TOKEN", max_retries=0)
    failed = reward(RewardSample(np.zeros((3, 4, 4), np.uint8), "x"))
    with pytest.raises(RewardConfigError) as refused:
        HttpReward(f"http://me:{CANARY}@127.0.0.1:9/score")
    said = capsys.readouterr()
    environment = save_environment(tmp_path).read_text()
    for text in (said.out, said.err, repr(reward), str(failed.error), str(refused.value), environment):
        assert CANARY not in text


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("reward.options.headers={note: Bearer VALUE}", "the value of HF_TOKEN"),
        ("reward.options.api_key=typed-VALUE", "by its name a secret"),
        ("reward.several.mine={name: shapes, options: {password: [VALUE]}}", "by its name a secret"),
        ("reward.options.url=http://me:other@127.0.0.1:9/score", "an address with a user name in it"),
        ("model.path=https://VALUE@127.0.0.1:9/model", "an address with a user name in it"),
    ],
)
def test_a_config_that_holds_a_secret_is_refused_by_its_key(key, told, tmp_path, monkeypatch, capsys):
    from flowgrpo.cli import APP
    from ray_trainer.cli import run

    monkeypatch.setenv("HF_TOKEN", CANARY)
    folder = tmp_path / "run"
    assert run(APP, [key.replace("VALUE", CANARY), f"trainer.run_dir={folder}"]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert key.partition("=")[0] in said.err
    assert CANARY not in said.out + said.err
    assert "other" not in said.err
    assert not folder.exists()


def test_where_a_secret_lies_and_what_its_variable_is_called_may_stand_in_a_config(tmp_path, monkeypatch, capsys):
    from flowgrpo.cli import APP
    from ray_trainer.cli import run

    monkeypatch.setenv("SOME_KEY", str(tmp_path))
    monkeypatch.setenv("IMAGE_REWARDS_TOKEN", CANARY)
    served = "reward={name: http, options: {url: 'http://127.0.0.1:9/score', token_env: IMAGE_REWARDS_TOKEN}}"
    assert run(APP, [served, f"trainer.run_dir={tmp_path / 'run'}", "--dry-run"]) == 0
    assert CANARY not in capsys.readouterr().out


@pytest.mark.nightly  # with every change, test_report_trackers.py has the libraries alone
def test_no_tracker_and_no_other_file_of_a_run_is_told_a_secret(start, tmp_path):
    """Every library for real, offline; the home folder too is searched, where some of them write."""
    trackers, home = tmp_path / "run" / "trackers", tmp_path / "home"
    home.mkdir()
    where = {"HOME": str(home), "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    keys = ["trainer.total_steps=1", "trainer.trackers=[tensorboard,wandb,trackio,mlflow]"]
    done = Run(start, tmp_path, keys, env=where).program.wait()
    assert done.code == 0, done.err[-4000:]
    assert "warning" not in done.out + done.err
    for folder in (*(trackers / name for name in ("tensorboard", "wandb", "mlruns")), tmp_path / "trackio"):
        assert find_secret(folder, "jpeg_compressibility"), f"{folder} has no config that this search could read"
    assert CANARY not in done.out + done.err
    assert find_secret(tmp_path) == []
