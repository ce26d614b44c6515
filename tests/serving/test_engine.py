"""The engine, mostly one turn at a time and without its thread."""

from collections.abc import Iterator
from contextlib import nullcontext
from queue import Queue
from threading import Thread
from time import sleep

import pytest
import torch

from megatron_blackmamba.inference import Generator, Sampling
from megatron_blackmamba.inference.decoder import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.serving.engine import Busy, Engine, Stopped
from megatron_blackmamba.serving.job import Failed, Job
from tests.inference.replayed import graphs
from tests.reference import tiny
from tests.reference.canonical import canonical

TEXTS = ["a state", "so it is", "what then, they said"]


def job_of(engine, text, new=10, **options):
    """A job whose pieces come to a list."""
    pieces = []
    prompt = engine.tokenizer.encode(text)
    options = {"sampling": Sampling(temperature=2.0, seed=3)} | options
    return Job([prompt], max_new_tokens=new, emit=pieces.append, **options), pieces


def turn(engine):
    engine._admit()
    engine._turn()


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@pytest.fixture(params=["r4r4", "r4a4", "captured"], ids=["recurrent", "attention", "captured"])
def engine(request, generator) -> Iterator[Engine]:
    """Yield an engine; `captured` steps as on a GPU."""
    layers = "r4r4" if request.param == "captured" else request.param
    decoder = Decoder(pack(canonical(tiny(layers=layers)), torch.float32))
    with graphs() if request.param == "captured" else nullcontext():
        yield Engine(Generator(decoder, generator.tokenizer))


def test_rows_join_and_leave_between_steps(engine):
    jobs = [job_of(engine, text, 6 + i, samples=2) for i, text in enumerate(TEXTS)]
    for job, _ in jobs:
        engine.submit(job)
        turn(engine)
        turn(engine)
    while engine.running:
        turn(engine)
    for (job, pieces), text in zip(jobs, TEXTS, strict=True):
        options = {"max_new_tokens": job.max_new_tokens, "sampling": job.sampling, "samples": 2}
        expected = engine.generator.generate_batch([text], **options)
        assert [text_of([p for p in pieces if p.row == row]) for row in (0, 1)] == expected


def test_a_long_prompt_does_not_hold_up_others(engine):
    long, long_pieces = job_of(engine, "a" * 3_000, 1)
    short, short_pieces = job_of(engine, "so", 10, sampling=Sampling())
    engine.submit(long)
    engine.submit(short)
    for _ in range(12):
        turn(engine)
    assert short_pieces[-1].finished
    assert not long_pieces
    while engine.running:
        turn(engine)
    assert long_pieces[-1].finished


def test_jobs_without_room_wait(engine):
    engine.max_rows, engine.max_waiting = 2, 1
    first, _ = job_of(engine, "so", 4, samples=2, sampling=Sampling())
    second, pieces = job_of(engine, "so", 4, sampling=Sampling())
    engine.submit(first)
    turn(engine)
    engine.submit(second)
    with pytest.raises(Busy):
        engine.submit(job_of(engine, "so")[0])
    turn(engine)
    assert engine.running == 2
    assert not pieces
    while engine.running or engine.waiting:
        turn(engine)
    assert pieces[-1].finished == "length"


def test_cancelled_jobs_leave_wherever_they_are(engine):
    jobs = [job_of(engine, text)[0] for text in ("so", "a" * 5_000, "it")]
    for job in jobs:
        engine.submit(job)
    engine.max_rows = 2
    turn(engine)
    assert engine.running == 2
    for job in jobs:
        job.cancelled = True
    turn(engine)
    assert (engine.running, len(engine.waiting)) == (0, 0)


def test_an_error_fails_its_job_alone(engine):
    good, good_pieces = job_of(engine, "so", 4, sampling=Sampling())
    bad, bad_pieces = job_of(engine, "it", 8)
    for job in (good, bad):
        engine.submit(job)
        turn(engine)
    row = next(row for batch in engine.batches for row in batch.rows if row.job is bad)
    row.text = None  # what is written next cannot be added
    while engine.running:
        turn(engine)
    assert isinstance(bad_pieces[-1], Failed)
    assert good_pieces[-1].finished == "length"


class Dawdling(Job):
    """A job that gives other threads the processor when it is asked whether it is cancelled."""

    def __getattribute__(self, name):
        if name == "cancelled":
            sleep(0)
        return super().__getattribute__(name)


def test_error_between_jobs_does_not_end_the_engine(engine, monkeypatch):
    def broken(batch):
        raise RuntimeError("no memory left to sort rows")

    failing, later = (job_of(engine, text, 3)[0] for text in TEXTS[:2])
    pieces = Queue()
    failing.emit = later.emit = pieces.put
    engine.submit(failing)
    while not engine.batches:
        turn(engine)
    monkeypatch.setattr(engine, "_without_cancelled", broken)
    engine.start()
    try:
        while not isinstance(told := pieces.get(timeout=60), Failed):
            pass
        assert told.message == "the server failed; see its log"
        monkeypatch.undo()
        engine.submit(later)
        while not (told := pieces.get(timeout=60)).finished:
            pass
    finally:
        engine.stop()


def test_nobody_waits_for_an_engine_that_ended(generator, monkeypatch):
    engine, ended = Engine(generator), Queue()
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    monkeypatch.setattr(engine, "_admit", lambda: 1 / 0)
    engine.start()
    engine.submit(Job([[1]], Sampling(), 4, ended.put))
    assert isinstance(ended.get(timeout=60), Failed)
    engine._thread.join(60)
    assert not engine.works
    with pytest.raises(Stopped):
        engine.submit(Job([[1]], Sampling(), 4, ended.put))


def test_jobs_from_many_threads_all_end(generator):
    engine = Engine(generator, max_rows=8, max_waiting=10_000)
    ended = Queue()

    def submit():
        for _ in range(100):
            engine.submit(Dawdling([[1]], Sampling(), max_new_tokens=0, emit=ended.put))

    threads = [Thread(target=submit) for _ in range(4)]
    engine.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ended.get(timeout=60).finished for _ in range(400))
    engine.stop()
