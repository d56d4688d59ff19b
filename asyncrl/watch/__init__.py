"""Commands that watch and steer a running job: `asyncrl status` and `asyncrl tune`. They talk to replay alone."""
