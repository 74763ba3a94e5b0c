"""What a run keeps of its loggers."""

from __future__ import annotations

import pytest

from vlmrl.errors import StoreError
from vlmrl.store.manifest import read_remote, write_remote
from vlmrl.store.runs import create_run
from vlmrl.store.verify import verify_run


def test_each_logger_keeps_its_own(tmp_path):
    assert read_remote(tmp_path) == {}
    write_remote(tmp_path, "wandb", {"id": "a", "entity": None})
    write_remote(tmp_path, "Mine", {"n": 1})
    write_remote(tmp_path, "wandb", {"id": "b"})
    assert read_remote(tmp_path) == {"wandb": {"id": "b"}, "Mine": {"n": 1}}


def test_secrets_are_not_kept(tmp_path):
    write_remote(tmp_path, "x", {"api_key": "abc", "url": "https://user:secret1@there/", "id": "hf_" + "a1" * 16})
    assert "abc" not in str(read_remote(tmp_path)) and "secret1" not in str(read_remote(tmp_path))
    assert "hf_" not in str(read_remote(tmp_path))


@pytest.mark.parametrize(
    "content", ['{"schema": 1, "sinks": {"a"', "[]", '{"schema": 2, "sinks": {}}', '{"schema": 1, "sinks": {"a": 3}}']
)
def test_a_damaged_file_is_named_by_verify_and_replaced_by_the_next_write(tmp_path, content):
    run = create_run(tmp_path, kind="rl", recipe_name="r")
    run.finish()
    (run.dir / "sinks.json").write_text(content)
    with pytest.raises(StoreError, match=r"sinks\.json"):
        read_remote(run.dir)
    assert [p.where for p in verify_run(run.dir).errors] == [str(run.dir / "sinks.json")]
    write_remote(run.dir, "x", {})
    assert read_remote(run.dir) == {"x": {}} and not verify_run(run.dir).errors
