"""The method as pure functions: tensors and plain floats in, tensors or named tuples out.

Nothing here knows a Config, a rank, a device policy, a logger or a file.

drift          expert counts, router drift
select         which responses Router Drift Control drops
quota          how many, and from which length bucket
advantages     rewards of a group to advantages
surrogates     policy-gradient loss per token
corrections    importance weights against the rollout policy
mismatch       how far the learner is from the rollout policy
aggregate      token losses to one number
kl             divergence to a reference policy, as a value and as a loss
ratio          guarded log-ratios shared by surrogates, corrections, mismatch and kl

Axes: B responses, S input positions, T positions of log-probs and masks, L MoE layers,
K experts chosen per token, E experts.
"""
