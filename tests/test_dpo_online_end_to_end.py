"""dpo-online's real command on real Ray with fewer steps."""


def test_it_runs_and_counts_its_pairs(start, small, metric_rows, tmp_path):
    folder = tmp_path / "run"
    done = start("dpo-online", *small, "trainer.total_steps=2", f"trainer.run_dir={folder}").wait()
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    table = metric_rows(folder)
    assert [row["step"] for row in table] == [0, 1, 2]
    for row in table[1:]:
        assert row["pairs/pairs"] + row["pairs/tied_pairs"] + row["pairs/singleton_groups"] == 3
        assert row["actor/grad_norm"] > 0
    assert (folder / "lora" / "pytorch_lora_weights.safetensors").exists()
