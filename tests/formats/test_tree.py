from megatron_blackmamba.formats.tree import files_under


def test_follows_links_and_survives_loops(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "far/x").touch()
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    (tmp_path / "a/b/far").symlink_to(tmp_path / "far")
    (tmp_path / "a/gone").symlink_to("nowhere")
    (tmp_path / "a/c").touch()
    found = [path.relative_to(tmp_path).as_posix() for path in files_under(tmp_path / "a")]
    assert found == ["a/b/far/x", "a/c", "a/gone"]
