"""Horovod: launch lines, settings and training scripts as native recipes."""
