"""The only code that knows torchtitan. Its files, in the order of reading:

What is refused before a run: `checks.py`, `model_checks.py`. The life of a process: `train.py`, `ends.py`,
`agreement.py`, `dump_folder.py`, `checkpoints.py`, `hugging_face.py`, `cpu_device.py`. Training:
`trainer.py`, `dataloader.py`, `loss.py`, `validator.py`, `meshes.py`, `memory.py`, `metrics.py`,
`step_trace.py`. `configured.py` makes the job of a configuration, and `compat.py` holds every private name of
torch and torchtitan that is used.
"""
