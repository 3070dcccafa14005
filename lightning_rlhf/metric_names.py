"""Names and meanings of all metrics, with their names in verl and TRL.

``docs/metrics.md`` is the output of ``python -m lightning_rlhf.metric_names > docs/metrics.md``. Names are
``group/name_unit``. ``{a,b}`` stands for either, ``<reward>`` for the name of a reward function, ``<k>`` for a number
of samples, ``<role>`` for a model, ``<option>`` for a rejection such as ``sequence_mean_k3``.
"""

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass

_ANY = {
    "<role>": "[a-z_]+",
    "<k>": "[0-9]+",
    "<option>": "(token|sequence_sum|sequence_mean|sequence_max)_k[123]",
    "<key>": "(?!not_applicable$|errors$|timeouts$)[^/]+",
}


@dataclass(frozen=True)
class Metric:
    """One or several similar metrics.

    Args:
        name: name of the metric.
        meaning: unit and meaning.
        verl: name in verl; empty if it has none.
        trl: name in TRL; empty if it has none.
    """

    name: str
    meaning: str
    verl: str = ""
    trl: str = ""

    def expanded(self) -> list[str]:
        """Return the names with all alternatives expanded and placeholders unchanged."""
        parts = re.split(r"\{(.*?)\}", self.name)
        return ["".join(choice) for choice in itertools.product(*(part.split(",") for part in parts))]

    def covers(self, name: str, rewards: Collection[str] = ()) -> list[str]:
        """Return the expanded names that match a logged name."""
        known = {**_ANY, "<reward>": "(" + "|".join(map(re.escape, sorted(rewards))) + ")"}
        patterns = {own: re.escape(own) for own in self.expanded()}
        for placeholder, pattern in known.items():
            patterns = {own: text.replace(re.escape(placeholder), pattern) for own, text in patterns.items()}
        return [own for own, pattern in patterns.items() if re.fullmatch(pattern, name)]


