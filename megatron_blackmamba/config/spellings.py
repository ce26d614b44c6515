"""Accept common spellings: steps instead of tokens, a mixture without its kind, and key names of other projects."""

from typing import Any

from megatron_blackmamba.settings import ConfigError
from megatron_blackmamba.settings.values import number, whole

OTHER_NAMES = {
    "model.hidden_size": "d_model dim model_dim n_embd n_embed embed_dim embedding_dim emb_dim width hidden_dim",
    "model.pattern": "n_layer n_layers num_layers num_hidden_layers depth layers layer_types hybrid_override_pattern",
    "model.experts": "n_experts num_experts num_local_experts moe_num_experts n_routed_experts",
    "model.top_k": "num_experts_per_tok moe_router_topk topk experts_per_token moe_top_k",
    "model.expert_hidden_size": "ffn_hidden_size intermediate_size d_ff ffn_dim mlp_dim moe_ffn_hidden_size",
    "model.state_size": "d_state ssm_state_size state_dim ssm_state_dim mamba_state_dim",
    "model.conv_kernel": "d_conv conv_dimension conv_size kernel_size ssm_conv_dim",
    "model.expand": "expansion_factor expand_factor",
    "model.attention.heads": "n_head n_heads num_heads num_attention_heads",
    "model.attention.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.init.std": "init_method_std initializer_range init_std",
    "data.sequence_length": "seq_len seq_length seqlen block_size max_seq_len max_seq_length context_length n_ctx",
    "data.mixture": "data_path dataset data_prefix data_dir train_data_path dataset_path",
    "data.workers": "num_workers dataloader_num_workers",
    "optimizer.learning_rate": "lr max_lr peak_lr",
    "optimizer.min_learning_rate": "min_lr lr_min",
    "optimizer.warmup_fraction": "warmup warmup_steps warmup_iters warmup_ratio lr_warmup_fraction lr_warmup_iters",
    "optimizer.warmup_tokens": "lr_warmup_samples warmup_samples n_warmup_tokens",
    "optimizer.decay": "lr_decay_style scheduler lr_scheduler schedule lr_schedule lr_scheduler_type",
    "optimizer.decay_fraction": "decay_ratio lr_decay_fraction",
    "optimizer.decay_tokens": "lr_wsd_decay_iters lr_wsd_decay_samples decay_steps num_decay_steps cooldown_steps",
    "optimizer.decay_shape": "lr_wsd_decay_style lr_decay_type decay_type cooldown_type",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.moments": "exp_avg_dtype exp_avg_sq_dtype optim_bits",
    "optimizer.gradients": "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 main_grads_dtype grad_dtype",
    "optimizer.weight_decay": "wd",
    "optimizer.clip": "grad_clip clip_grad max_grad_norm gradient_clipping clip_grad_norm grad_norm_clip",
    "training.steps": "steps step max_steps train_iters max_iters num_steps n_steps total_steps",
    "training.tokens": "train_tokens train_samples",
    "training.global_batch": "batch_size global_batch_size train_batch_size bs per_device_train_batch_size",
    "training.batch_ramp": "rampup_batch_size batch_size_rampup batch_size_schedule batch_warmup batch_size_warmup",
    "training.micro_batch": "micro_batch_size device_batch_size gradient_accumulation_steps grad_acc_steps",
    "training.precision": "dtype bf16 fp16 mixed_precision",
    "training.evaluate_every": "eval_interval eval_every eval_steps val_interval",
    "training.evaluate_batches": "eval_iters eval_batches",
    "training.recompute": "activation_checkpointing gradient_checkpointing recompute_granularity recompute_activations",
    "checkpoint.every": "save_interval save_steps save_every ckpt_interval checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep",
    "parallel.tensor": "tensor_model_parallel_size tp tp_size tensor_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size pp pp_size pipeline_parallel_size",
    "parallel.expert": "expert_model_parallel_size ep ep_size expert_parallel_size",
    "parallel.context": "context_parallel_size cp cp_size",
    "logging.wandb": "wandb use_wandb wandb_log report_to",
    "logging.wandb_project": "project wandb_project_name",
    "folder": "out_dir output_dir save_dir dump_dir run_dir save",
    "name": "run_name exp_name experiment_name wandb_run_name",
    "start.branch": "branch branch_from load_trainer_state_from",
    "start.from": "init_from load pretrained checkpoint_path resume_from",
}
"""A key of ours, and what nanoGPT, Megatron-LM, transformers, lingua and others call it."""

