"""What happens when a process is told that it will end: it saves the running step in time.

A signal (signals.py) or a call is a notice. The step that is running ends and is saved, within a
deadline that a thread watches (preemption.py). Several ranks agree on one step (stop_step.py).
"""
