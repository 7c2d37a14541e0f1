"""The step loop: one thread that owns the model, its work, and which steps it computes together.

Import `step_loop` (the thread), `task` (its work and priorities) and `joint_rows` (several requests in one forward).
What a request or work in idle time needs does not belong here.
"""