_MEANINGS = {
    "n_layer n_layers num_layers num_hidden_layers depth layers": "it has one letter per layer, such as MEMEMEME for 8",
    "warmup_steps warmup_iters lr_warmup_iters": "it is a fraction of the steps, such as 0.01",
    "lr_warmup_samples warmup_samples lr_wsd_decay_samples": "it counts tokens: samples × data.sequence_length",
    "lr_wsd_decay_iters decay_steps num_decay_steps cooldown_steps": (
        "it counts tokens: steps × training.global_batch × data.sequence_length"
    ),
    "rampup_batch_size": "it is a list of stages, such as [{batch: 256, until: 10B}]",
    "per_device_train_batch_size bs batch_size": "it counts the sequences of a step in all processes",
    "gradient_accumulation_steps grad_acc_steps": "a step accumulates global_batch / (micro_batch × replicas) times",
    "bf16 fp16 mixed_precision": "it is bf16, fp32 or fp64",
    "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32": "it is fp32 or bf16",
    "optim_bits": "it is a type, such as fp32",
    "train_samples": "it counts tokens: samples × data.sequence_length",
    "activation_checkpointing gradient_checkpointing recompute_activations": "it names what is computed again",
    "load resume_from": "the same command resumes a run; start.from takes only its weights",
    "out_dir output_dir save_dir dump_dir run_dir save": "a run writes to folder/name",
}
"""What our key means where a value of the other name would not fit."""

_NOT_KEYS = {
    "dropout attention_dropout hidden_dropout resid_dropout embd_dropout embd_pdrop resid_pdrop": "there is no dropout",
    "device accelerator use_cpu no_cuda cuda": "GPUs are used if there are any; CUDA_VISIBLE_DEVICES= hides them",
    "epochs num_epochs n_epochs max_epochs num_train_epochs": (
        "the length of a run is training.tokens or training.steps; `blackmamba plan` shows the epochs of each source"
    ),
    "tokenizer tokenizer_path tokenizer_model tokenizer_name": "the shards of data.mixture bring their tokenizer",
    "nproc gpus num_gpus n_gpus devices nodes num_nodes world_size": (
        "the number of processes follows from --nproc, torchrun or srun"
    ),
}
"""What other projects set by a key and this one does not, and what decides it here."""

_OURS = {theirs: ours for ours, names in OTHER_NAMES.items() for theirs in names.split()}


def our_name(key: str) -> str | None:
    """Return our key for the last part of one that another project has."""
    return _OURS.get(key.rpartition(".")[2].replace("-", "_"))


def meaning(key: str) -> str | None:
    """Return what our key means if a value of the other project's key would not fit it."""
    last = key.rpartition(".")[2].replace("-", "_")
    return next((text for names, text in _MEANINGS.items() if last in names.split()), None)


def not_a_key(key: str) -> str | None:
    """Return what decides here what other projects set by this key, if no key does."""
    last = key.rpartition(".")[2].replace("-", "_")
    return next((text for names, text in _NOT_KEYS.items() if last in names.split()), None)


def _tokens_of(steps: int, ramp: Any, global_batch: int, sequence_length: int) -> int:
    """Return the tokens of the first steps of a run, whose first batches may be smaller."""
    tokens = 0
    for stage in ramp if isinstance(ramp, list) else ():
        batch, until = (whole(stage.get(key)) if isinstance(stage, dict) else None for key in ("batch", "until"))
        if isinstance(batch, int) and isinstance(until, int) and batch > 0:  # or the run is refused
            size = batch * sequence_length
            taken = min(steps, -(-max(0, until - tokens) // size))
            steps, tokens = steps - taken, tokens + taken * size
    return tokens + steps * global_batch * sequence_length


def accept(content: dict[str, Any]) -> None:
    """Take `data.mixture` without `data.kind` as a mixture."""
    data = content.get("data")
    if isinstance(data, dict) and data.get("mixture") and "kind" not in data:
        data["kind"] = "mixture"


def steps_as_tokens(content: dict[str, Any], origin: dict[str, str], sequence_length: int) -> None:
    """Replace `training.steps` by the tokens of that many batches, in place; `sequence_length` is the default.

    `origin` lists the keys in the order in which they were set. The later one of steps and tokens decides. A source
    that sets both to different lengths is refused.
    """
    training, data = content.get("training"), content.get("data")
    if not isinstance(training, dict) or training.get("steps") is None:
        return
    steps = whole(training.pop("steps"))
    tokens = number(training.get("tokens"), int)
    where, set_by = origin["training.steps"], origin.get("training.tokens")
    order = list(origin)
    del origin["training.steps"]
    if set_by not in (None, where) and order.index("training.tokens") > order.index("training.steps"):
        return
    factors: dict[str, Any] = {"training.global_batch": training.get("global_batch")}
    factors["data.sequence_length"] = (data if isinstance(data, dict) else {}).get("sequence_length", sequence_length)
    factors = {key: whole(value) for key, value in factors.items()}
    for key, value in {"training.steps": steps, **factors}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: {key}={value!r}: give a whole number of at least 1")
    training["tokens"] = _tokens_of(steps, training.get("batch_ramp"), *factors.values())
    origin["training.tokens"] = where
    if set_by == where and tokens != training["tokens"]:
        raise ConfigError(
            f"{where}: training.steps={steps} means training.tokens={training['tokens']}, but training.tokens={tokens}."
            " Remove one of the two."
        )