STEP = (
    Metric("reward/{mean,max,min}", "reward of a response, before any KL penalty", "critic/score/{mean,max,min}",
           "reward"),
    Metric("reward/std", "standard deviation of the reward over all responses (divisor n)", "",
           "reward_std with scale_rewards: batch (divisor n - 1)"),
    Metric("reward/after_kl_{mean,max,min}", "reward of a response minus its KL penalty; with a reference",
           "critic/rewards/{mean,max,min}"),
    Metric("reward/from_model", "the reward model's part of `reward/mean`", "", "rewards/<model>/mean"),
    Metric("reward/<reward>", "mean of one reward function where it applies, unweighted", "gdpo/<key>/mean",
           "rewards/<function>/mean"),
    Metric("reward/<reward>_std", "standard deviation of this reward (divisor n)", "gdpo/<key>/std",
           "rewards/<function>/std (divisor n - 1)"),
    Metric("reward_<reward>/not_applicable", "share of responses to which the function does not apply"),
    Metric("reward_<reward>/{errors,timeouts}", "share for which it failed, or needed more than its `timeout_s`; where "
           "that does not end the run (`on_error`)"),
    Metric("reward_<reward>/<key>", "mean of a further number that the function logs", "<key> of reward_extra_info",
           "what log_metric is given"),
    Metric("reward/generated_mean", "mean reward of all that dynamic sampling generated, kept or not"),
    Metric("advantage/{mean,max,min}", "advantage of a token of the mask", "critic/advantages/{mean,max,min}"),
    Metric("return/{mean,max,min}", "return of a token of the mask, reward units",
           "critic/returns/{mean,max,min}"),
    Metric("value/{mean,max,min}", "the critic's value of a token, before the update", "critic/values/{mean,max,min}"),
    Metric("value/explained_variance", "share of the returns' variance that the critic explains, at most 1",
           "critic/vf_explained_var"),
    Metric("value/clip_fraction", "share of tokens whose value was clipped", "critic/vf_clipfrac"),
    Metric("group/equal_reward_fraction", "share of the prompts with two responses or more whose rewards are all equal",
           "", "frac_reward_zero_std"),
    Metric("group/single_fraction", "share of the prompts with one response, which have no baseline"),
    Metric("group/reward_std_mean", "standard deviation of a prompt's rewards (divisor n - 1), mean over prompts", "",
           "reward_std"),
    Metric("kl/ref", "KL to the reference by k1, nats per response, before the update",
           "actor/reward_kl_penalty (per token)", "kl (k3, per token)"),
    Metric("kl/coef", "weight of the KL penalty in the rewards", "actor/reward_kl_penalty_coeff"),
    Metric("kl/approx", "KL(old || new) by k3, nats per token, during the update", "actor/ppo_kl (by k1)"),
    Metric("loss/policy", "policy loss per token, without the entropy bonus", "actor/pg_loss", "policy_loss"),
    Metric("loss/value", "value loss per token, before `vf_coef`", "critic/vf_loss"),
    Metric("loss/kl", "KL loss, nats per token, before its weight", "actor/kl_loss"),
    Metric("policy/entropy", "entropy of the next token, nats", "actor/entropy", "entropy"),
    Metric("policy/clip_fraction", "share of tokens whose clipped ratio changes the loss", "actor/pg_clipfrac",
           "clip_ratio/region_mean"),
    Metric("policy/dual_clip_fraction", "share of tokens stopped by the dual clip", "actor/pg_clipfrac_lower"),
    Metric("policy/chosen_fraction", "share of tokens that Clip-Cov or KL-Cov selects",
           "actor/pg_clipfrac of clip_cov"),
    Metric("policy/gate", "mean factor of SAPO's gate on the gradient, in [0, 1]"),
    Metric("policy/{dropped,capped}_fraction", "share of tokens that DPPO drops, or whose ratio it caps"),
    Metric("policy/sequence_weight", "weight of a response in VESPO and TOPR", "", "vespo/phi_seq_mean"),
    Metric("policy/updates", "updates of the actor in this step; fewer where `target_kl` stopped them"),
    Metric("grad_norm/<role>", "norm of the gradient before clipping, mean over updates",
           "actor/grad_norm, critic/grad_norm; its square: variance_proxy/proxy1_signal_strength", "grad_norm"),
    Metric("lr/<role>", "learning rate", "actor/lr, critic/lr", "learning_rate"),
    Metric("variance/gradient_power", "squared gradient of a response with respect to the logits; where the estimator "
           "asks for squared probabilities", "variance_proxy/proxy2_total_power"),
    Metric("variance/advantage_squared_mean", "square of a response's mean advantage",
           "variance_proxy/expected_a_squared"),
    Metric("variance/score_norm_mean", "squared gradient of a response's log-probability with respect to the logits",
           "variance_proxy/expected_w"),
)  # fmt: skip

