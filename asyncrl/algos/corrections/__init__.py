"""Weights that correct for sampling with another policy (mu) than the one that is trained (pi_old), one file each.

Weights are constants: nothing here passes a gradient. None knows of surrogates.
"""

from asyncrl.algos.corrections.tis import tis_weights

__all__ = ["tis_weights"]
