"""The roles of one run on several hosts: an agent per role behind ssh or srun, and the launcher that watches them.

`python -m asyncrl.remote`, which launch/ssh.sh and launch/slurm/job.sh call.
"""
