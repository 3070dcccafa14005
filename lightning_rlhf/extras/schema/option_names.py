"""Options of TRL, peft, transformers and verl, with their names in a configuration of this package."""

_LORA = "model.init_args.actor, as {class_path: lightning_rlhf.Pretrained, init_args: {path: ..., lora: {rank: 16}}}"


def _loop(name: str) -> str:
    return f"{name} of RolloutLoop under trainer.callbacks (--rollout.{name} on the command line)"


_NAMES = {
    "beta kl_coef": "kl_loss.coef (a penalty in the loss) or kl_reward.coef (in the rewards) of the module",
    "kl_loss_coef": "kl_loss.coef of the module",
    "learning_rate lr optim weight_decay actor_optimizer": "model.init_args.optimizer, as {lr: 1.0e-6}",
    "lr_scheduler_type warmup_ratio warmup_steps actor_lr_scheduler": (
        "model.init_args.lr_scheduler, as {class_path: lightning_rlhf.modules.schedules.RunSchedule, init_args: "
        "{kind: cosine, warmup_ratio: 0.03}}"
    ),
    "r lora_r lora_rank": f"lora.rank of {_LORA}",
    "lora_alpha": f"lora.alpha of {_LORA}",
    "peft_config": f"lora of {_LORA}",
    "lora_dropout": f"lora.dropout of {_LORA}",
    "load_in_4bit load_in_8bit bnb_4bit_quant_type quantization_config": (
        "quantization of the model's source, as {class_path: lightning_rlhf.Pretrained, init_args: {path: ..., "
        "quantization: nf4, lora: {rank: 16, alpha: 32}}}"
    ),
    "epsilon cliprange clip_ratio": "policy_loss.clip_range of the module",
    "cliprange_value": "value_loss.clip_range of the module",
    "lam": "advantages.gae_lambda of the module",
    "num_iterations num_ppo_epochs ppo_epochs": "update_epochs of the module",
    "ppo_mini_batch_size": "minibatch_size of the module, counted in responses",
    "loss_type loss_agg_mode": "aggregation of the module",
    "gradient_accumulation_steps": "micro_batch_tokens of the module, the tokens of one forward pass",
    "gradient_checkpointing": "activation_checkpointing of the strategy",
    "per_device_train_batch_size train_batch_size": "data.init_args.batch_size, counted over all devices",
    "max_prompt_length": "data.init_args.max_tokens",
    "num_generations": _loop("group_size"),
    "max_completion_length max_new_tokens": _loop("max_response_tokens"),
    "reward_funcs": _loop("rewards"),
    "reward_weights": f"weight of each entry of {_loop('rewards')}",
    "top_p": _loop("top_p"),
    "top_k": _loop("top_k"),
    "min_p": _loop("min_p"),
    "use_vllm": f"{_loop('engine')}: vllm or transformers; auto, its default, uses vLLM where it runs",
    "num_train_epochs total_epochs": "trainer.max_epochs",
    "output_dir": "trainer.default_root_dir",
    "bf16": "trainer.precision: bf16-mixed",
    "report_to": "trainer.logger",
    "save_steps": "every_n_steps of lightning_rlhf.callbacks.RunCheckpoint under trainer.callbacks",
    "eval_steps": "trainer.val_check_interval",
    "logging_steps": "every_n_steps of lightning_rlhf.callbacks.Console under trainer.callbacks",
    "seed": "seed_everything",
    "resume_from_checkpoint resume": "ckpt_path: last, or the path of a checkpoint (--ckpt_path last)",
}
OPTION_NAMES = {name: ours for names, ours in _NAMES.items() for name in names.split()}
