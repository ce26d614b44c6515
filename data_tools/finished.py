"""Check whether a shard on disk is the one that a job would write, and whether its files are unchanged."""

from megatron_blackmamba.data_tools.progress import counted
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.shard_writer import ShardJob
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.streams import STDIN, file_sha256
from megatron_blackmamba.formats.shards import Shard, ShardError, ShardManifest, SourceFile
from megatron_blackmamba.tokenizer import Tokenizer


def refuse_other_settings(job: ShardJob, tokenizer: Tokenizer) -> None:
    """Raise InputError where the shard exists, but was made from something else or in another way."""
    if not job.manifest_path.exists():
        return
    manifest = ShardManifest.read(job.manifest_path)
    difference = _difference(manifest, job, tokenizer)
    if difference:
        raise InputError(
            f"{job.prefix} exists and {difference}. Choose another folder, or --overwrite to make its shards again"
        )


def is_finished(job: ShardJob, tokenizer: Tokenizer) -> bool:
    """Return whether the shard exists, was made from these sources with these settings, and is unchanged."""
    try:
        shard = Shard.open(job.prefix)
    except ShardError:
        return False
    manifest = shard.manifest
    return (
        _difference(manifest, job, tokenizer) is None
        and file_sha256(shard.idx_path) == manifest.idx_sha256
        and file_sha256(shard.bin_path) == manifest.bin_sha256
    )


def with_count(job: ShardJob) -> ShardManifest:
    """Return the manifest of a finished shard. Update its count of shards: inputs may have been added since."""
    manifest = ShardManifest.read(job.manifest_path)
    if manifest.shards != job.of:
        manifest = manifest.model_copy(update={"shards": job.of})
        manifest.write(job.manifest_path)
    return manifest


def _difference(manifest: ShardManifest, job: ShardJob, tokenizer: Tokenizer) -> str | None:
    settings = job.settings
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        return f"was made with another tokenizer ({manifest.tokenizer}, sha256 {manifest.tokenizer_sha256[:12]})"
    if manifest.eod_id != tokenizer.eod_id:
        return f"was made with EOD {manifest.eod_id}, not {tokenizer.eod_id}"
    if manifest.shuffled != settings.shuffle:
        return "is shuffled" if manifest.shuffled else "is not shuffled"
    if manifest.shuffled and manifest.seed != settings.seed:
        return f"was shuffled with seed {manifest.seed}, not {settings.seed}"
    for name, value in settings.recorded(job.sources).items():
        if manifest.options.get(name, value) != value:  # a setting that is newer than the shard had no other value
            return f"was made with {name} = {manifest.options[name]!r}, not {value!r}"
    if len(manifest.sources) != len(job.sources):
        count = len(manifest.sources)
        return f"was made from {counted(count, 'file')}, not {len(job.sources)}: other inputs, or another --shard-size"
    for made_from, source in zip(manifest.sources, job.sources, strict=True):
        if not _same_file(made_from, source):
            return f"was made from {made_from.name} ({made_from.sha256[:12]}), which {source.path} is not"
    return None


def _same_file(made_from: SourceFile, source: Source) -> bool:
    if source.path == STDIN:
        return made_from.name == source.name  # what it holds shows only when it is read
    if made_from.bytes != source.bytes:
        return False
    return made_from.modified_ns == source.modified_ns or file_sha256(source.path) == made_from.sha256
