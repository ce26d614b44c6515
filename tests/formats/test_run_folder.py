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


def test_a_run_inside_another_run_is_refused(tmp_path):
    (tmp_path / "mine/checkpoints").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/latest").write_text("step_00000001\n")
    RunFolder(tmp_path / "mine").refuse_obstacles()
    with pytest.raises(RunFolderError, match=rf"lies in the folder of another run, {tmp_path}/mine\. To resume"):
        RunFolder(tmp_path / "mine/runs/mine").refuse_obstacles()
