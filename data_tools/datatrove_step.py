"""A datatrove pipeline step that writes token shards, for the end of your pipeline.

LocalPipelineExecutor([WarcReader(...), Trafilatura(), ShardWriter("tokens/web", "tokenizer.json")], tasks=32).run()
"""

import json
import os
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from megatron_blackmamba.data_tools.object_storage import RemoteFolder
from megatron_blackmamba.data_tools.options import TokenizeOptions
from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
from megatron_blackmamba.data_tools.shard_writer import ShardJob, write_shard
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.formats.remote import is_remote
from megatron_blackmamba.tokenizer import load_tokenizer


class ShardWriter(PipelineStep):
    """Writes the documents of task N as `shard_N`, with every check of `blackmamba data tokenize`.

    The documents wait in a hidden file beside the shard, so the manifest knows them by number and by the file's sha256.
    """

    type = "💽 - WRITER"
    name = "token shards"

    def __init__(
        self,
        out_dir: str | Path,
        tokenizer: str,
        *,
        eod: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_bad: str = "0",
    ) -> None:
        """Set up the step.

        Args:
            out_dir: A folder, or one in object storage, such as s3://bucket/tokens.
            tokenizer: A tokenizer.json, a folder with one, or a Hugging Face name.
            max_bad: Documents of a task that may be empty, as for --max-bad: a number or a fraction.
        """
        super().__init__()
        self.out_dir, self.tokenizer, self.eod = out_dir, tokenizer, eod
        self.options, self.tolerance = TokenizeOptions(shuffle=shuffle, seed=seed), Tolerance.parse(max_bad)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Write one shard of `world_size`."""
        tokenizer = load_tokenizer(self.tokenizer, eod=self.eod)
        remote = RemoteFolder.open(os.fspath(self.out_dir)) if is_remote(self.out_dir) else None
        out_dir = remote.folder if remote else Path(self.out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        waiting, count = out_dir / f".task_{rank:05d}.jsonl", 0
        try:
            with open(waiting, "wb") as file:
                for document in data:
                    self.stat_update("documents")
                    count += 1
                    file.write(json.dumps({"text": document.text, "id": document.id}).encode() + b"\n")
            if not count:
                raise InputError(
                    f"{self.out_dir}: task {rank} has no document. Use at most as many tasks as input files"
                )
            status = waiting.stat()
            source = Source(str(waiting), f"task_{rank:05d}", "jsonl", status.st_size, status.st_mtime_ns)
            with self.track_time():
                job = ShardJob(rank + 1, world_size, (source,), out_dir, self.options, tolerance=self.tolerance)
                manifest = write_shard(job, tokenizer)
            self.stat_update("tokens", value=manifest.tokens)
            tokenizer.save(out_dir / "tokenizer.json")
            if remote:
                remote.publish_tokenizer()
                remote.publish(job.prefix)
        finally:
            if waiting.exists():
                os.unlink(waiting)