ROLLOUT = (
    Metric("rollout/response_tokens", "tokens of all responses"),
    Metric("rollout/response_tokens_{mean,max,min}", "tokens of a response", "response_length/{mean,max,min}",
           "completions/{mean,max,min}_length"),
    Metric("rollout/finished_tokens_{mean,max,min}", "tokens of a response that reached its end token", "",
           "completions/{mean,max,min}_terminated_length"),
    Metric("rollout/truncated_fraction", "share of responses that the length limit cut",
           "response_length/clip_ratio (share as long as the longest)", "completions/clipped_ratio"),
    Metric("rollout/prompt_tokens_{mean,max,min}", "tokens of the prompt of a response",
           "prompt_length/{mean,max,min}"),
    Metric("rollout/logprob_diff_{mean,max}", "|log-probability by the actor - by the engine| of a token, nats",
           "", "sampling/sampling_logp_difference/{mean,max}"),
    Metric("rollout/tokens_per_s", "generated tokens per second of generation"),
    Metric("rollout/generated_prompts", "prompts that dynamic sampling generated for", "train/num_gen_batches"),
    Metric("rollout/contrast_fraction", "share of the generated prompts with different rewards"),
    Metric("rollout/filled_fraction", "share of the step filled with prompts that are not trained on"),
    Metric("rollout_corr/kl_{k1,k3}", "KL(rollout || train), nats per token", "rollout_corr/{kl,k3_kl}"),
    Metric("rollout_corr/chi2_{token,sequence}", "mean of the squared ratio train / rollout, minus 1",
           "rollout_corr/chi2_{token,seq}"),
    Metric("rollout_corr/ess_{token,sequence}", "effective sample size, share of tokens or responses"),
    Metric("rollout_corr/{ppl,log_ppl}_{train,rollout}", "perplexity of a response under either policy, and its log",
           "rollout_corr/{training,rollout}_{ppl,log_ppl}"),
    Metric("rollout_corr/ppl_ratio", "perplexity of train / that of rollout, of a response", "rollout_corr/ppl_ratio"),
    Metric("rollout_corr/log_ppl_diff_{mean,std,max,min}", "log-perplexity of train - of rollout, of a response",
           "rollout_corr/log_ppl_diff, _max, _min"),
    Metric("rollout_corr/log_ppl_diff_abs_mean", "absolute difference of the log-perplexities",
           "rollout_corr/log_ppl_abs_diff"),
    Metric("rollout_corr/{ratio,sequence_ratio}_{mean,std,max,min}",
           "ratio train / rollout of a token, and their product over a response", "",
           "sampling/importance_sampling_ratio/{mean,max,min} (after clipping)"),
    Metric("rollout_corr/prob_diff_{mean,std,max,min}", "|probability by train - by rollout| of a token",
           "training/rollout_probs_diff_{mean,std,max}"),
    Metric("rollout_corr/prob_correlation", "Pearson's correlation of the two probabilities",
           "training/rollout_actor_probs_pearson_corr"),
    Metric("rollout_corr/{above,below,outside}_fraction", "share of ratios beyond the bounds of the weights",
           "rollout_corr/rollout_is_{ratio_fraction_high,ratio_fraction_low,oob_ratio}"),
    Metric("rollout_corr/sequence_{above,below}_fraction", "share of responses whose mean ratio is beyond the bounds",
           "rollout_corr/rollout_is_seq_fraction_{high,low}"),
    Metric("rollout_corr/{weight,sequence_weight}_{mean,std,max,min}", "importance weight of a token, of a response",
           "rollout_corr/rollout_is_{mean,std,max,min}, rollout_is_seq_{mean,std,max,min}"),
    Metric("rollout_corr/weight_ess", "effective sample size of the weights, a share",
           "rollout_corr/rollout_is_eff_sample_size"),
    Metric("rollout_corr/batch_norm_factor", "divisor of the weights",
           "rollout_corr/rollout_is_batch_norm_factor"),
    Metric("rollout_corr/<option>_{mean,std,max,min}", "statistic of a rejection",
           "rollout_corr/rollout_rs_<option>_{mean,std,max,min}; for options over a response, our mean and std are "
           "rollout_rs_<option>_seq_{mean,std}"),
    Metric("rollout_corr/<option>_{above,below}_fraction", "share of the statistic's values beyond its bounds",
           "rollout_corr/rollout_rs_<option>_fraction_{high,low}"),
    Metric("rollout_corr/<option>_{rejected,rejected_sequence}_fraction", "share of rejected tokens or responses",
           "rollout_corr/rollout_rs_<option>_{masked,seq_masked}_fraction"),
    Metric("rollout_corr/{rejected,rejected_sequence}_fraction", "share of tokens or responses with any rejection",
           "rollout_corr/rollout_rs_{masked,seq_masked}_fraction"),
)  # fmt: skip

