"""`report RUN`: from the files alone, with what the run has otherwise than its recipe."""

from flowgrpo.cli import APP
from ray_trainer.app import parse
from ray_trainer.cli import run
from ray_trainer.config import to_yaml
from ray_trainer.report import differences_to_recipe
from run_report import MetricsWriter


def test_a_report_is_made_again_from_the_files(tmp_path, capsys):
    config, _ = parse(APP, ["actor.optim.lr=5e-4", "reward.options={check: true}", f"trainer.run_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with MetricsWriter(tmp_path) as writer:
        writer.append(1, {"reward/mean": 0.5})
    assert run(APP, ["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Other than the recipe" in page
    assert differences_to_recipe(tmp_path) == [("actor.optim.lr", 0.001, 0.0005), ("reward.options.check", None, True)]


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for arguments, said in (
        ([], "give one run folder"),
        ([str(tmp_path)], "no config.yaml in it"),
        (["a", "b"], "not a b"),
    ):
        assert run(APP, ["report", *arguments]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("app: flowgrpo\nrecipe: gone\n")
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    assert run(APP, ["report", str(tmp_path)]) == 2
    assert "metrics.jsonl line 1" in capsys.readouterr().err
    assert run(APP, ["report", "--help"]) == 0
