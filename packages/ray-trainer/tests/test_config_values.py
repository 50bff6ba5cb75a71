"""What a person types becomes a value by the type of its field, on the command line and in a recipe; every number has a range."""

import os
from typing import get_type_hints

import pytest
from annotated_types import Interval
from omni_rollout.allowed import kinds, walk
from ray_trainer.compose import compose
from ray_trainer.config import RunConfig, to_tree, to_yaml
from ray_trainer.errors import TrainerError
from ray_trainer.keys import check_values, known_keys
from ray_trainer.values import is_section


@pytest.fixture
def make(tmp_path):
    """A config over the tiny recipe, with the same values given on the command line or in a recipe."""

    def _make(*overrides, recipe=""):
        file = tmp_path / "r.yaml"
        file.write_text("base: builtin:tiny\n" + recipe, encoding="utf-8")
        return compose("flowgrpo", file, list(overrides))

    return _make


TEXTS = [
    *(
        "runs/exp #3",
        "#",
        "0012",
        "12e4567",
        "yes",
        "null",
        "true",
        "3.10",
        "2026-01-01",
        "1_000",
        " two  spaces ",
        "a,b",
    ),
    *(
        '"quoted"',
        "it's",
        "a: b",
        "[x",
        "{y}",
        "- z",
        "a=b=c",
        "!tag",
        "&anchor",
        "*star",
        "%",
        "@",
        "été 一 🙂",
        "\\n",
        "a\tb",
    ),
    *("???", "${nothing}", "0x10", "08", ".5", "-", "~later", "x\u2028y", "1:30"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_field_takes_the_text_as_typed(make, tmp_path, text):
    config, path = make(f"trainer.run_dir={text}"), os.path.abspath(text)
    assert config.trainer.run_dir == path
    again = tmp_path / "again.yaml"  # config.yaml is read back as it was
    again.write_text(to_yaml(config), encoding="utf-8")
    assert compose("flowgrpo", again, []).trainer.run_dir == path


def test_a_recipe_keeps_plain_texts_too(make):
    for text in ("0012", "12e4567", "yes", "3.10", "2026-01-01"):
        assert make(recipe=f"trainer: {{run_dir: {text}}}\n").trainer.run_dir == os.path.abspath(text)
    assert make(recipe="model: {architecture: null}\n").model.architecture is None
    assert make(recipe="model: {architecture: 'null'}\n").model.architecture == "null"
    assert make("model.architecture=null").model.architecture is None


def test_home_and_variables_are_expanded_in_paths_only(make, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    for typed, path in (("~/x", "/home/me/x"), ("$HOME/x", "/home/me/x"), ("${DATA}/x", "/data/x")):
        for key in ("trainer.run_dir", "model.path", "data.train_file", "data.val_file", "model.lora_adapter_path"):
            section, name = key.split(".")
            assert getattr(getattr(make(f"{key}={typed}"), section), name) == path
    assert make(recipe="trainer: {run_dir: ~/x}\n").trainer.run_dir == "/home/me/x"
    assert make("rollout.agent.default_agent_loop=~/x").rollout.agent.default_agent_loop == "~/x"


@pytest.mark.parametrize(("typed", "number"), [("0100", 100), ("1e3", 1000), ("10.0", 10), ("+7", 7), (" 8 ", 8)])
def test_whole_numbers(make, typed, number):
    assert make(f"trainer.total_steps={typed}").trainer.total_steps == number
    assert make(recipe=f"trainer: {{total_steps: {typed}}}\n").trainer.total_steps == number


@pytest.mark.parametrize("typed", ["10.5", "ten", "", "nan", "1e999999999", "0x10", "true", "[1]", "{a: 1}", "1 2"])
def test_what_is_no_whole_number_is_refused(make, typed):
    with pytest.raises(TrainerError, match=r"trainer\.total_steps in the command line must be a whole number"):
        make(f"trainer.total_steps={typed}")


def test_switches_numbers_lists_and_options(make):
    for typed, value in {
        "true": True,
        "YES": True,
        "1": True,
        "on": True,
        "False": False,
        "no": False,
        "0": False,
    }.items():
        assert make(f"actor.shuffle={typed}").actor.shuffle is value
        assert make(recipe=f"actor: {{shuffle: {typed}}}\n").actor.shuffle is value
    with pytest.raises(TrainerError, match="must be true or false, and '2' is none"):
        make("actor.shuffle=2")
    assert make("actor.optim.lr=1e-3").actor.optim.lr == 1e-3
    with pytest.raises(TrainerError, match="must be a number, and '1,5' is none"):
        make("actor.optim.lr=1,5")
    assert make("actor.optim.betas=[0.5, 9e-1]").actor.optim.betas == [0.5, 0.9]
    assert make("rollout.algo.sde_window_range=[0, 2.0]").rollout.algo.sde_window_range == [0, 2]
    assert make("model.policy_state_adapters=[default, 0012]").model.policy_state_adapters == ["default", "0012"]
    with pytest.raises(TrainerError, match=r"must be a list such as \[one, two\], and 'old' is none"):
        make("model.policy_state_adapters=old")
    assert make("model.target_modules=[to_q, to_k]").model.target_modules == ["to_q", "to_k"]
    assert make(r"model.target_modules=[a-z]+\.to_q").model.target_modules == r"[a-z]+\.to_q"
    options = make(
        "reward.options={a: 1e-3, b: 0100, c: [x, yes]}", "reward.options.d=null", "reward.options.e=1.5"
    ).reward
    assert options.options == {"a": 1e-3, "b": 100, "c": ["x", True], "d": None, "e": 1.5}


def test_options_are_read_back_as_they_were(make, tmp_path):
    options = {
        "a": 1e-5,
        "b": "1e-5",
        "c": "0100",
        "d": "yes",
        "e": None,
        "f": [True, "null", 3],
        "g": float("inf"),
        "h": "12:30",
    }
    config = make()
    config.reward.options = options
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert compose("flowgrpo", again, []).reward.options == options


def test_a_whole_value_may_be_another_keys(make):
    assert make("trainer.seed=7").model.lora_seed == 7  # the recipe says ${trainer.seed}
    assert make("model.lora_seed=${trainer.total_steps}", "trainer.total_steps=9").model.lora_seed == 9
    with pytest.raises(TrainerError, match="leads back to itself"):
        make("model.lora_seed=${trainer.seed}", "trainer.seed=${model.lora_seed}")


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        ("trainer: {seed: 1, seed: 2}\n", "stands twice"),
        ("trainer: {seed: [\n", "is no YAML"),
        ("trainer: 3\n", "is a section, but '3' was given"),
        ("app: dpo-online\n", "this program is flowgrpo"),
        ('trainer: {run_dir: "a\\0b"}\n', "must be a text in Unicode"),
    ],
)
def test_broken_recipes_are_named_in_one_line(make, recipe, complaint):
    with pytest.raises(TrainerError, match=complaint) as caught:
        make(recipe=recipe)
    assert "\n" not in str(caught.value)


def test_a_text_that_is_no_unicode_is_refused(make):
    with pytest.raises(TrainerError, match="must be a text in Unicode"):
        make("trainer.run_dir=" + os.fsdecode(b"caf\xe9"))


def has_numbers(kind):
    return any(part in (int, float) for part in walk(kind) if isinstance(part, type))


def _sections(schema=RunConfig):
    yield schema
    for kind in get_type_hints(schema).values():
        inner = is_section(kind)
        if inner is not None:
            yield from _sections(inner)


def test_every_number_has_a_range():
    free = [
        (section.__name__, name)
        for section in _sections()
        for name, kind in kinds(section).items()
        if has_numbers(kind) and not any(isinstance(part, Interval) for part in walk(kind))
    ]
    assert not free
    check_values(RunConfig, to_tree(RunConfig()))  # the defaults lie inside


@pytest.mark.parametrize(
    "key", [k for k, kind in known_keys().items() if has_numbers(kind) and is_section(kind) is None]
)
def test_numbers_outside_their_range_are_refused_with_the_range(make, key):
    whole = "float" not in str(known_keys()[key])
    for bad in ("-1e18", "1e30") if whole else ("nan", "inf", "-inf", "-1e300", "1e300"):
        text = f"[{bad}, {bad}]" if "list" in str(known_keys()[key]) else bad
        with pytest.raises(TrainerError, match=r"is out of range: .* must be .* to ") as caught:
            make(f"{key}={text}")
        assert str(caught.value).startswith(f"{key}=")


@pytest.mark.parametrize(
    "given",
    [
        *("actor.optim.lr=nan", "actor.optim.lr=-1", "actor.optim.lr=1e4", "trainer.seed=18446744073709551616"),
        *(
            "trainer.seed=-1",
            "actor.optim.betas=[0.9, 1.0]",
            "actor.optim.betas=[0.9]",
            "actor.fsdp_config.fsdp_size=0",
        ),
        *("rollout.val_kwargs.pipeline.height=0", "algorithm.step_fraction=0", "ray.object_store_mb=10"),
    ],
)
def test_the_cases_that_were_accepted(make, given):
    with pytest.raises(TrainerError, match=r"is out of range|must be a list of 2 numbers"):
        make(given)


def test_the_ends_of_a_range_are_accepted(make):
    config = make(f"trainer.seed={2**63 - 1}", "actor.optim.lr=1", "algorithm.step_fraction=1")
    assert (config.trainer.seed, config.actor.optim.lr) == (2**63 - 1, 1.0)


def test_an_empty_option_is_an_empty_text_and_a_reference_takes_its_keys_type(make):
    assert make("reward.name=http", "reward.options.url=").reward.options == {"url": ""}
    assert make("trainer.run_dir=${trainer.seed}", "trainer.seed=7").trainer.run_dir == os.path.abspath("7")
    with pytest.raises(TrainerError, match="trainer.total_steps in .* must be a whole number"):
        make("trainer.total_steps=${actor.optim.lr}")