SPEED = (
    Metric("time/step_s", "a whole step on the slowest rank", "timing_s/step, perf/time_per_step", "step_time"),
    Metric("time/sync_s", "copy of the actor's weights to the engine", "timing_s/update_weights"),
    Metric("time/generate_s", "generation, greedy responses included", "timing_s/{gen,gen_max}"),
    Metric("time/reward_s", "waiting for rewards after the last response", "timing_s/reward"),
    Metric("time/check_s", "comparison of engine and actor on a few responses"),
    Metric("time/evaluate_s", "evaluation of actor, reference, reward model and critic, and advantages",
           "timing_s/{old_log_prob,ref,values,adv}"),
    Metric("time/update_s", "updates of actor and critic", "timing_s/{update_actor,update_critic}"),
    Metric("time/generate_ms_per_token", "the same per generated token", "timing_per_token_ms/gen"),
    Metric("time/{evaluate,update}_ms_per_token", "the same per token of prompts and responses",
           "timing_per_token_ms/{ref,values,adv,update_critic,update_actor}"),
    Metric("perf/tokens", "tokens of prompts and responses on all ranks", "perf/total_num_tokens",
           "num_tokens (of all steps)"),
    Metric("perf/tokens_per_s", "the same per second of a step"),
    Metric("perf/tokens_per_s_per_device", "and per device", "perf/throughput"),
    Metric("perf/rank_tokens_{mean,max,min}", "tokens of one rank", "global_seqlen/{mean,max,min}"),
    Metric("perf/mfu_update", "operations of the update / peak of the devices in that time; where the peak is "
           "known (see `Throughput` for the formula)", "perf/mfu/{actor,critic}"),
    Metric("perf/memory_{allocated,reserved}_gib", "most memory of a GPU so far, GiB",
           "perf/max_memory_{allocated,reserved}_gb"),
    Metric("perf/cpu_memory_gib", "most resident memory of a training process so far, GiB",
           "perf/cpu_memory_used_gb (of the machine)"),
)  # fmt: skip

VALIDATION = (
    Metric("val/{greedy,sampled}", "share of right answers, by `val_metric`", "val-core/<source>/acc/mean@N"),
    Metric("val/pass@<k>", "chance that one of k samples is right, unbiased", "val-core/<source>/acc/best@k/mean"),
    Metric("val/maj@<k>", "chance that the majority's answer of k samples is right, unbiased; with `val_answer`",
           "val-core/<source>/acc/maj@k/mean"),
    Metric("val/<reward>_{greedy,sampled}", "mean reward", "val-aux/<source>/<reward>/mean@N", "eval_rewards/<f>/mean"),
    Metric("val/<reward>_sampled_std", "standard deviation of a prompt's samples (divisor N), mean over prompts",
           "val-aux/<source>/<reward>/std@N"),
    Metric("val/<reward>_{best,worst}@<k>", "reward of the best or worst of k samples, unbiased",
           "val-aux/<source>/<reward>/{best,worst}@k/mean"),
    Metric("val/<reward>_maj@<k>", "reward of the majority's answer of k samples, unbiased; with `val_answer`",
           "val-aux/<source>/<reward>/maj@k/mean"),
    Metric("val/score_{greedy,sampled,sampled_std}", "the reward model's score, like a reward"),
    Metric("val/score_{best,worst,maj}@<k>", "score of the best, worst or majority of k samples"),
    Metric("val/score_orders_right_first", "share of (right, wrong) pairs of samples that the score orders correctly"),
    Metric("val/response_tokens_mean", "tokens of a sampled response", "", "eval_completions/mean_length"),
    Metric("val/truncated_fraction", "share of sampled responses that the length limit cut", "",
           "eval_completions/clipped_ratio"),
)  # fmt: skip

SUPERVISED = (
    Metric("{train,val}/loss", "negative log-likelihood per token (SFT), or loss per pair or judgement",
           "train/loss, val/loss", "loss, eval_loss"),
    Metric("{train,val}/entropy", "entropy of the next token, nats", "", "entropy"),
    Metric("{train,val}/pair_accuracy", "share of pairs that the reward model, or the reward that a policy implies, "
           "orders correctly", "", "accuracy; rewards/accuracies"),
    Metric("{train,val}/score_margin", "score of the better text less that of the other, by either", "",
           "margin; rewards/margins"),
    Metric("{train,val}/reward_{chosen,rejected}", "`beta` times the log-ratio of an answer to the reference", "",
           "rewards/{chosen,rejected}"),
    Metric("{train,val}/logprob_{chosen,rejected}", "log-probability of a whole answer, nats", "",
           "logps/{chosen,rejected}"),
    Metric("{train,val}/kl", "KL to the reference that KTO counts gains and losses from, nats per answer", "", "kl"),
    Metric("train/tied_fraction", "share of prompts whose responses all have the same reward (online DPO)"),
    Metric("train/reward_difference", "mean absolute difference of a pair's rewards (REBEL)"),
    Metric("val/pairs", "held-out pairs"),
    Metric("val/pair_accuracy_{low,high}", "95 % interval of the accuracy"),
    Metric("val/pair_calibration_error", "mean absolute gap between sigmoid(score difference) and accuracy"),
    Metric("val/policy_score_{mean,std}", "scores of the policy's responses, before they are normalised"),
    Metric("val/policy_{accuracy,order}", "share of right samples, and how well the scores order right and wrong"),
)  # fmt: skip

