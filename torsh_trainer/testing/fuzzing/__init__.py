"""A differential fuzzer: random tasks on random engines, beside a loop of plain PyTorch.

``python -m torsh_trainer.testing.fuzzing --combinations 1000`` draws a task (pieces of a model, a
loss, weights, an optimizer), knobs of the run, and the engines and numbers of processes that it
trains on, one after the other, each going on from the checkpoint of the one before. A combination
has to give the losses, gradient norms, parameters and evaluation of plain PyTorch, or an error
of ours that names what cannot be honoured.
"""
