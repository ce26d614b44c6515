"""Trainers to which something happens, made from the real one by replacing one of its parts."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import torch

from megatron_blackmamba.checkpoint import SaveError, lifecycle, manifest
from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import facts, hangs
from megatron_blackmamba.training.keep import saving
from megatron_blackmamba.training.keep.export_checks import ExportChecks
from megatron_blackmamba.training.loop import Trainer
from megatron_blackmamba.training.watch import stragglers

__all__ = [
    *(
        "EarlyNaN",
        "Edited",
        "KilledReplacing",
        "LastSaveFails",
        "MovingSource",
        "NaN",
        "NaNGradient",
        "Narrating",
        "OnlyNaN",
        "OtherData",
        "ReadsBackBadlyOnce",
        "Recording",
    ),
    *("Shift", "Sleeping", "SlowCheck", "Spike", "Stopped", "Trainer", "Watchful", "Weighing"),
    *(
        "NaNOnce",
        "NaNGradientOnce",
        "NaNWhileTraining",
        "FlippedNorm",
        "FlippedExpert",
        "FlippedRouter",
        "SlowLayer",
        "Stopped",
        "StoppedAtTheEnd",
    ),
]

BAD_SAMPLE = 16 * 20 + 5
"""In the batch of step 21."""


def waiting(trainer: type[Trainer], until: Path) -> type[Trainer]:
    """Have a trainer wait before steps larger than the number in a file, for as long as there is such a file."""

    class Waiting(trainer):
        def take_step(self):
            while (step := number_in(until)) is not None and self.progress.step >= step:
                self.watchdog.alive("waiting for the test")
                time.sleep(0.01)
            return super().take_step()

    return Waiting


def number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


class Altered:
    """A stream of batches, each changed on its way."""

    def __init__(self, stream, change):
        self.stream, self.change = stream, change

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.stream)
        self.change(batch)
        return batch

    def __getattr__(self, name):
        return getattr(self.stream, name)


class OtherData(Trainer):
    """The last rank reads the samples in another order, as with another file of its own."""

    def open_data(self):
        if self.world.rank == self.world.size - 1:
            data = self.config.data.model_copy(update={"seed": self.config.data.seed + 1})
            self.config = self.config.model_copy(update={"data": data})
        return super().open_data()


class MovingSource(Trainer):
    """The run of start.from publishes another checkpoint after rank 0 has looked for it, before rank 1 does."""

    def begin(self):
        source = RunFolder(Path(self.config.start.from_))
        moved, real = source.root / "moved", lifecycle.find_checkpoint

        def find(path):
            if self.world.rank == 1:
                while not moved.exists():
                    time.sleep(0.01)
                return real(path)
            found = real(path)
            source.latest.write_text("step_00000002\n")
            moved.touch()
            return found

        lifecycle.find_checkpoint = find
        super().begin()
        loaded = [weight.detach().clone() for weight in self.trainable.model.parameters()]
        self.keeper.load_weights(source.checkpoint(1))  # ranks share the reading, so a mixture is alike on all
        assert all(map(torch.equal, loaded, self.trainable.model.parameters()))


class NaN(Trainer):
    """The loss of one micro-batch is not a number."""

    samples = frozenset({BAD_SAMPLE})

    def __init__(self, *parts):
        super().__init__(*parts)
        self.poisoned = False
        self.trainable.model.register_forward_hook(self.poison)

    def open_batches(self):
        def look(batch):
            self.poisoned = not self.samples.isdisjoint(batch["sample_ids"].tolist())

        return Altered(super().open_batches(), look)

    def poison(self, model, inputs, losses):
        return losses * torch.nan if self.poisoned else losses


class NaNGradient(NaN):
    """The loss is fine, its gradient is not."""

    def poison(self, model, inputs, losses):
        if self.poisoned and losses.requires_grad:
            losses.register_hook(lambda gradient: gradient * torch.inf)
        return losses


class OnlyNaN(NaN):
    """From one sample on, none has a loss."""

    samples = frozenset(range(BAD_SAMPLE, BAD_SAMPLE + 1000))


class EarlyNaN(OnlyNaN):
    """None has a loss from step 3 on."""

    samples = frozenset(range(32, 1000))


class LastSaveFails(Trainer):
    """The disk is full at the last save, and stays so."""

    def state(self):
        saving.LAST_PAUSE_SECONDS = 0.0
        if not self.steps_left:
            raise SaveError("the disk is full")
        return super().state()


class Spike(Trainer):
    """A batch of text in a language of its own."""

    def open_batches(self):
        def scramble(batch):
            if (batch["sample_ids"] // 16 == BAD_SAMPLE // 16).any():
                batch["labels"].copy_((batch["labels"] * 7 + 3) % self.config.model.vocab_size)

        return Altered(super().open_batches(), scramble)


class KilledReplacing(Spike):
    """Rank 0 is killed between the two renames by which a second checkpoint of a step replaces the first."""

    def begin(self):
        rename = os.rename

        def killed(old, new):
            if list(Path(new).parent.glob(".step_*.replaced")):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(old, new)

        os.rename = killed
        super().begin()


class Recording(Spike):
    """Each step leaves a file with what it read: the samples, and for each the inputs and the last label."""

    def open_batches(self):
        self.read = []

        def keep(batch):
            windows = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1)
            self.read.append(torch.cat([batch["sample_ids"][:, None], windows], 1))

        stream = super().open_batches()
        return Altered(Altered(stream.stream, keep), stream.change)

    def take_step(self):
        self.read.clear()
        verdict = super().take_step()
        torch.save(torch.cat(self.read), self.keeper.folder.root / f"read_{self.progress.step}_{self.world.rank}.pt")
        return verdict


class OpenStreams(Trainer):
    """The end of the run leaves a file that says how often batches were opened, and how many are still open."""

    def open_batches(self):
        self.streams = [*getattr(self, "streams", ()), super().open_batches()]
        return self.streams[-1]

    def end(self, outcome):
        ended = super().end(outcome)
        left = sum(not stream._pool._shutdown for stream in self.streams)
        (Path(self.config.folder) / "streams").write_text(f"{len(self.streams)} opened, {left} open")
        return ended


class Shift(Trainer):
    """From one batch on, all text is in another language."""

    def open_batches(self):
        def scramble(batch):
            if (batch["sample_ids"] // 16 >= BAD_SAMPLE // 16).any():
                batch["labels"].copy_((batch["labels"] * 7 + 3) % self.config.model.vocab_size)

        return Altered(super().open_batches(), scramble)


class Beating(Trainer):
    """A trainer whose heart beats twice a second, although its watchdog is patient."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.watchdog._beats.every = 0.5

    def hurry(self):
        """Let the watchdog believe that nothing has moved for as long as it waits."""
        self.watchdog._since = self.watchdog._awake - self.watchdog.seconds


