"""Plans and a cluster in, seconds out: what a job would do, without running it.

`step.py` predicts a step and `replicas.py` each replica of it, `choice.py` compares policies and `search.py`
degrees, `measured.py` puts rehearsed passes together, `calibrate.py` fits predictions to a run's passes, and
`calls.py` judges whether all ranks' collectives meet. Read `step.py` first.
"""
