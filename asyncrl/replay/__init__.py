"""The replay role: prompts out, groups in, takes to the learner. The one judge of age.

`queue` and what it is made of are pure (no socket, no clock of their own); `server` is the process.
Imports no torch and sees routes as bytes.
"""
