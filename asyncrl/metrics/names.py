"""Every metric a record can contain: its name, and what it is in one line.

`<id>`, `<set>`, `<word>`, `<i>`, `<k>`, `<l>`, `<n>`, `<d>`, `<lags>`, `<name>`, `<part>`, `<reason>` stand for a part
that varies. docs/metrics.md is this table in print; the dashboard layout may name nothing else.
"""

from __future__ import annotations

import re

VARIABLES: dict[str, str] = {
    "<id>": r"[^/]+",
    "<reason>": r"[a-z0-9_]+",
    "<name>": r"[a-z0-9_]+",
    "<set>": r"[^/]+",
    "<word>": r"[^/]+",
    "<i>": r"\d+",
    "<k>": r"\d+",
    "<l>": r"\d+",
    "<n>": r"\d+",
    "<d>": r"\d+",
    "<lags>": r"\d+(-\d+)?",
    "<part>": r"(first|middle|last)",
}

NAMES: dict[str, str] = {
    # policy
    "policy/reward": "mean reward of the responses of this update",
    "policy/response_length": "mean response length in tokens",
    "policy/entropy": "mean entropy of the policy over the loss tokens, in nats",
    "policy/truncated_fraction": "share of responses that ended at max_new_tokens",
    "policy/truncated_masked": "share of responses that do not train because they were cut off (truncated=mask)",
    "policy/truncated_masked_tokens": "share of the loss tokens that are left out for it, of those and what trains",
    "policy/truncated_penalised": "share of responses whose reward was lowered for their length (truncated=penalise)",
    "policy/refilled_fraction": "zero_variance=refill: groups of equal rewards that were dropped since the record "
    "before, as a share of those and the groups of this update",
    "policy/clip_fraction": "share of loss tokens whose ratio was clipped",
    "policy/zero_variance_fraction": "share of groups whose rewards are all equal (advantage exactly 0)",
    "policy/loss": "the loss that was minimised",
    "policy/kl_loss": "the part of it that is the KL term, algorithm.kl.coef included; with algorithm.kl.where=loss",
    "policy/ref_kl": "KL of the policy against the reference policy per loss token (k3): never negative; with "
    "algorithm.kl.coef > 0",
    "policy/ref_kl_k1": "the same as mean(log pi - log ref) (k1): may be negative",
    "policy/responses": "responses of this update",
    "policy/tokens": "loss tokens of this update, after the staleness mask and truncated=mask",
    "eval/sampled_accuracy": "held-out accuracy, sampled at the training temperature: mean reward over all sets",
    "eval/greedy_accuracy": "held-out accuracy, greedy decoding: mean reward of the greedy answers of all sets",
    "eval/response_length": "mean length of the sampled held-out responses",
    "eval/truncated_fraction": "share of the sampled held-out responses that ended at max_new_tokens",
    "eval/version": "update of the weights that were evaluated",
    "eval/epoch": "run epoch of the weights that were evaluated",
    "eval/count": "held-out answers: problems x (samples, and one more where greedy decoding is on)",
    "eval/failed": "held-out responses that were asked for and gave no answer; they count in no mean",
    # held-out accuracy by set (docs/evaluation.md)
    "eval/<set>/avg_at_<k>": "mean reward of k sampled answers per prompt of this set (avg@k); k is what was asked for",
    "eval/<set>/pass_at_<k>": "unbiased pass@k of this set, for the powers of two up to the samples asked for",
    "eval/<set>/maj_at_<k>": "reward of the most frequent of k extracted answers per prompt (maj@k)",
    "eval/<set>/greedy": "mean reward of the greedy answers of this set",
    "eval/<set>/length": "mean length of its sampled responses, in tokens (of the greedy ones without a sampled one)",
    "eval/<set>/truncated": "share of them that ended at max_new_tokens",
    "eval/<set>/no_answer": "share of them that give no answer; absent where the user's rewards name none",
    "eval/<set>/stderr": "standard error of avg_at_<k> (of greedy without a sampled answer), over prompts",
    "eval/<set>/ci_low": "lower end of its 95 % interval",
    "eval/<set>/ci_high": "upper end of its 95 % interval",
    "eval/<set>/prompts": "prompts of this set with an answer",
    "eval/<set>/count": "answers of this set",
    "eval/<set>/failed": "responses of this set that were asked for and gave no answer (scoring failed, no time)",
    "eval/<set>/part/<id>": "mean of a named part of the reward over its sampled responses",
    # parts of the reward and sources of the data (docs/shaping.md)
    "reward/<word>": "mean of a named part of the reward over the responses of this update that have it",
    "source/<word>/reward": "mean reward of the responses to the prompts of one data source",
    "source/<word>/length": "mean length of them, in tokens",
    "source/<word>/share": "their share of the responses of this update",
    "data/<word>": "prompts of all files that were left out while they were read, by reason (docs/data.md): overlong, "
    "duplicate, ...",
    # optimisation
    "optim/grad_norm": "gradient norm before clipping, over all ranks",
    "optim/lr": "learning rate of this update",
    "optim/skipped_updates": "batches so far that made no step (non-finite, or nothing left)",
    "optim/skipped/<reason>": "of those, for one reason: weight, log_prob, reference, loss, gradient (not finite on "
    "some rank), filtered (nothing left); docs/learner.md says where to look",
    "optim/stepped": "1 when this batch made an optimizer step, else 0",
    # mismatch of rollout and learner probabilities, per token
    "mismatch/kl_k1": "mean(log mu - log pi): unbiased, may be negative",
    "mismatch/kl_k3": "mean(r - 1 - log r), r = pi/mu: never negative",
    "mismatch/f_1.2": "share of tokens whose ratio or inverse ratio exceeds 1.2",
    "mismatch/f_2": "the same above 2; sustained values above 0.1 are the alarm",
    "mismatch/f_5": "the same above 5",
    "mismatch/f_10": "the same above 10",
    "mismatch/ess": "effective sample size of the ratios as a share in (0, 1]",
    "mismatch/weight_mean": "mean weight of algorithm.correction over the loss tokens that RDC kept",
    "mismatch/weight_zero": "share of these tokens that the correction leaves out (weight 0)",
    "mismatch/missing_logprobs": "tokens of this update without a rollout log-prob (weight 1)",
    "mismatch/refused_responses": "responses of this update with an impossible rollout log-prob, which replay should "
    "have refused; not trained",
    "mismatch/kept/kl_k1": "kl_k1 of the responses that RDC kept (or would keep, under observe)",
    "mismatch/kept/kl_k3": "kl_k3 of the responses that RDC kept (or would keep, under observe)",
    "mismatch/kept/f_2": "f_2 of the responses that RDC kept (or would keep, under observe)",
    "mismatch/filtered/kl_k1": "kl_k1 of the responses that RDC dropped (or would drop, under observe)",
    "mismatch/filtered/kl_k3": "kl_k3 of the responses that RDC dropped (or would drop, under observe)",
    "mismatch/filtered/f_2": "f_2 of the responses that RDC dropped (or would drop, under observe)",
    "mismatch/lag_<n>/kl_k1": "kl_k1 of the responses with lag n",
    "mismatch/lag_<n>/kl_k3": "kl_k3 of the responses with lag n",
    "mismatch/lags_<lags>/kl_k1": "kl_k1 of the responses whose lag is in this range (0, 1, 2-3, 4-7, 8-15, ...)",
    "mismatch/lags_<lags>/kl_k3": "kl_k3 of the responses whose lag is in this range",
    "mismatch/lags_<lags>/f_1.2": "f_1.2 of the responses whose lag is in this range",
    "mismatch/lags_<lags>/f_2": "f_2 of the responses whose lag is in this range",
    "mismatch/lags_<lags>/f_5": "f_5 of the responses whose lag is in this range",
    "mismatch/lags_<lags>/ess": "effective sample size of the responses whose lag is in this range",
    # router drift
    "drift/mean": "mean native drift of the responses that have one; under r3 and r2 drift/* only on updates that "
    "measured it",
    "drift/p10": "10th percentile of the drift",
    "drift/p50": "median drift",
    "drift/p90": "90th percentile of the drift",
    "drift/max": "largest drift",
    "drift/nonzero_fraction": "share of responses whose drift is not 0",
    "drift/undefined": "responses without a defined drift (no counted token, or routes missing)",
    "drift/routes_cut": "responses of this update whose first routes are unknown (the engine computed them again under "
    "newer weights): left out of drift, and native under r3",
    "drift/uncounted_fraction": "share of loss tokens that are left out of drift because their routes are unknown",
    "drift/bucket_<i>/mean": "mean drift in length bucket i",
    "drift/bucket_<i>/threshold": "lowest drift that was dropped (or would be, under observe) in length bucket i",
    "drift/layer_<l>": "mean drift of MoE layer l (its number in the model)",
    "drift/lag_<n>": "mean drift of the responses with lag n",
    "drift/lags_<lags>": "mean drift of the responses whose lag is in this range (0, 1, 2-3, 4-7, 8-15, ...)",
    "drift/depth_<part>": "mean drift over the first, middle or last third of the MoE layers",
    # use of the experts, by the learner's native routes of the counted tokens
    "experts/unused_fraction": "share of the experts of all layers that no token was routed to",
    "experts/layer_<l>/min_usage": "tokens of the least used expert of MoE layer l, as a multiple of even use",
    "experts/layer_<l>/max_usage": "tokens of the most used expert of MoE layer l, as a multiple of even use",
    # filter
    "filter/dropped": "responses that RDC really dropped in this update; 0 under observe",
    "filter/dropped_fraction": "share of responses with a drift that RDC dropped (or would drop, under observe)",
    "filter/effective_dropped_fraction": "the same without responses whose advantage is 0 anyway",
    "filter/zero_advantage_dropped": "responses with advantage 0 that RDC dropped (or would drop, under observe)",
    "filter/carry": "fraction of a response carried to the next update's quota",
    "filter/unfilled": "quota that could not be filled in this update",
    "filter/kept/length": "mean length of the responses that RDC kept (or would keep, under observe)",
    "filter/kept/reward": "mean reward of the responses that RDC kept (or would keep, under observe)",
    "filter/kept/abs_log_ratio": "mean |log pi/mu| of the responses that RDC kept (or would keep, under observe)",
    "filter/dropped/length": "mean length of the responses that RDC dropped (or would drop, under observe)",
    "filter/dropped/reward": "mean reward of the responses that RDC dropped (or would drop, under observe)",
    "filter/dropped/abs_log_ratio": "mean |log pi/mu| of the responses that RDC dropped (or would drop, under observe)",
    # staleness
    "staleness/lag_mean": "mean lag of the trained tokens, in updates",
    "staleness/lag_max": "largest lag of a trained token; never above staleness.max_lag",
    "staleness/lag_p10": "10th percentile of the lag of the trained responses",
    "staleness/lag_p90": "90th percentile of the lag of the trained responses",
    "staleness/responses_at_lag_<n>": "trained responses whose lag is n: the histogram of lag as numbers",
    "staleness/response_lag_mean": "mean lag of the trained responses (lag of the oldest trained token)",
    "staleness/stale_responses": "responses of this update with no token young enough",
    "staleness/mixed_responses": "responses of this update sampled by more than one version (weights.on_load)",
    "staleness/published": "update of the newest published weights",
    "staleness/waits": "takes so far that waited for groups about to become too old (staleness.stale: wait)",
    "staleness/wait_s": "seconds so far that takes waited for them",
    "staleness/masked_token_fraction": "share of tokens masked because they are too old",
    "staleness/masked_decile_<d>": "the same in length decile d (0 shortest, 9 longest)",
    "staleness/masked_position_<d>": "share of the tokens in tenth d of the response (0 first) that are masked",
    "staleness/left_out/length": "mean length of what was left out for its age",
    "staleness/left_out/reward": "mean reward of what was left out for its age",
    "staleness/left_out/lag": "mean lag of what was left out for its age",
    "staleness/left_out/count": "responses left out for their age so far",
    "staleness/trained/length": "mean length of what was trained",
    "staleness/trained/reward": "mean reward of what was trained",
    "staleness/trained/lag": "mean lag of what was trained",
    "staleness/trained/count": "responses trained so far",
    # replay
    "replay/queue_depth": "groups in the queue",
    "replay/leased": "groups being sampled",
    "replay/bytes": "payload bytes in the queue",
    "replay/peak_bytes": "most payload bytes at once so far; never above replay.capacity_bytes",
    "replay/kept": "finished groups that their generators keep until there is room",
    "replay/dropped/<reason>": "what replay dropped, returned or refused so far: docs/operations.md has each reason",
    "replay/idle/<reason>": "lease requests so far that got less than asked for: docs/operations.md has each reason",
    "replay/dropped_now/<reason>": "the same since the record before",
    "replay/refused_per_s/<reason>": "lease requests per second since the record before that got less than asked for",
    # fleet
    "generator/<id>/drift": "mean native drift of this generator's responses; under r3 and r2 only where it was "
    "measured",
    "generator/<id>/abs_log_ratio": "mean |log pi/mu| of this generator's responses",
    "generator/<id>/tokens_per_s": "tokens that this generator samples per second",
    "generator/<id>/busy_fraction": "share of the time this generator's engine is decoding",
    "generator/<id>/version": "update of the weights that this generator holds",
    "generator/<id>/lag": "mean lag of this generator's responses",
    "generator/<id>/responses": "responses of this generator in this update",
    "generator/<id>/alive": "1 while this generator sends heartbeats, else 0",
    "generator/<id>/loads": "versions loaded so far",
    "generator/<id>/load_s": "seconds spent loading so far",
    "generator/<id>/load_failures": "versions that could not be loaded so far",
    "generator/<id>/in_flight": "groups being sampled",
    "generator/<id>/reward_errors": "groups so far that went back because too few of their responses had a reward",
    "generator/<id>/verifier_errors": "responses so far left out of their groups: their verifier raised, crashed or "
    "returned no reward",
    "generator/<id>/verifier_timeouts": "responses so far left out of their groups: their verifier did not end in time",
    "generator/<id>/timeouts": "groups so far that were not finished near the end of their lease",
    "generator/<id>/waits": "weights.on_load abort and drain: requests so far that waited for new weights",
    "generator/<id>/resampled": "responses so far begun again: new weights (weights.on_load) or a server stopped them",
    "generator/<id>/retractions": "sglang: how often so far a response lost its KV for want of memory and ran again",
    "generator/<id>/cached_tokens": "sglang: prompt tokens so far that were in the server's prefix cache",
    "generator/<id>/reused_tokens": "embedded engine: tokens of earlier turns so far that the next turn of a "
    "conversation did not run again",
    "generator/<id>/conversations": "embedded engine: conversations of which it keeps keys, values and routes now",
    "generator/<id>/stale_prefix": "sglang: responses so far begun again: their cached prefix was of older weights",
    "generator/<id>/unsure_tokens": "sglang: tokens so far that are left out of the loss, since they were on their way "
    "while weights changed (docs/sglang.md)",
    "generator/<id>/failures": "leases that this generator gave back with an error, errors of its own and its deaths, "
    "as replay counted them since it was started",
    "generator/version_lowest": "update of the oldest weights that a living generator holds",
    "generator/version_mean": "mean update of the weights that living generators hold",
    "generator/version_highest": "update of the newest weights that a living generator holds",
    "generator/tokens_per_s_lowest": "tokens per second of the slowest living generator",
    "generator/tokens_per_s_mean": "mean tokens per second of the living generators",
    "generator/tokens_per_s_highest": "tokens per second of the fastest living generator",
    "generator/alive": "generators that send heartbeats",
    "sentinel/<id>/drift_z": "how far this generator's mean drift is above the rest of the fleet at equal lag, in "
    "robust standard deviations (docs/sentinel.md); of one in quarantine: of its last probe",
    "sentinel/<id>/log_ratio_z": "the same of its mean |log pi/mu|",
    "sentinel/<id>/joint_z": "both together: their sum by sqrt(2)",
    "sentinel/<id>/quarantined": "1 while this generator gets no leases because it differs from the fleet, else 0",
    "generator/failed_loads": "loads that failed so far, all generators",
    "verifier/errors": "responses so far that have no reward, all generators: the verifier, the user's reward or the "
    "environment raised, crashed or returned none; they are left out, never counted as 0",
    "verifier/timeouts": "responses so far that have no reward, all generators: it did not come in time",
    "verifier/restarts": "worker processes of rewards and environments that were replaced so far, all generators",
    # throughput
    "throughput/learner_tokens_per_s": "response tokens trained per second",
    "throughput/generator_tokens_per_s": "tokens sampled per second, all generators",
    "throughput/learner_busy_fraction": "share of the time the learner is not waiting for a take",
    "throughput/generator_busy_fraction": "mean busy share of the generators",
    "throughput/learner_idle/<reason>": "share of the time since the record before that the learner lost to one "
    "reason, pauses added up; with learner_busy_fraction they make 1 (docs/dashboard.md has each reason)",
    "throughput/generator_idle/<reason>": "share of the generators' time without decoding, mean of the living ones: "
    "loading is measured, the rest is split by the reasons of refused lease requests",
    "throughput/overlap_fraction": "share of the learner's step time during which generators decode",
    "throughput/sync_s": "seconds that the learner stood still for versions in this update; they are written meanwhile",
    "throughput/step_s": "seconds of this update, from take to commit",
    "throughput/wait_s": "seconds waited for this update's take",
    "throughput/update_s": "seconds between this record and the one before",
    "throughput/fused_scoring": "1 when scoring and update shared one forward, else 0",
    "throughput/micro_batches": "forwards of the scoring pass on each rank",
    "throughput/pad_fraction": "share of pads in the tokens that the scoring pass processed",
    "throughput/oversized_rows": "responses with prompt above learner.micro_batch_tokens: alone in a micro-batch",
    # weights
    "weights/write_s": "seconds to check, write and hash the last published version, while the learner goes on",
    "weights/reused": "shm, collective: versions so far that took the memory of a dropped one",
    "weights/held": "disk: how often so far an old version stayed because somebody was loading it",
    "weights/chunks": "zmq: chunks sent so far",
    "weights/bytes": "zmq: bytes of chunks sent so far",
    "weights/sent": "collective: versions sent to an engine so far",
    "weights/failed": "collective: sendings so far that ended early (time limit, broken group); the engine joins anew",
    "weights/killed": "collective: senders ended so far: the engine left, joined anew, hung or was silent for an hour",
    "weights/unsent": "zmq, collective: answers so far whose generator was gone or full; it asks again",
    "weights/refused": "zmq, collective: messages so far that were no request",
    "weights/refused_<reason>": "zmq, collective: connections so far not let in, by reason (docs/security.md)",
    # routing replay
    "r3/forced_fraction": "share of the scored rows whose routes were forced: 1 unless routes are unknown or broken",
    "r3/in_pass_drift": "drift of the native routes of the forced pass (upstream layers replayed): RDC ranks by it",
    "r2/forced_fraction": "share of the scored rows whose routes were forced to those at the start of their take: 1; "
    "absent where a take has one batch, which is natively routed",
    "r2/in_pass_drift": "as r3/in_pass_drift, of the pass on the routes of the start of the take",
    # the run
    "run/epoch": "how often the learner was started again in this run: a record undoes those of its update and later "
    "with a lower epoch",
    "run/checkpoint": "update of the newest checkpoint, -1 without one",
    "run/checkpoint_s": "seconds that the learner stood still for checkpoints since the record before",
    "run/checkpoint_write_s": "seconds in which the slowest rank wrote the newest one, beside the training",
    "run/checkpoint_failures": "checkpoints of this learner that came to nothing",
    "run/best": "update of the version in RUN/best (learner.keep_best); absent before the first evaluation is over",
    "run/best_value": "its value of that metric",
    "run/dump_s": "seconds that the learner stood still for the dump of this update (logging.dump_every)",
    "run/dump_bytes": "its size, the policy in it included; 0 when it failed",
    "run/dump_failures": "dumps of this learner that came to nothing so far",
    # alarms
    "alarm/<name>": "1 while this alarm is on, else 0 (docs/alarms.md)",
    "run/alarm_action_failures": "commands and pauses of alarms that failed under this learner; its log says why",
    # live settings (docs/tuning_live.md)
    "tune/changes": "number of the newest change by `asyncrl tune` that is in force for this update",
    "settings/max_lag": "staleness.max_lag in force",
    "settings/sync_every": "staleness.sync_every in force",
    "settings/patience": "staleness.patience in force",
    "settings/rdc_q": "algorithm.rdc.q in force",
    "settings/tis_cap": "algorithm.correction.cap in force",
    "settings/eps_low": "algorithm.eps_low in force",
    "settings/eps_high": "algorithm.eps_high in force",
    "settings/lr": "learner.lr in force: the peak; optim/lr is what the schedule made of it",
    "settings/groups_in_flight": "generator.groups_in_flight in force",
    # about the metrics themselves
    "metrics/nan": "values of this record that are not finite",
}


def pattern(name: str) -> str:
    """Regular expression of exactly this name, variable parts open: what TensorBoard charts take."""
    parts = re.split(r"(<[a-z]+>)", name)
    return "^" + "".join(VARIABLES.get(part) or re.escape(part) for part in parts) + "$"


def is_known(name: str) -> bool:
    """True when a record may contain `name`."""
    return any(re.match(pattern(known), name) for known in NAMES)