SECTIONS = {
    "A step": STEP,
    "Generation": ROLLOUT,
    "Time, speed, memory": SPEED,
    "Validation": VALIDATION,
    "SFT, reward models, preferences": SUPERVISED,
}

# Names that a reward function cannot have, because reward/<reward> or val/<reward>_greedy would be another metric.
TAKEN = {name.partition("/")[2] for metric in STEP for name in metric.expanded() if name.startswith("reward/")}
TAKEN = {name for name in TAKEN if "<" not in name} | {"score"}

ABSENT = {
    "actor/loss (verl), loss (TRL)": "the sum of `loss/policy`, `loss/kl` and the entropy bonus by their weights",
    "critic/vpred_mean": "`value/mean`, before the update",
    "response/aborted_ratio, response_length_non_aborted/*": "no response is empty: an engine that fails is an error",
    "prompt_length/clip_ratio": "prompts longer than `max_tokens` are bad rows or dropped, and counted before the run",
    "variance_proxy/proxy3_pure_noise": "subtracts a gradient of parameters from one of logits",
    "best@k/std, worst@k/std, maj@k/std": "standard deviations over resamples, which exact means do not need",
    "global_seqlen/{minmax_diff,balanced_*}": "`perf/rank_tokens_*` are the tokens after balancing",
    "timing_s/{save_checkpoint,testing,*_profile}": "Lightning's profilers print these: `trainer.profiler: simple`",
    "perf/mfu/actor_infer": "the engine's speed is logged in tokens per second",
    "training/{global_step,epoch}": "the column `step`, one per prompt batch, and Lightning's `epoch`",
    "num_turns/*, tool_call_counts/*, agent_loop/*, tools/*": "there are no agents yet",
    "training/off_policy/*, fully_async/*, trainer/idle_ratio": "generation and training alternate: no stale rollouts",
    "rollout/moe/*, aux_loss": "routing of mixtures of experts is not measured, and they train without auxiliary loss",
    "rollout/spec_accept_*": "there is no speculative decoding",
    "distillation/*": "there is no distillation yet",
    "clip_ratio/{low,high}_*": "`policy/clip_fraction` counts both sides",
}


def table() -> str:
    """Return the document."""
    lines = [
        "# Metrics: ours, verl's and TRL's", "",
        "<!-- python -m lightning_rlhf.metric_names > docs/metrics.md -->", "",
        "The x-axis is the step: one prompt batch. `{a,b}` stands for either, `<k>` for 2, 4, 8, ... and the number of",
        "samples, `<reward>` for each reward function, `<key>` for a metric of one, `<role>` for a model,",
        "`<option>` for a rejection such as `sequence_mean_k3`. Means over tokens weight all tokens equally. A metric",
        "without any value is NaN. Metrics are over all ranks, seconds are those of the slowest rank;",
        "`time/evaluate_s` and `time/update_s` are measured on the first rank.", "",
        "If the validation data has at least two sources in a column `source` or `data_source`, all of `val/...`",
        "is also logged for each, as `val/<source>/...`. Compared with verl 0.9.1 and TRL 1.16.0;",
        "[differences.md](differences.md) lists intended differences.", "",
    ]  # fmt: skip
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| ours | unit, meaning | verl | TRL |", "|---|---|---|---|"]
        for metric in metrics:
            names = [f"`{name}`" if name else "" for name in (metric.name, metric.verl, metric.trl)]
            lines.append(f"| {names[0]} | {metric.meaning.replace('|', chr(92) + '|')} | {names[1]} | {names[2]} |")
        lines.append("")
    lines += ["## Not here", "", "| theirs | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in ABSENT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
