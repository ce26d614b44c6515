import pytest

from megatron_blackmamba.formats.run_folder import RunFolder, RunFolderError

FILES = ("config.yaml", "data_plan.json", "tokenizer.json", "checkpoints/latest", "lock", "done", "requeue")


@pytest.mark.parametrize("name", FILES)
def test_folder_in_place_of_file_is_refused(tmp_path, name):
    RunFolder(tmp_path).refuse_obstacles()
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(RunFolderError, match=rf"{name}: is a folder, .*Move it away"):
        RunFolder(tmp_path).refuse_obstacles()


@pytest.mark.parametrize("name", ["checkpoints", "logs", "verified", ""])
def test_file_in_place_of_folder_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir(exist_ok=bool(name)) if name else None
    (tmp_path / "run" / name).touch() if name else (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match=rf"{name}: is not a folder, .*Move it away"):
        RunFolder(tmp_path / "run").refuse_obstacles()