class SlowCheck(Trainer):
    """The check of the last export reads a pipe in the folder of the test, for longer than a hang may take."""

    def end(self, outcome):
        self.watchdog.seconds = 3.0
        ExportChecks.command = lambda _, step: ["verify", str(self.keeper.folder.root.parent / "slow")]
        return super().end(outcome)


class Sleeping(Beating):
    """One rank falls asleep in a step and never wakes up. Its watchdog notices once the other rank waits for it."""

    def take_step(self):
        if self.world.rank == 1 and self.progress.step == 3:
            while not self.awaited():
                time.sleep(0.1)
            self.hurry()
            time.sleep(1000)
        return super().take_step()

    def awaited(self):
        other, ours = self.watchdog._beats.read().get(0), hangs.collectives()
        started = other.beat.collectives if other else {}
        return any(started.get(name, group)["started"] > group["started"] for name, group in ours.items())


class Stopped(Beating):
    """A trainer that a test stops: with a file `hurry` in the folder of its run, its watchdog waits no longer."""

    def __init__(self, *parts):
        super().__init__(*parts)
        threading.Thread(target=self.wait_for_file, daemon=True).start()

    def wait_for_file(self):
        while not (Path(self.config.folder) / "hurry").exists():
            time.sleep(0.05)
        self.watchdog._beats.seconds = 8
        while True:
            self.hurry()
            time.sleep(0.05)


