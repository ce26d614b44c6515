"""Files, includes and overrides to a run; errors that name the key, the file and the nearest valid key."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_blackmamba import layers
from megatron_blackmamba.cli import app
from megatron_blackmamba.config import ConfigError, find, keys, load, shipped, spellings, to_yaml
from megatron_blackmamba.config.arguments import compose


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def refusal(*arguments):
    with pytest.raises(ConfigError) as refused:
        load(*arguments)
    return str(refused.value)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_run_loads_and_reads_back_same(name, tmp_path):
    run = load(name)
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert load(tmp_path / "again.yaml") == run


def test_the_papers_runs_have_its_steps_and_batches():
    small, large = load("blackmamba_1.5b"), load("blackmamba_2.8b")
    assert (small.steps, large.steps) == (145_322, 138_717)
    assert (small.tokens_per_step, large.tokens_per_step) == (2_064_384, 2_162_688)


def test_overrides_win_over_later_files_over_includes(write):
    write("base.yaml", "training: {tokens: 1000, global_batch: 4}\nname: base")
    write("deeper/child.yaml", "include: ../base.yaml\nname: child\ntraining: {seed: 5}")
    top = write("top.yaml", f"include: [{find('model/tiny')}, deeper/child.yaml]\ntraining: {{seed: 6}}")
    run = load(top)
    assert (run.name, run.training.tokens, run.training.seed) == ("child", 1000, 6)
    other = write("other.yaml", "training: {seed: 7}")
    assert load([top, other]).training.seed == 7
    assert load([top, other], ["training.seed=8"]).training.seed == 8


def test_path_in_file_is_relative_to_that_file(write):
    mixture = write("data/mix.yaml", "sources: []")
    run = write("runs/run.yaml", f"include: {find('tiny')}\ndata: {{kind: mixture, mixture: ../data/mix.yaml}}")
    assert load(run).data.mixture == str(mixture)
    run = write("runs/run.yaml", f"include: {find('tiny')}\nevaluation: {{every: 9, data: ../data}}")
    assert load(run).evaluation.data == str(mixture.parent)


def test_a_shipped_mixture_has_a_name(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write("run.yaml", f"include: {find('tiny')}\ndata: {{mixture: paper_mix}}")
    shipped = find("data/paper_mix")
    assert load(run).data.mixture == load("tiny", ["data.mixture=paper_mix"]).data.mixture == str(shipped)
    write("paper_mix", "sources: []")
    assert load("tiny", ["data.mixture=paper_mix"]).data.mixture == "paper_mix"


def test_a_tilde_in_a_path_is_the_home(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = write("run.yaml", f"include: {find('tiny')}\nfolder: ~/runs")
    run = load(file, ["data.mixture=~/mixture.yaml", "start.from=~/runs/other"])
    assert (run.folder, run.data.mixture, run.start.from_) == (
        "/home/me/runs",
        "/home/me/mixture.yaml",
        "/home/me/runs/other",
    )


@pytest.mark.parametrize(
    "override, hint",
    [
        ("model.expert=4", "did you mean 'model.experts'?"),
        ("stesp=60", "did you mean 'training.steps'?"),
        ("model.router.iteration=2", "did you mean 'model.router.iterations'?"),
        ("zzz=1", "a run has: name"),
        ("model.dropout=0.1", "there is no dropout"),
        ("device=cpu", "CUDA_VISIBLE_DEVICES="),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_one(override, hint):
    message = refusal("tiny", [override])
    assert override.split("=")[0] in message
    assert hint in message
    assert "command line" in message


@pytest.mark.parametrize("text", ["12:30", "1:30.5", "010", "2024-01-01", "off", "'2024'", "1e", "1.2.3"])
def test_names_that_look_like_numbers_stay_texts(write, text):
    run = load(write("run.yaml", f"include: {find('tiny')}\nname: {text}"))
    assert run.name == text.strip("'")


@pytest.mark.parametrize(
    "text, value",
    [("010", 10), ("0x10", 16), ("1_0", 10), ("+8", 8), ("1e1", 10), ("10.", 10), (".5e1", 5), ("0b11", 3)],
)
def test_numbers_are_read_as_they_look(write, text, value):
    parts = f"training: {{micro_batch: {text}, global_batch: {value}}}"
    assert load(write("run.yaml", f"include: {find('tiny')}\n{parts}")).training.micro_batch == value


def test_number_in_place_of_text_asks_for_quotes(write):
    assert "Put it in quotes" in refusal(write("run.yaml", f"include: {find('tiny')}\nname: 2024"))


def test_errors_name_the_file_that_holds_the_key(write):
    bad = write("bad.yaml", f"include: {find('tiny')}\ntraining: {{micro_bach: 4}}")
    assert str(bad) in refusal(bad)
    wrong = write("wrong.yaml", f"include: {find('tiny')}\ntraining: {{micro_batch: many}}")
    assert str(wrong) in refusal(wrong)
    assert "training.micro_batch='many'" in refusal(wrong)


def test_missing_value_names_the_file_of_its_section(write):
    part = write("part.yaml", "training: {micro_batch: 4, global_batch: 8}")
    top = write("top.yaml", f"include: [{find('model/tiny')}, part.yaml]\nname: mine")
    assert f"{part}: training.tokens: a value is missing" in refusal(top)


@pytest.mark.parametrize(
    "overrides, says",
    [
        (
            ["training.micro_batch=5"],
            "is not a multiple of training.micro_batch=5. Use training.micro_batch=4 or training.micro_batch=8.",
        ),
        (["parallel.expert=3"], "parallel.expert=3"),
        (["model.pattern=MM", "parallel.expert=2"], "has no layer with experts"),
        (["model.pattern=MX"], "found ['X']"),
        (["model.router.kind=dice"], "no such kind. Choose one of expert_bias, expert_choice, "),
        (
            ["model.router.aux_loss=0.1"],
            "sinkhorn does not read this key. Remove it, or choose model.router.kind=softmax",
        ),
        (["model.eod_reset=512"], "outside the vocabulary of 512"),
        (["data.kind=mixture"], "data.mixture"),
        (["optimizer.min_learning_rate=1"], "is above optimizer.learning_rate"),
        (["data.sequence_length=127", "parallel.tensor=2"], "sequence parallelism splits it"),
        (["kernels.scan=mamba_ssm", "parallel.context=2"], "kernels.scan=mamba_ssm takes no initial state"),
        (["name=a/b"], "'a/b'"),
        ([r'name="a\nb"'], r"'a\nb' cannot be one"),
        ([r'name="\e[31mred"'], r"'\x1b[31mred' cannot be one"),
        (["training.tokens=-1"], "training.tokens=-1"),
        (["model.pattern=M-"], "model.mlp_hidden_size"),
        (["model.pattern=MEM", "model.arrangement=parallel"], "the pattern has 3: make it even"),
        (["model.pattern=''"], "found nothing"),
        (["model.expert_hidden_size=null"], "set model.expert_hidden_size"),
        (["model.top_k=9", "model.router.kind=softmax"], "model.top_k=9 is more than model.experts=8"),
    ],
)
def test_impossible_combinations_are_refused_with_their_numbers(overrides, says):
    assert says in refusal("tiny", overrides)


DOUBLED = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "a: 1\na: 2", "- 1", "\x00", "a: b\n---\nc: d", "training:\n\ttokens: 5"),
        *("training: &a {tokens: *a}", "a: " + 5000 * "[", f"a0: &a0 x\n{DOUBLED}"),
        *("include: 5", "include: [5]", "include: {a: b}"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_config_is_named(write, text):
    said = refusal(write("broken.yaml", text))
    assert str(write("broken.yaml", text)) in said and "\n" not in said


@pytest.mark.parametrize(
    ("text", "advice"),
    [("pattern: *E*E", "in quotes"), ("a: 1\na: 2", "Remove one"), ("training:\n\ttokens: 5", "same indentation")],
)
def test_broken_yaml_is_answered_with_what_mends_it(write, text, advice):
    assert advice in refusal(write("broken.yaml", text))


def test_deeply_nested_overrides_are_text():
    with pytest.raises(ConfigError, match=r"training\.tokens="):
        load("tiny", ["training.tokens=" + 5000 * "["])


@pytest.mark.parametrize("key", ["name", "folder", "data.mixture"])
def test_names_of_files_contain_no_nul(write, key):
    section, _, last = key.rpartition(".")
    text = f'{last}: "a\\0b"'
    assert r"'a\x00b'" in refusal(write("nul.yaml", f"{section}: {{{text}}}" if section else text))


def test_a_circle_of_includes_is_shown(write):
    write("a.yaml", "include: b.yaml")
    circle = write("b.yaml", "include: a.yaml")
    assert "circle" in refusal(circle)


def test_an_unknown_name_lists_what_there_is():
    message = refusal("blackmamba_1.6b")
    assert "did you mean 'blackmamba_1.5b'?" in message
    assert "tiny" in message


def test_a_file_of_nearly_that_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert "did you mean 'mine.yaml'?" in refusal("mine")
    assert "did you mean 'mine.yaml'?" in refusal("mine.yml")
    assert "did you mean 'mine.yaml'?" in refusal("mien.yaml")
    assert "did you mean 'quickstart_transformer'?" in refusal("transformer")


@pytest.mark.parametrize(
    ("word", "key"), [("name", "name"), ("training.steps:", "training.steps"), ("lr", "optimizer.learning_rate")]
)
def test_key_without_value_is_no_config(word, key):
    assert f"write {key}=VALUE" in refusal(["tiny", word])


@pytest.mark.parametrize("name", ["", ".", "..", "/", "configs", "./"])
def test_a_folder_is_no_config(name):
    assert f"no config file {name!r}" in refusal(name)


@given(st.integers(1, 10**15))
def test_large_numbers_may_be_written_any_way(tokens):
    for text in (str(tokens), f"{tokens:_}", f"{tokens:e}".replace("+", "") if tokens % 10**9 == 0 else str(tokens)):
        assert load("tiny", [f"training.tokens={text}"]).training.tokens == tokens


def test_off_is_a_word_and_a_switch(write):
    file = write("run.yaml", f"include: {find('tiny')}\nlogging: {{wandb: off, tensorboard: off}}")
    run = load(file, ["training.guard.spike=off", "training.overlap=on", "checkpoint.asynchronous=no", "name=on"])
    assert (run.training.guard.spike, run.logging.wandb, run.name) == ("off", "off", "on")
    assert (run.training.overlap, run.logging.tensorboard, run.checkpoint.asynchronous) == (True, False, False)
    assert load(file, ["name=2024-01-01", "training.overlap=True"]).name == "2024-01-01"


def test_composed_config_is_yaml_and_matches_the_schema():
    printed = CliRunner().invoke(app, ["config", "tiny"]).stdout
    assert yaml.safe_load(printed)["model"]["pattern"] == "MEME"
    schema = yaml.safe_load(CliRunner().invoke(app, ["config", "--schema"]).stdout)
    assert {"model", "parallel", "data", "training"} <= schema["properties"].keys()


@pytest.mark.parametrize(
    "override, named",
    [
        ("kernels.linear=te", "kernels.linear=local"),
        ("kernels.scan=cpp", "auto, chunked or reference"),
        ("kernels.ssd=mamba_ssm", "auto, chunked or reference"),
        ("kernels.delta=triton", "auto, chunked or reference"),
    ],
)
def test_fp64_refuses_what_would_round(override, named):
    message = refusal("tiny", ["training.precision=fp64", override])
    assert override in message and named in message


@pytest.mark.parametrize(
    "name, near",
    [
        ("optimiser.beta1", "optimizer.beta1"),
        ("learning_rate", "optimizer.learning_rate"),
        ("training.tokns", "training.tokens"),
    ],
)
def test_unknown_names_in_resume_allow_are_refused(name, near):
    with pytest.raises(ConfigError, match=rf"resume\.allow={name}: unknown key; did you mean '{near}'"):
        load("tiny", [f"resume.allow=[{name}]"])


def test_resume_allow_takes_sections_and_old_names():
    names = ["optimizer", "training.tokens", "model.scan"]
    assert load("tiny", [f"resume.allow=[{','.join(names)}]"]).resume.allow == names


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *[("d_model", "model.hidden_size"), ("model.num_layers", "model.pattern"), ("max_steps", "training.steps")],
        *[("training.lr", "optimizer.learning_rate"), ("steps", "training.steps"), ("training.step", "training.steps")],
        *[("tensor-model-parallel-size", "parallel.tensor"), ("out_dir", "folder")],
    ],
)
def test_names_of_other_projects_lead_to_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"did you mean '{ours}'"):
        load("tiny", [f"{theirs}=4"])


def test_other_names_are_not_ours():
    known = {*keys(), "training.steps"}
    for ours, theirs in spellings.OTHER_NAMES.items():
        assert ours in known, ours
        assert not known & set(theirs.split())


def test_numbers_may_have_a_suffix():
    config = load("tiny", ["training.tokens=1.5M", "checkpoint.every=2k"])
    assert (config.training.tokens, config.checkpoint.every) == (1_500_000, 2000)
    assert load("tiny", ["training.tokens=300B"]).training.tokens == 300 * 10**9
    assert load("tiny", ["training.tokens=4.1B"]).training.tokens == 4_100_000_000
    assert load("tiny", ["name=300B"]).name == "300B"
    for wrong in ("training.tokens=1.5", "training.tokens=0.1234567B1", "training.tokens=3X"):
        with pytest.raises(ConfigError, match=r"training\.tokens"):
            load("tiny", [wrong])


def test_steps_are_turned_into_tokens():
    config = load("tiny", ["training.steps=30", "training.global_batch=8"])
    assert config.training.tokens == 30 * 8 * config.data.sequence_length
    for wrong in ("many", "0"):
        with pytest.raises(ConfigError, match=r"training\.steps=\S+: give a whole number of at least 1"):
            load("tiny", [f"training.steps={wrong}"])


def test_steps_and_tokens_that_disagree_are_refused(tmp_path):
    per_step = load("tiny").tokens_per_step
    wrong = rf"training\.steps=30 means training\.tokens={30 * per_step}, but training\.tokens=1000000\. Remove one"
    for overrides in (["training.steps=30", "training.tokens=1M"], ["training.tokens=1M", "training.steps=30"]):
        with pytest.raises(ConfigError, match=f"the command line: {wrong}"):
            load("tiny", overrides)
    file = tmp_path / "both.yaml"
    file.write_text("training: {steps: 30, tokens: 1000000}\n")
    with pytest.raises(ConfigError, match=f"both.yaml: {wrong}"):
        load(["tiny", file])
    assert load("tiny", ["training.steps=30", f"training.tokens={30 * per_step}"]).steps == 30


def test_later_source_decides_between_steps_and_tokens(tmp_path):
    file = tmp_path / "steps.yaml"
    file.write_text("training: {steps: 30}\n")
    assert load(["tiny", file]).steps == 30
    assert load(["tiny", file], ["training.tokens=1M"]).training.tokens == 1_000_000
    assert load(["tiny", file], ["training.steps=40"]).steps == 40


def test_one_value_may_stand_for_a_list():
    assert load("tiny", ["resume.allow=optimizer.clip"]).resume.allow == ["optimizer.clip"]


def test_a_mixture_is_what_trains(tmp_path):
    assert load("tiny", ["data.mixture=mix.yaml"]).data.kind == "mixture"
    run = tmp_path / "run.yaml"
    run.write_text(f"include: {find('tiny')}\ndata:\n  mixture: mix.yaml\n")
    assert load(run).data.kind == "mixture"
    assert load(run, ["data.kind=synthetic"]).data.kind == "synthetic"
    with pytest.raises(ConfigError, match="reads no mixture"):
        load("tiny", ["data.kind=synthetic", "data.mixture=mix.yaml"])


@pytest.mark.parametrize("overrides", ["model.experts=4", {"model.experts": 4}])
def test_overrides_are_a_list(overrides):
    with pytest.raises(ConfigError, match=r"overrides=.*: give a list such as \['model.experts=4'"):
        load("tiny", overrides)


EVERY_KIND = ["model.pattern=MSE*-", "model.mlp_hidden_size=64"]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.mlp_hidden_size=256", "only dense MLP layers (-) read it, and model.pattern=MEME has none"),
        ("model.attention.heads=3", "only attention layers (*)"),
        ("model.mamba2.head_dim=32", "only Mamba-2 layers (S)"),
        ("training.bucket_size=5", "training.overlap=false"),
    ],
)
def test_overrides_that_nothing_reads_are_noted(capsys, override, why):
    compose(["tiny", override])
    assert capsys.readouterr().err.startswith(f"blackmamba: {override} has no effect: {why}")
    compose(["tiny", override], quiet=True)
    compose(["tiny", *EVERY_KIND, "training.overlap=true", override.replace("heads=3", "heads=4")])
    compose(["tiny", "model.pattern=****"])  # the file sets experts, which this pattern does not have
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "change",
    [
        *("state_size=8", "conv_kernel=3", "expand=1", "dt_rank=3", "mamba2.head_dim=16", "mamba2.state_size=16"),
        *("experts=2", "top_k=2", "expert_hidden_size=32", "shared_expert_hidden_size=32", "mlp_hidden_size=32"),
        *("attention.heads=2", "attention.kv_heads=1", "router.kind=expert_bias"),
    ],
)
def test_layers_that_a_key_changes_read_it(change):
    before, after = load("tiny", EVERY_KIND).model, load("tiny", [*EVERY_KIND, f"model.{change}"]).model
    for kind in layers.all_kinds():
        same = kind.shapes(before) == kind.shapes(after) and kind.costs.flops(before, 64) == kind.costs.flops(after, 64)
        unread = layers.unread_keys(kind.letter)
        key = change.partition("=")[0]
        assert same or not {key, key.partition(".")[0]} & set(unread), kind.name


@pytest.mark.parametrize("spec", ["trunk", "trunk@80", "trunk/checkpoints/step_00000080"])
def test_trunk_in_file_is_relative_to_that_file(write, tmp_path, spec):
    (tmp_path / "trunk/checkpoints/step_00000080").mkdir(parents=True)
    file = write("mine.yaml", f"include: tiny\nstart: {{branch: {spec}}}\n")
    assert load(file).start.branch == f"{tmp_path}/{spec}"
    assert load(file, ["start.branch=elsewhere@7"]).start.branch == "elsewhere@7"


def test_include_finds_a_shipped_run(write):
    assert load(write("mine.yaml", "include: tiny\nname: mine\n")).model == load("tiny").model


def test_unknown_include_names_the_nearest_shipped_run(write):
    assert "did you mean the shipped 'quickstart'?" in refusal(write("mine.yaml", "include: quickstrat\n"))


@pytest.mark.parametrize(("text", "said"), [("", "is empty"), ("name: a\n", "has no model and no training section")])
def test_incomplete_run_is_told_how_to_begin(write, text, said):
    message = refusal(write("mine.yaml", text))
    assert f"mine.yaml: {said}" in message and "`include: tiny`" in message and "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sources:\n  - name: a\n", "is a mixture, not a run. A run reads it: blackmamba train quickstart data.mix"),
        ("about: x\nvariants: {}\n", "is a study, not a run. Run it with `blackmamba study"),
    ],
)
def test_other_kinds_of_files_are_recognised(write, text, said):
    assert said in refusal(write("mine.yaml", text))


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("n_layer=4", "'model.pattern'? (it has one letter per layer"),
        ("optimizer.warmup_steps=100", "'optimizer.warmup_fraction'? (it is a fraction"),
        ("lr_wsd_decay_iters=9", "'optimizer.decay_tokens'? (it counts tokens: steps"),
        ("rampup_batch_size=9", "'training.batch_ramp'? (it is a list of stages"),
        ("training.bf16=true", "'training.precision'? (it is bf16, fp32 or fp64)"),
    ],
)
def test_hint_says_what_our_key_means(override, hint):
    assert hint in refusal("tiny", [override])


def test_every_meaning_belongs_to_a_known_name():
    assert all(spellings.our_name(name) for names in spellings._MEANINGS for name in names.split())


def test_invalid_yaml_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntraining: {seed: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: not valid YAML: .* on line 3, column 1") as error:
        load(file)
    assert "unicode string" not in str(error.value)


def test_a_run_writes_to_no_object_storage():
    with pytest.raises(ConfigError, match=r"folder=s3://bucket/runs: a run writes to a folder of a file system"):
        load("tiny", ["folder=s3://bucket/runs"])


@pytest.mark.parametrize("tokens", ["1GB", "10Q", "3 B"])
def test_count_with_unknown_unit_names_the_known_ones(tokens):
    assert f"training.tokens={tokens!r}: write a whole number with K, M, B or T" in refusal(
        "tiny", [f"training.tokens={tokens}"]
    )


@pytest.mark.parametrize(("name", "remedy"), [("mine.yaml", "`blackmamba new mine` writes one"), ("runs/nope", "")])
def test_a_missing_file_is_no_shipped_run(name, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal(name)
    assert said.startswith(f"{name}: no such file (working folder: {tmp_path})") and said.endswith(remedy or ")")


@pytest.mark.parametrize("key", ["kernels.scan", "kernels.ssd", "kernels.delta"])
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_fp64_takes_backends_that_declare_it(key, backend):
    load("tiny", ["training.precision=fp64", f"{key}={backend}"])
