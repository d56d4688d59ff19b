"""The method as pure functions: tensors and plain floats in, tensors or named tuples out.

Nothing here knows a Config, a rank, a device policy, a logger or a file.

drift          expert counts, router drift
select         which responses Router Drift Control drops
quota          how many, and from which length bucket
registry       which methods there are, by the names of the config; imports no torch
seam           calls a method with what it names
advantages     rewards of a group to advantages, one file per method
surrogates     policy-gradient loss per token, one file per method
corrections    weights against the rollout policy, one file per method
aggregate      token losses to one number, one file per method
mismatch       how far the learner is from the rollout policy
kl             divergence to a reference policy, as a value and as a loss
ratio          guarded log-ratios shared by surrogates, corrections, mismatch and kl
tokens         what surrogates share: their result and the guards around it
outlier        which generator of a fleet stands out

Axes: B responses, S input positions, T positions of log-probs and masks, L MoE layers,
K experts chosen per token, E experts.
"""