class ReadsBackBadlyOnce(Trainer):
    """The file system fails one rank as it reads back the first checkpoint it wrote."""

    def __init__(self, *parts):
        super().__init__(*parts)
        if self.world.rank == 1:
            describe = manifest.describe

            def fail(path):
                if path.parent.name == ".step_00000001":
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                return describe(path)

            manifest.describe = fail


class Told(Event):
    """The calls of the watchdog."""

    what: list[str]

    @property
    def text(self):
        return "the watchdog was told: " + "; ".join(self.what)


class Narrating(Trainer):
    """A trainer that logs every call of its watchdog."""

    def __init__(self, config, world, stop, watchdog):
        alive = watchdog.alive
        self.told = []
        watchdog.alive = lambda what: (alive(what), self.told.append(what) if what not in self.told[-1:] else None)
        super().__init__(config, world, stop, watchdog)

    def end(self, outcome):
        self.event(Told(what=self.told))
        return super().end(outcome)


class Watchful(Trainer):
    """A trainer that looks at its shards ten times a second instead of once a minute."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.watch.shards.look_again_seconds = 0.1


class NaNOnce(NaN):
    """A trainer whose loss is NaN for one micro-batch, the first time that it is computed."""

    def poison(self, model, inputs, losses):
        found = super().poison(model, inputs, losses)
        if self.poisoned:
            self.samples, self.poisoned = frozenset(), False
        return found


class NaNGradientOnce(NaNGradient):
    """The same in the backward pass."""

    poison_always = NaNGradient.poison

    def poison(self, model, inputs, losses):
        found = self.poison_always(model, inputs, losses)
        if self.poisoned:
            self.samples, self.poisoned = frozenset(), False
        return found


class NaNWhileTraining(OnlyNaN):
    """From one sample on no gradient exists, while the weights themselves are good."""

    def poison(self, model, inputs, losses):
        return super().poison(model, inputs, losses) if losses.requires_grad else losses


class Flipped(Trainer):
    """Rank 1 flips one bit of a weight in the forward pass of step 13, once."""

    weight = ""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.trainable.model.register_forward_hook(self.flip)
        self.flipped = False

    def flip(self, *_):
        if self.world.rank == 1 and self.progress.step == 12 and not self.flipped:
            self.flipped = True
            weight = dict(self.trainable.model.named_parameters())[self.weight]
            weight.data.view(torch.int32).view(-1)[3] ^= 1 << 12


class FlippedNorm(Flipped):
    weight = "decoder.layers.2.norm.weight"


class FlippedExpert(Flipped):
    weight = "decoder.layers.1.mixer.experts.fc1"


class FlippedRouter(Flipped):
    weight = "decoder.layers.3.mixer.router.weight"


class SlowLayer(Trainer):
    """A layer takes longer on rank 1, as on a device with a low clock.

    Time goes by the layers, one second each and ten more on rank 1: the load of the machine does not count.
    """

    def __init__(self, *parts):
        super().__init__(*parts)
        self.now = 0.0
        stragglers._now = lambda gradient: self.now
        self.trainable.model.decoder.layers.get_submodule("0").mixer.register_forward_hook(self.slow)

    def slow(self, mixer, inputs, output):
        if inputs[0].requires_grad:
            inputs[0].register_hook(self.spend)

    def spend(self, gradient):
        self.now += 11.0 if self.world.rank == 1 else 1.0


class Weighing(Trainer):
    """A trainer with one more metric."""

    def __init__(self, *parts):
        from tests.training import weight_norm  # noqa: F401

        super().__init__(*parts)


class StoppedAtTheEnd(Trainer):
    """A request to stop reaches it during its last step."""

    def take_step(self):
        verdict = super().take_step()
        self.asked_to_stop = self.over
        return verdict


class Edited(Trainer):
    """While it trains, somebody edits a module of BLACKMAMBA_IMPORT."""

    def take_step(self):
        facts.code_of_extensions = lambda: {"code of my_router": "edited"}
        return super().take_step()
