"""A run with an extra depth (model.mtp) that is killed and goes on under other layouts, on documents of a corpus."""

import pytest

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.thorough import thorough
from tests.training.runs import losses, metrics
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("branches")
STEPS = 12
RUN = [
    *("data.kind=mixture", "data.sequence_length=16", "data.mask_first_token=true", "model.vocab_size=320"),
    *("model.pattern=M*ME", "model.attention.heads=4", "model.mtp.pattern=*E", "model.mtp.loss=0.5"),
    *("training.precision=fp64", "training.ema=0.9", f"training.steps={STEPS}", "model.eod_reset=0"),
    *("training.global_batch=8", "training.micro_batch=2", "training.evaluate_every=3", "training.evaluate_batches=2"),
    *("checkpoint.every=3", "checkpoint.asynchronous=false", "checkpoint.export_every=0", "parallel.expert=1"),
]
PIPELINE, CONTEXT = ["parallel.pipeline=2"], ["parallel.context=2"]
KILLED = [(4, [*PIPELINE, *CONTEXT], 4), (2, CONTEXT, 7), (2, PIPELINE, 10), (2, CONTEXT, None)]
"""Ranks, layout, and the step after which all ranks are killed; the last step is then not saved."""
EXACT = ("loss", "mtp_loss", "grad_norm", "validation/loss", "validation/ema_loss")


@pytest.fixture(scope="module", params=["true", pytest.param("false", marks=thorough)])
def runs(request, forks, raw, tmp_path_factory):
    """The folder of a run of one process, and that of one which is killed three times."""
    folder = tmp_path_factory.mktemp("ahead")
    run = [*RUN, f"data.mixture={raw}/mixture.yaml", f"model.tie_embeddings={request.param}"]
    alone = forks.run(folder / "alone", run, ranks=1)
    assert alone.wait() == [0], alone.output()
    for ranks, layout, until in KILLED:
        job = forks.run(folder / "killed", [*run, *layout], ranks=ranks, until=until)
        if until is None:
            assert job.wait() == [0] * ranks, job.output()
            break
        wait_until(lambda until=until: steps_of(folder / "killed") == until, job)
        job.kill()
        job.wait()
        job.go_on()
    return folder / "alone", folder / "killed"


def steps_of(folder):
    return len(losses(folder)) if RunFolder(folder / "run").metrics.exists() else 0


@pytest.mark.parametrize("metric", EXACT)
def test_killed_run_measures_what_one_process_does(runs, metric):
    alone, killed = ([record[metric] for record in metrics(each) if metric in record] for each in runs)
    assert len(alone) == (STEPS // 3 if metric.startswith("validation") else STEPS)
    assert alone == pytest.approx(killed, abs=1e-10)


@pytest.mark.parametrize("ema", [False, True])
def test_killed_run_saves_what_one_process_does(runs, ema):
    alone, killed = (dict(CheckpointReader(each / "run", ema=ema).tensors()) for each in runs)
    assert alone.keys() == killed.keys() and any(name.startswith("extra_depth.") for name in alone)
    assert max((alone[name] - killed[name]).abs().max() for name in alone) < 1e-10
